"""Text, evaluation and table of the SmolLM2 linearisation (launchers/linearize_smollm2.sh).

    python benchmarks/linearize.py text --input /usr/share/doc --output corpus.jsonl --megabytes 120
    python benchmarks/linearize.py evaluate --config FILE --run RUN --output RUN.json
    python benchmarks/linearize.py table EVALUATION.json ...

`evaluate` goes once over held-out sequences with the teacher and a student (the last stage of RUN;
without --run the teacher itself). Cross entropy and divergence are those of training. The cloze
task: words of at least four letters that stand in the sequence earlier too, and count as filled in
if every token of the word is the likeliest one, given the text before it.
"""

import argparse
import gzip
import hashlib
import html
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SUFFIXES = (".txt", ".md", ".rst", ".html", ".htm", ".gz", "")
SHORTEST, LONGEST = 400, 200_000
"""Characters of a document that is taken."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    text = commands.add_parser("text", help="a corpus of documentation files")
    text.add_argument("--input", nargs="+", required=True, help="folders")
    text.add_argument("--output", required=True, help="JSON-lines file")
    text.add_argument("--megabytes", type=float, default=120.0, help="at most so much text")
    evaluate = commands.add_parser("evaluate", help="a student beside its teacher")
    evaluate.add_argument("--config", required=True, help="file of the distillation")
    evaluate.add_argument("--run", help="its run folder; default: the teacher alone")
    evaluate.add_argument("--name", help="in the table; default: the run folder's")
    evaluate.add_argument("--output", required=True, help="JSON file")
    evaluate.add_argument("--batches", type=int, default=16, help="of 16 sequences")
    evaluate.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    table = commands.add_parser("table", help="markdown of several evaluations")
    table.add_argument("files", nargs="+")
    args, settings = parser.parse_known_args(argv)
    if args.command == "text":
        return _text(args)
    if args.command == "table":
        print(_table([json.loads(Path(f).read_text()) for f in args.files]), end="")
        return 0
    return _evaluate(args, settings)


def _text(args: argparse.Namespace) -> int:
    """Documents in an order that does not depend on the file system."""
    seen, size, count = set(), 0, 0
    with open(args.output, "w", encoding="utf-8") as out:
        for path in _files(args.input):
            text = _read(path)
            digest = hashlib.sha256(text.encode()).digest()
            if not SHORTEST <= len(text) <= LONGEST or digest in seen:
                continue
            seen.add(digest)
            out.write(json.dumps({"text": text}) + "\n")
            size, count = size + len(text), count + 1
            if size >= args.megabytes * 1e6:
                break
    print(f"{args.output}: {count:,} documents, {size / 1e6:.1f}M characters")
    return 0 if count else 1


def _files(folders: Sequence[str]) -> Iterator[Path]:
    found = [p for folder in folders for p in Path(folder).rglob("*") if p.suffix in SUFFIXES]
    return iter(sorted(found, key=lambda p: hashlib.sha256(str(p).encode()).digest()))


def _read(path: Path) -> str:
    try:
        if not path.is_file() or path.stat().st_size > 4 * LONGEST:
            return ""
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = raw.decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError, gzip.BadGzipFile):
        return ""
    if "<html" in text[:2000].lower():
        text = re.sub(r"(?is)<(script|style).*?</\1>|<[^>]*>", " ", text)
        text = re.sub(r"[ \t]+", " ", re.sub(r"\s*\n\s*", "\n", html.unescape(text)))
    return text.strip() if "\x00" not in text else ""


def _evaluate(args: argparse.Namespace, settings: list[str]) -> int:
    from megatron_lt2.parallel import platform

    platform.install()
    import torch

    from megatron_lt2.config.load import load_saved
    from megatron_lt2.data.datasets import build_datasets, micro_batches
    from megatron_lt2.distill.load import load_settings
    from megatron_lt2.distill.plan import plan_stages
    from megatron_lt2.distill.teacher import load_teacher
    from megatron_lt2.kernels.backend import resolve_backend
    from megatron_lt2.parallel.start import start_ranks, stop_ranks
    from megatron_lt2.train import resolve_tokenizer
    from megatron_lt2.training.checkpoint_files import newest_complete
    from megatron_lt2.training.steps import DataFeed

    stage = plan_stages(load_settings(args.config, settings), assume=True)[0]
    config = stage.config
    config.data.sequence_length, config.data.num_workers = args.length, 0
    config.training.global_batch_size = config.training.micro_batch_size = 16
    config.training.steps, config.training.eval_batches = 1, args.batches
    config.run_dir = str(Path(args.output).with_suffix(".work"))
    tokenizer = resolve_tokenizer(config)
    start_ranks(config.parallel, 1)
    kernels = resolve_backend(config.precision.kernels, platform.device().type)
    teacher = load_teacher(config, stage.teacher, stage.teacher_model, kernels)
    student = teacher
    facts: dict[str, Any] = {"name": args.name or (Path(args.run).name if args.run else "teacher")}
    if args.run:
        last = sorted(Path(args.run).glob("stages/*/checkpoints"))[-1]
        folder = newest_complete(last)
        assert folder is not None, f"{last} has no complete checkpoint"
        model = load_saved(folder / "run_config.yaml").model
        student = load_teacher(config, folder, model, kernels)
        manifest = json.loads((folder / "manifest.json").read_text())
        facts |= {"stage": last.parent.name, "step": manifest["step"], "pattern": model.pattern}
        facts["tokens"] = sum(_tokens(p) for p in Path(args.run).glob("stages/*/checkpoints"))
    valid = build_datasets(config, tokenizer)[1]
    assert valid is not None, "there are validation batches"
    source = micro_batches(
        valid,
        range(args.batches),
        **{"global_batch": 16, "micro_batch": 16, "rank": 0, "replicas": 1, "num_workers": 0},
    )
    sums = torch.zeros(4, dtype=torch.double)
    words = [0, 0, 0]
    with torch.no_grad():
        for batch in DataFeed(source, config, tokenizer.eos_id):
            found, right = [], []
            for own in (teacher, student):
                logits = own(batch.tokens, batch.positions, packed_seq_params=batch.packing)
                logits = logits[0, :, : stage.teacher_model.vocab_size].float()
                found.append(logits.log_softmax(-1))
                right.append((logits.argmax(-1) == batch.labels[0]).tolist())
            labels = batch.labels[0]
            t, s = found
            sums[0] -= t.gather(-1, labels[:, None]).sum().item()
            sums[1] -= s.gather(-1, labels[:, None]).sum().item()
            sums[2] += (t.exp() * (t - s)).sum().item()
            sums[3] += len(labels)
            for places in cloze(labels.tolist(), args.length, tokenizer):
                words[0] += 1
                for n in (0, 1):
                    words[1 + n] += all(right[n][place] for place in places)
    stop_ranks()
    ce_teacher, ce, kl = (sums[:3] / sums[3]).tolist()
    facts |= {
        "ce": ce, "perplexity": math.exp(ce), "teacher_ce": ce_teacher, "kl": kl,
        "teacher_perplexity": math.exp(ce_teacher), "cloze_words": words[0],
        "teacher_cloze": words[1] / max(1, words[0]), "cloze": words[2] / max(1, words[0]),
        "held_out_tokens": int(sums[3]),
    }  # fmt: skip
    Path(args.output).write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts))
    return 0


def _tokens(checkpoints: Path) -> int:
    """Tokens of a stage."""
    from megatron_lt2.training.checkpoint_files import newest_complete

    newest = newest_complete(checkpoints)
    return (
        0 if newest is None else int(json.loads((newest / "manifest.json").read_text())["tokens"])
    )


def cloze(labels: list[int], length: int, tokenizer: Any) -> Iterator[list[int]]:
    """Places of the words to fill in: of each, where its tokens are labels.

    Args:
        labels: of packed rows of `length` tokens.
    """
    pieces = [tokenizer.backend.id_to_token(i) or "" for i in labels]
    for start in range(0, len(labels), length):
        seen: set[tuple[int, ...]] = set()
        word: list[int] = []
        for place in range(start, min(start + length, len(labels)) + 1):
            inside = place < min(start + length, len(labels))
            begins = not inside or not re.fullmatch(r"[A-Za-z]+", pieces[place])
            if begins and word:
                ids = tuple(labels[i] for i in word)
                letters = sum(len(pieces[i].lstrip("\u0120")) for i in word)
                if letters >= 4 and ids in seen and word[0] - start >= length // 8:
                    yield word
                seen.add(ids)
                word = []
            if inside and re.fullmatch("\u0120[A-Za-z]+", pieces[place]):
                word = [place]
            elif inside and word and not begins:
                word = [*word, place]
    return


def _table(rows: list[dict[str, Any]]) -> str:
    """One line a student; recovery is its share of the teacher's cloze accuracy."""
    lines = [
        "| student | tokens | KL | perplexity | teacher's | cloze | teacher's | recovery |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        share = row["cloze"] / row["teacher_cloze"] if row["teacher_cloze"] else float("nan")
        lines.append(
            f"| {row['name']} | {row.get('tokens', 0) / 1e6:.1f}M | {row['kl']:.4f} | "
            f"{row['perplexity']:.2f} | {row['teacher_perplexity']:.2f} | {row['cloze']:.1%} | "
            f"{row['teacher_cloze']:.1%} | {share:.1%} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
