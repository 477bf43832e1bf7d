"""Build one set of token files from text files, or find that it is already there."""

import os
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import megatron_lt2
from data_prep.cli import Progress
from data_prep.readers import Source, find_inputs, read_batches
from data_prep.workers import Job, encode_all
from data_prep.writer import IndexedWriter, dtype_for, finish_interrupted_publish
from megatron_lt2.atomic import sha256_file
from megatron_lt2.data.manifest import (
    FORMAT,
    VERSION,
    FileFacts,
    InputFacts,
    Manifest,
    data_paths,
    manifest_path,
    read_manifest,
    tokenizer_facts,
)
from megatron_lt2.data.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the command line asked for."""

    inputs: list[str]
    tokenizer: str
    output: str
    text_key: str
    append_eod: bool
    workers: int
    overwrite: bool
    command: list[str]


def tokenize_files(request: Request) -> None:
    """Write PREFIX.bin, PREFIX.idx and PREFIX.manifest.json, or say that they are up to date.

    Raises:
        ValueError: bad input, or the output exists and came from something else.
        OSError: the output cannot be written.
        RuntimeError: a worker process died.
    """
    if request.workers < 1:
        raise ValueError(f"--workers: {request.workers} is less than 1")
    if os.path.basename(request.output) in ("", ".", ".."):
        raise ValueError(
            f"--output: {request.output} is a folder; give a prefix such as "
            f"{os.path.join(request.output, 'train')}"
        )
    prefix = os.path.abspath(os.path.expanduser(request.output))
    tokenizer = load_tokenizer(request.tokenizer)
    sources = find_inputs(request.inputs)
    dtype_for(tokenizer.vocab_size)
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    if finish_interrupted_publish(prefix):
        print(f"{prefix}: finished the renames of a run that was killed at its very end")
    if not request.overwrite and _up_to_date(prefix, sources, tokenizer, request):
        manifest = read_manifest(prefix)
        print(
            f"up to date: {prefix}.bin has {manifest['documents']} documents, "
            f"{manifest['tokens']} tokens of these inputs"
        )
        return
    _build(prefix, sources, tokenizer, request)


def _up_to_date(prefix: str, sources: list[Source], tokenizer: Tokenizer, request: Request) -> bool:
    """Whether the output exists and is what the request would make.

    Raises:
        ValueError: it exists and is something else.
    """
    present = [path for path in (*data_paths(prefix), manifest_path(prefix)) if path.exists()]
    if not present:
        return False
    if not manifest_path(prefix).exists():
        raise ValueError(
            f"{present[0]}: exists without a manifest, so it was made by something else; "
            "choose another --output or pass --overwrite"
        )
    try:
        manifest = read_manifest(prefix)
    except ValueError as error:
        advice = "" if "--overwrite" in str(error) else "; pass --overwrite to build it anew"
        raise ValueError(f"{error}{advice}") from None
    difference = _difference(manifest, sources, tokenizer, request)
    if difference is not None:
        raise ValueError(
            f"{manifest_path(prefix)}: exists and was made with {difference}; "
            "choose another --output or pass --overwrite"
        )
    return True


def _difference(
    manifest: Manifest, sources: list[Source], tokenizer: Tokenizer, request: Request
) -> str | None:
    """The first thing that differs between a manifest and a request, in words."""
    if manifest["tokenizer"]["sha256"] != tokenizer.sha256:
        return "another tokenizer"
    if manifest["tokenizer"]["eos_id"] != tokenizer.eos_id:
        return "another EOS token"
    if manifest["append_eod"] != request.append_eod:
        return "the opposite of --append-eod"
    if manifest.get("text_key") != request.text_key:
        return f"--text-key {manifest.get('text_key')}"
    before = manifest["inputs"]
    if [entry["path"] for entry in before] != [source.path for source in sources]:
        return "other input files"
    for entry, source in zip(before, sources, strict=True):
        same = entry["bytes"] == source.size and (
            entry["mtime_ns"] == source.mtime_ns or entry["sha256"] == sha256_file(source.path)
        )
        if not same:
            return f"another version of {source.path}"
    return None


def _build(prefix: str, sources: list[Source], tokenizer: Tokenizer, request: Request) -> None:
    job = Job(tokenizer.path, tokenizer.sha256, request.text_key, request.append_eod)
    documents = [0] * len(sources)
    skipped = [0] * len(sources)
    with_eos_inside = 0
    started = time.monotonic()
    total_bytes = sum(source.size for source in sources)
    results = encode_all(
        read_batches(sources, request.text_key), job, request.workers, tokenizer=tokenizer
    )
    with (
        IndexedWriter(prefix, dtype_for(tokenizer.vocab_size)) as writer,
        closing(results),
        Progress(total_bytes) as progress,
    ):
        for result in results:
            writer.add_documents(result.data, result.lengths)
            documents[result.source_index] += len(result.lengths)
            skipped[result.source_index] += result.skipped_empty
            with_eos_inside += result.with_eos_inside
            bytes_read = sum(source.bytes_read for source in sources)
            progress.update(bytes_read, len(writer.lengths), writer.tokens)
        if not writer.lengths:
            more = f" (and {len(sources) - 1} more files)" if len(sources) > 1 else ""
            empty = f"; {sum(skipped)} were empty" if sum(skipped) else ""
            raise ValueError(f"{sources[0].path}{more}: no documents{empty}")
        facts = writer.finish()
        inputs: list[InputFacts] = [
            {
                "path": source.path,
                "bytes": source.size,
                "mtime_ns": source.mtime_ns,
                "sha256": source.sha256,
                "documents": documents[index],
                "skipped_empty": skipped[index],
            }
            for index, source in enumerate(sources)
        ]
        writer.publish(_manifest(writer, facts, inputs, tokenizer, request))
    seconds = time.monotonic() - started
    print(
        f"wrote {prefix}.bin: {sum(documents)} documents, {writer.tokens} tokens ({writer.dtype}) "
        f"in {seconds:.1f} s ({writer.tokens / seconds:,.0f} tokens/s); "
        f"skipped {sum(skipped)} empty documents"
    )
    if with_eos_inside:
        print(
            f"note: {with_eos_inside} documents contain {tokenizer.eos_token} in their own text; "
            "training takes each as the end of a document"
        )


def _manifest(
    writer: IndexedWriter,
    facts: dict[str, FileFacts],
    inputs: list[InputFacts],
    tokenizer: Tokenizer,
    request: Request,
) -> Manifest:
    return {
        "format": FORMAT,
        "version": VERSION,
        "dtype": writer.dtype,
        "documents": len(writer.lengths),
        "tokens": writer.tokens,
        "append_eod": request.append_eod,
        "text_key": request.text_key,
        "tokenizer": tokenizer_facts(tokenizer),
        "files": facts,
        "inputs": inputs,
        "command": request.command,
        "lt2_version": megatron_lt2.__version__,
    }
