"""Train a byte-level BPE tokenizer on text files; writes a Hugging Face tokenizer folder."""

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
  python data_prep/train_tokenizer.py --input corpus.jsonl --output tokenizer/ --vocab-size 4096

writes tokenizer/tokenizer.json, tokenizer/tokenizer_config.json (so that transformers'
AutoTokenizer loads the folder) and tokenizer/training.json (what it was trained on). Token 0 is
<|endoftext|>, token 1 is <|pad|>. The same input gives the same tokenizer."""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line, parsed by argparse."""
    parser = argparse.ArgumentParser(
        prog="train_tokenizer.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="text files or glob patterns, of the kinds that tokenize.py reads",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--vocab-size",
        type=int,
        default=4096,
        metavar="N",
        help="tokens, the 256 bytes and 2 special ones included (default: 4096)",
    )
    parser.add_argument(
        "--text-key",
        default="text",
        metavar="NAME",
        help="JSON field or parquet column that holds the text (default: text)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a tokenizer that exists already"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the tool; the exit code (0, or 2 after a one-line error)."""
    options = parse_arguments(argv)

    from data_prep.cli import run_tool

    def work() -> None:
        from data_prep.bpe import train_files

        train_files(
            options.input,
            options.output,
            vocab_size=options.vocab_size,
            text_key=options.text_key,
            overwrite=options.overwrite,
        )

    return run_tool(work)


if __name__ == "__main__":
    sys.exit(main())
