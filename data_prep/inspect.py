"""Look at token files: documents as text, lengths, tokens of each source, a figure."""

# See tokenize.py: this file would hide the standard module `inspect` likewise.
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
  python data_prep/inspect.py data/train --documents 3
  python data_prep/inspect.py data/train --first 1000 --documents 2 --pieces
  python data_prep/inspect.py data/train --plot lengths.png

Prints counts, the tokens of each source, a histogram of document lengths, and documents with their
borders; --pieces shows every token by itself. The tokenizer is the one that the manifest names,
unless --tokenizer says where it lies now."""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line, parsed by argparse."""
    parser = argparse.ArgumentParser(
        prog="inspect.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prefix", metavar="PREFIX", help="an output without suffix")
    parser.add_argument("--tokenizer", metavar="DIR_OR_JSON", help="where the tokenizer lies now")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="first document shown")
    parser.add_argument("--documents", type=int, default=2, metavar="N", help="how many are shown")
    parser.add_argument(
        "--characters", type=int, default=600, metavar="N", help="of each document at most"
    )
    parser.add_argument("--pieces", action="store_true", help="show each token by itself")
    parser.add_argument("--plot", metavar="FILE.png", help="also draw lengths and sources")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the tool; the exit code (0, or 2 after a one-line error)."""
    options = parse_arguments(argv)

    from data_prep.cli import run_tool

    def work() -> None:
        from data_prep.overview import draw, report, show

        report(options.prefix)
        show(
            options.prefix,
            tokenizer=options.tokenizer,
            first=options.first,
            count=options.documents,
            characters=options.characters,
            pieces=options.pieces,
        )
        if options.plot:
            draw(options.prefix, options.plot)

    return run_tool(work)


if __name__ == "__main__":
    sys.exit(main())
