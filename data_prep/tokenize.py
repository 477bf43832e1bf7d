"""Tokenize text files into PREFIX.bin, PREFIX.idx and PREFIX.manifest.json for training."""

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
  python data_prep/tokenize.py --input 'web/*.jsonl.zst' books.parquet notes.txt \\
      --tokenizer tokenizer.json --output data/mix --text-key text --workers 8

The first writes data/train.bin (token ids), data/train.idx (where documents begin) and
data/train.manifest.json (counts, checksums, the tokenizer); the trainer is given data/train.

Kinds of input, told by suffix: .jsonl, .ndjson and .json hold one JSON object a line, .parquet has
a column of text, a .txt file is one document; all but parquet may end in .gz or .zst as well.
Documents keep the order of the inputs, whatever the number of workers. Empty ones are skipped and
counted. Run again with nothing changed, it says so and does nothing."""


def available_cores() -> int:
    """Cores that this process may use (a Slurm job may use fewer than the machine has)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line, parsed by argparse."""
    parser = argparse.ArgumentParser(
        prog="tokenize.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="FILE", help="text files or glob patterns"
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
        "--text-key",
        default="text",
        metavar="NAME",
        help="JSON field or parquet column that holds the text (default: text)",
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
        "--overwrite", action="store_true", help="replace output that exists already"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the tool; the exit code (0, or 2 after a one-line error)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = parse_arguments(arguments)

    from data_prep.cli import run_tool

    def work() -> None:
        from data_prep.build import Request, tokenize_files

        tokenize_files(
            Request(
                inputs=options.input,
                tokenizer=options.tokenizer,
                output=options.output,
                text_key=options.text_key,
                append_eod=options.append_eod,
                workers=options.workers,
                overwrite=options.overwrite,
                command=["data_prep/tokenize.py", *arguments],
            )
        )

    return run_tool(work)


if __name__ == "__main__":
    sys.exit(main())
