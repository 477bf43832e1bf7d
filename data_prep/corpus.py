"""Make a small training corpus from the text that every Python carries: its standard library."""

# See tokenize.py, which would hide the standard module `tokenize` from anything run from here.
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
example:
  python data_prep/corpus.py --output corpus/

writes corpus/corpus.jsonl with one document for each module of the standard library (its source,
with its docstrings) and for each help topic of pydoc: {"text": ..., "source": ...} a line. The same
Python gives the same bytes; nothing is downloaded."""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line, parsed by argparse."""
    parser = argparse.ArgumentParser(
        prog="corpus.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--max-mb",
        type=float,
        default=12.0,
        metavar="MB",
        help="largest size of the file in millions of bytes (default: 12)",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the tool; the exit code (0, or 2 after a one-line error)."""
    options = parse_arguments(argv)

    from data_prep.cli import run_tool

    def work() -> None:
        from data_prep.stdlib_text import write_corpus

        write_corpus(options.output, max_bytes=int(options.max_mb * 1e6))

    return run_tool(work)


if __name__ == "__main__":
    sys.exit(main())
