"""Build one set of token files from text files, or find that it is already there."""

import os
import sys
import time
from contextlib import closing
from pathlib import Path

import megatron_lt2
from data_prep.cli import Progress
from data_prep.cutting import part_of
from data_prep.indexed_shard import dtype_for
from data_prep.inputs import Source, find_inputs
from data_prep.journal import Journal
from data_prep.output import Output, finish_interrupted_publish
from data_prep.progress import Tally, usable_slices
from data_prep.readers import read_batches
from data_prep.records import FAULTS
from data_prep.request import Request, is_up_to_date
from data_prep.workers import encode_all
from megatron_lt2.data.manifest import VERSION, Manifest, read_manifest, tokenizer_facts
from megatron_lt2.data.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Request", "tokenize_files"]


def tokenize_files(request: Request) -> int:
    """Write the token files and PREFIX.manifest.json, or say that they are up to date.

    Returns:
        How many faults were skipped; the manifest counts them by kind.

    Raises:
        ValueError: bad input, or the output exists and came from something else.
        OSError: the output cannot be written.
        RuntimeError: a worker process died.
    """
    tokenizer = load_tokenizer(request.tokenizer)
    request.check(tokenizer)
    prefix = os.path.abspath(os.path.expanduser(request.output))
    sources = part_of(find_inputs(request.inputs), request.part)
    dtype_for(tokenizer.vocab_size)
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    if finish_interrupted_publish(prefix):
        Journal(prefix).close(remove=True)
        print(f"{prefix}: finished the renames of a run that was killed at its very end")
    if not request.overwrite and is_up_to_date(prefix, sources, tokenizer, request):
        manifest = read_manifest(prefix)
        print(
            f"up to date: {prefix} has {manifest['documents']} documents, "
            f"{manifest['tokens']} tokens of these inputs"
        )
        return _faults([entry.get("notes", {}) for entry in manifest["inputs"]])
    return _build(prefix, sources, tokenizer, request)


def _faults(notes: list[dict[str, int]]) -> int:
    return sum(some.get(kind, 0) for some in notes for kind in FAULTS)


def _build(prefix: str, sources: list[Source], tokenizer: Tokenizer, request: Request) -> int:
    journal = Journal(prefix)
    run: _Run | None = None
    finished = False
    try:
        run = _Run(prefix, sources, tokenizer, request, journal)
        run.work()
        finished = True
    finally:
        if run is not None and not finished:
            run.leave()
        slices = len(journal.lines) - 1
        journal.close(remove=finished or slices < 1)
        if not finished and slices > 0:
            print(
                f"{slices} finished slices are kept; the same command goes on from there",
                file=sys.stderr,
            )
    return run.faults


