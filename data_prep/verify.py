"""Check token files: walk every document of every shard, and compare with the manifest."""

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
  python data_prep/verify.py data/train data/more

Of each output: the manifest and its counts, size and checksum of every file, the index (document by
document: where it begins, how long it is, whether it lies inside the file and right behind the one
before), every id (below the size of the vocabulary), the EOS at the end of every document if there
should be one, BOS likewise; of tars also the order and names of members, keys that come twice, and
the end of the archive. One line for each fault (the first 20 of an output); exit code 1 if there is
one, 2 if an output cannot be read at all. --no-checksums leaves the checksums out."""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line, parsed by argparse."""
    parser = argparse.ArgumentParser(
        prog="verify.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prefix", nargs="+", metavar="PREFIX", help="outputs without suffix")
    parser.add_argument(
        "--checksums",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also compare SHA-256 of every file (default: yes)",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the tool; the exit code."""
    options = parse_arguments(argv)

    from data_prep.cli import run_tool

    def work() -> int:
        from data_prep.walk import faults_of

        code = 0
        for prefix in options.prefix:
            faults, manifest = faults_of(prefix, checksums=options.checksums)
            for fault in faults:
                print(f"error: {fault}", file=sys.stderr)
            if faults:
                code = 1
            else:
                print(
                    f"good: {prefix}: {manifest['documents']} documents, {manifest['tokens']} "
                    f"tokens, {len(manifest['files'])} files"
                )
        return code

    return run_tool(work)


if __name__ == "__main__":
    sys.exit(main())
