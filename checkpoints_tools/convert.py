"""Convert checkpoints.

    python checkpoints_tools/convert.py export --checkpoint RUN/checkpoints --output DIR

One subcommand a job, each in its own function with its own imports, so that `--help` answers at
once.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

if __name__ == "__main__" and not __package__:
    # Run by path: Python put this file's folder first, but the packages lie one above.
    _here = Path(__file__).resolve().parent
    sys.path[:] = [str(_here.parent), *(p for p in sys.path if Path(p).resolve() != _here)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; 0 on success, 2 with one line on stderr for a user's mistake."""
    parser = argparse.ArgumentParser(
        prog="convert.py", description="Convert megatron_lt2 checkpoints."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_export(commands)
    args = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _add_export(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "export",
        help="write a Hugging Face folder",
        description="Write a Hugging Face folder that loads with trust_remote_code=True.",
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        help="a run's checkpoints folder (its newest complete checkpoint), or one iter_ folder",
    )
    parser.add_argument("--output", type=Path, required=True, help="the folder to make")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="tokenizer folder or tokenizer.json; default: the one that the run keeps",
    )
    parser.add_argument(
        "--dtype",
        choices=("as-saved", "float32", "bfloat16"),
        default="as-saved",
        help="dtype of the weights; default: as-saved",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an export that is already there"
    )
    parser.set_defaults(run=_export)


def _export(args: argparse.Namespace) -> int:
    from checkpoints_tools.lt2_export import export_checkpoint

    result = export_checkpoint(
        args.checkpoint,
        args.output,
        tokenizer=args.tokenizer,
        dtype=args.dtype,
        overwrite=args.overwrite,
    )
    print(
        f"{result.folder}: {result.parameters:,} parameters ({result.dtype}) "
        f"of step {result.step}, from {result.checkpoint}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
