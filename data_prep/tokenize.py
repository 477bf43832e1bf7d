"""Tokenize text files for training: PREFIX.bin, .idx and .manifest.json, or tars of tokens."""

# Run by path, Python looks for modules in this folder first, where this file would hide the
# standard module `tokenize`. That must end before anything else is imported; `sys` and `os` are
# always loaded already. The project's folder takes its place, so that no installation is needed.
import os
import sys

if not __package__:
    _here = os.path.dirname(os.path.realpath(__file__))
    _root = os.path.dirname(_here)
    sys.path[:] = [
        _root,
        *(p for p in sys.path if os.path.realpath(p or ".") not in (_here, _root)),
    ]

import argparse  # noqa: E402

EXAMPLES = """\
examples:
  python data_prep/tokenize.py --input corpus.jsonl --tokenizer tokenizer/ --output data/train
  python data_prep/tokenize.py --input 'web/*.jsonl.zst' books.parquet @more.list \\
      --tokenizer tokenizer.json --output data/mix --text-key doc.text --workers 8
  python data_prep/tokenize.py --input 'web/*.tar' --tokenizer tokenizer/ --output data/web \\
      --format webdataset --shard-mb 1024

The first writes data/train.bin (token ids), data/train.idx (where documents begin) and
data/train.manifest.json (counts, checksums, the tokenizer); the trainer is given data/train.

Kinds of input, told by suffix: .jsonl, .ndjson and .json hold one JSON object a line (a .json may
also be one array), .parquet has a column of text, a .txt file is one document, a .tar is a
WebDataset (the .txt of a sample, else its .json); all but parquet may end in .gz, .zst or .xz as
well. hf:NAME and hf:NAME@SPLIT go through the package `datasets`. @FILE is a list, one a line.
Documents keep the order of the inputs, whatever the number of workers.

Every --slice-mb of text is durable. A run that was killed goes on from the last such point when the
same command is given again, and the result is the same bytes. When everything is there, it says so
and does nothing.

What happens to text that is not as expected (the manifest counts each kind for each input):
  empty          nothing but whitespace, null: left out
  short, long    --min-chars, --max-chars: left out
  nul            a NUL character: kept
  bom            a byte order mark at the start of a file: dropped
  eos_inside     the text itself holds the EOS: kept; training takes it as the end of a document
  faults         missing_key, wrong_type, not_json, cut_line (a broken last line), invalid_utf8,
                 surrogate (half a pair), no_boundaries (above 4 million characters, and the
                 tokenizer or the text gives no place to cut), broken_file (a cut or broken archive)
A fault stops the tool with FILE:LINE and exit code 2. With --on-error skip the record (of a broken
file: its rest) is left out, and the exit code of a run that skipped something is 3."""


def available_cores() -> int:
    """Cores that this process may use (a Slurm job may use fewer than the machine has)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def part(text: str) -> tuple[int, int]:
    """2/8 as (2, 8)."""
    number, slash, count = text.partition("/")
    if not (slash and number.isdigit() and count.isdigit() and int(number) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part; write I/N with I from 0 to N - 1")
    return int(number), int(count)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line, parsed by argparse."""
    parser = argparse.ArgumentParser(
        prog="tokenize.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="FILE", help="files, patterns, @lists"
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="DIR_OR_JSON",
        help="Hugging Face tokenizer folder, or a tokenizer.json",
    )
    parser.add_argument(
        "--output", required=True, metavar="PREFIX", help="path of the output without suffix"
    )
    parser.add_argument(
        "--format",
        choices=["megatron", "webdataset"],
        default="megatron",
        help="megatron: .bin and .idx; webdataset: numbered tars of token arrays with an index "
        "(default: megatron)",
    )
    parser.add_argument(
        "--text-key",
        default="text",
        metavar="NAME",
        help="JSON field or parquet column that holds the text; a.b is field b of a "
        "(default: text)",
    )
    parser.add_argument(
        "--id-key", metavar="NAME", help="field with the name of a document, for --metadata"
    )
    parser.add_argument(
        "--metadata",
        action="store_true",
        help="also write name, source, line and tokens of each document (megatron: .docs.jsonl; "
        "webdataset: a .json beside each array)",
    )
    parser.add_argument(
        "--min-chars", type=int, default=0, metavar="N", help="leave out shorter documents"
    )
    parser.add_argument(
        "--max-chars", type=int, default=None, metavar="N", help="leave out longer documents"
    )
    parser.add_argument(
        "--on-error",
        choices=["stop", "skip"],
        default="stop",
        help="what to do about faulty input, see below (default: stop)",
    )
    parser.add_argument(
        "--prepend-bos", action="store_true", help="begin each document with the BOS token"
    )
    parser.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end each document with the tokenizer's EOS token (default: yes)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=available_cores(),
        metavar="N",
        help="processes (default: the cores this process may use, here %(default)s)",
    )
    parser.add_argument(
        "--encoder",
        choices=["tokenizers", "fastokens"],
        default="tokenizers",
        help="fastokens is a much faster package (pip install fastokens); its ids are compared "
        "with those of tokenizers at the start and now and then (default: tokenizers)",
    )
    parser.add_argument(
        "--slice",
        "--part",
        dest="part",
        type=part,
        default=(0, 1),
        metavar="I/N",
        help="only the I-th (from 0) of N runs of neighbouring files, for many machines at once; "
        "a plain .jsonl or .ndjson larger than an N-th of all is cut between lines (compressed "
        "files cannot be cut, nor other kinds); data_prep/merge.py puts the outputs together",
    )
    parser.add_argument(
        "--shard-mb",
        type=float,
        default=None,
        metavar="MB",
        help="bound of a .bin or .tar in millions of bytes; then there are PREFIX-00000 and so on "
        "(default: one .bin, or tars of 1024)",
    )
    parser.add_argument(
        "--slice-mb",
        type=float,
        default=64,
        metavar="MB",
        help="millions of bytes of text after which everything is made durable (default: 64)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace output that exists already"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the tool; the exit code (0, or 2 after a one-line error)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = parse_arguments(arguments)

    from data_prep.cli import SKIPPED, run_tool

    def work() -> int:
        from data_prep.build import Request, tokenize_files

        shard_mb = options.shard_mb
        if shard_mb is None and options.format == "webdataset":
            shard_mb = 1024.0
        faults = tokenize_files(
            Request(
                inputs=options.input,
                tokenizer=options.tokenizer,
                output=options.output,
                text_key=options.text_key,
                append_eod=options.append_eod,
                workers=options.workers,
                overwrite=options.overwrite,
                part=options.part,
                format=options.format,
                shard_bytes=None if shard_mb is None else int(shard_mb * 1e6),
                prepend_bos=options.prepend_bos,
                id_key=options.id_key,
                metadata=options.metadata,
                min_chars=options.min_chars,
                max_chars=options.max_chars,
                on_error=options.on_error,
                encoder=options.encoder,
                slice_bytes=int(options.slice_mb * 1e6),
                command=["data_prep/tokenize.py", *arguments],
            )
        )
        return SKIPPED if faults else 0

    return run_tool(work)


if __name__ == "__main__":
    sys.exit(main())