class _Run:
    """One run from wherever the journal says to the end."""

    def __init__(
        self,
        prefix: str,
        sources: list[Source],
        tokenizer: Tokenizer,
        request: Request,
        journal: Journal,
    ) -> None:
        self.prefix, self.sources, self.tokenizer = prefix, sources, tokenizer
        self.request, self.journal = request, journal
        self.faults = 0
        key = {
            "tokenizer": dict(tokenizer_facts(tokenizer)),
            "text_key": request.text_key,
            "append_eod": request.append_eod,
            "format": request.format,
            "options": dict(request.options),
        }
        slices = usable_slices(journal, key, sources)
        layout = request.layout(dtype_for(tokenizer.vocab_size))
        try:
            self.output = Output(prefix, layout, [line["output"] for line in slices])
        except (ValueError, OSError) as error:
            if not slices:
                raise
            print(f"note: {error}; beginning anew", file=sys.stderr)
            slices = []
            journal.rewrite(journal.lines[:1])
            self.output = Output(prefix, layout, [])
        self.tally = Tally(sources)
        self.start = (0, 1)
        for line in slices:
            self.tally.restore(line["taken"])
            self.start = (line["next"][0], line["next"][1])
        if slices:
            print(
                f"{prefix}: going on after {len(slices)} finished slices "
                f"({self.output.documents} documents)"
            )

    def leave(self) -> None:
        """After a fault: keep what the journal can account for, and nothing else."""
        if len(self.journal.lines) > 1 or self.output.published:
            self.output.close()
        else:
            self.output.discard()

    def work(self) -> None:
        """Tokenize, publish and report."""
        request, output = self.request, self.output
        job = request.job(self.tokenizer)
        batches = read_batches(
            self.sources, job.fields, skip_faults=job.skip_faults, start=self.start
        )
        results = encode_all(batches, job, request.workers, tokenizer=self.tokenizer)
        started, before, in_slice = time.monotonic(), output.tokens, 0
        told = False
        with (
            closing(results),
            Progress(sum(source.to_read for source in self.sources)) as progress,
        ):
            progress.begin(sum(source.to_read for source in self.sources[: self.start[0]]))
            for result in results:
                output.add(result.data, result.lengths, result.metadata)
                self.tally.add(result.source_index, len(result.lengths), result.notes)
                in_slice += result.text_bytes
                if result.fault and not told:
                    told = True
                    print(f"skipped: {result.fault} (later ones are only counted)", file=sys.stderr)
                if in_slice >= request.slice_bytes:
                    self._mark(result.next)
                    in_slice = 0
                bytes_read = sum(source.bytes_read for source in self.sources)
                progress.update(bytes_read, output.documents, output.tokens, result.text_bytes)
        if not output.documents:
            raise ValueError(self._nothing())
        output.finish()
        output.publish(self._manifest())
        self._report(time.monotonic() - started, output.tokens - before)

    def _mark(self, place: tuple[int, int]) -> None:
        """Make a slice durable."""
        state = self.output.sync()
        taken = self.tally.take_slice(place[0])
        self.journal.append({"next": list(place), "output": state, "taken": taken})

    def _nothing(self) -> str:
        first, others = self.sources[0].path, len(self.sources) - 1
        more = f" (and {others} more files)" if others else ""
        total = self.tally.total()
        count = total.pop("empty", 0)
        empty = f"; {count} were empty" if count else ""
        rest = ", ".join(f"{count} {kind}" for kind, count in sorted(total.items()))
        return f"{first}{more}: no documents{empty}{'; ' + rest if rest else ''}"

    def _manifest(self) -> Manifest:
        request, output = self.request, self.output
        manifest: Manifest = {
            "format": request.format,
            "version": VERSION,
            "dtype": output.layout.dtype,
            "documents": sum(shard["documents"] for shard in output.shards),
            "tokens": sum(shard["tokens"] for shard in output.shards),
            "append_eod": request.append_eod,
            "text_key": request.text_key,
            "options": request.options,
            "tokenizer": tokenizer_facts(self.tokenizer),
            "files": output.files,
            "inputs": self.tally.inputs(),
            "command": request.command,
            "lt2_version": megatron_lt2.__version__,
        }
        if output.layout.numbered:
            manifest["shards"] = output.shards
        return manifest

    def _report(self, seconds: float, new_tokens: int) -> None:
        total = self.tally.total()
        shards = self.output.shards
        tokens = sum(shard["tokens"] for shard in shards)
        where = f"{self.prefix}.bin"
        if self.output.layout.numbered:
            where = f"{len(shards)} shards {self.prefix}-*"
        print(
            f"wrote {where}: {sum(shard['documents'] for shard in shards)} documents, "
            f"{tokens} tokens ({self.output.layout.dtype}) in {seconds:.1f} s "
            f"({new_tokens / max(seconds, 1e-9):,.0f} tokens/s); "
            f"skipped {total.get('empty', 0)} empty documents"
        )
        for kind, what in (("short", "below --min-chars"), ("long", "above --max-chars")):
            if total.get(kind):
                print(f"left out {total[kind]} documents {what}")
        self.faults = _faults([total])
        if self.faults:
            by_kind = ", ".join(f"{total[kind]} {kind}" for kind in FAULTS if total.get(kind))
            print(f"skipped {self.faults} faults: {by_kind}")
        if total.get("eos_inside"):
            print(
                f"note: {total['eos_inside']} documents contain {self.tokenizer.eos_token} in "
                "their own text; training takes each as the end of a document"
            )
