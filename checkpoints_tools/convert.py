"""Convert checkpoints.

    python checkpoints_tools/convert.py import --source DIR --output RUN
    python checkpoints_tools/convert.py export --checkpoint RUN --output DIR
    python checkpoints_tools/convert.py verify --checkpoint RUN --hf DIR
    python checkpoints_tools/convert.py inspect RUN
    python checkpoints_tools/convert.py reshard --checkpoint RUN --output OTHER

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

DESCRIPTION = "Convert, compare and describe checkpoints of megatron_lt2."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; 0 on success, 2 with one line on stderr for a user's mistake, and 1 when
    `verify` finds a difference."""
    parser = argparse.ArgumentParser(prog="convert.py", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_add_import, _add_export, _add_verify, _add_inspect, _add_reshard):
        add(commands)
    args = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _add_import(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "import",
        help="make a run folder of a Hugging Face folder or a Megatron-LM checkpoint",
        description="Make a run folder whose checkpoint of step 0 holds the weights. Training "
        "starts from it with checkpoint.init_from.",
    )
    parser.add_argument(
        "--source",
        type=Path,
        required=True,
        help="Hugging Face folder, or iteration folder of a Megatron-LM torch_dist checkpoint",
    )
    parser.add_argument("--output", type=Path, required=True, help="the run folder to make")
    parser.add_argument(
        "--model", type=Path, help="YAML file with the model section of a Megatron-LM checkpoint"
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="tokenizer folder or tokenizer.json; default: the one in the source",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an import that is already there"
    )
    parser.set_defaults(run=_import)


def _import(args: argparse.Namespace) -> int:
    from checkpoints_tools.importing import import_model

    result = import_model(
        args.source,
        args.output,
        model=args.model,
        tokenizer=args.tokenizer,
        overwrite=args.overwrite,
    )
    print(
        f"{result.folder}: {result.parameters:,} parameters in {result.tensors} tensors, read as "
        f"{result.family}; train from it with --checkpoint.init_from {result.folder}"
    )
    return 0


def _add_export(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "export",
        help="write a Hugging Face folder",
        description="Write a Hugging Face folder. LT2 and Ouro load with trust_remote_code=True.",
    )
    _add_checkpoint(parser)
    parser.add_argument("--output", type=Path, required=True, help="the folder to make")
    parser.add_argument(
        "--family",
        choices=("llama", "lt2", "ouro"),
        help="names of the tensors; default: the first of ouro, llama, lt2 that has such a model",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="tokenizer folder or tokenizer.json; default: the one that the run keeps",
    )
    parser.add_argument(
        "--dtype",
        choices=("as-saved", "float32", "bfloat16", "float16"),
        default="as-saved",
        help="dtype of the weights; default: as-saved",
    )
    parser.add_argument(
        "--shard-size",
        type=_size,
        default=4 * 1000**3,
        metavar="SIZE",
        help="largest size of a weights file, e.g. 500MB; default: 4GB",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an export that is already there"
    )
    parser.add_argument(
        "--push", metavar="OWNER/NAME", help="then upload the folder to this private hub repository"
    )
    parser.set_defaults(run=_export)


def _export(args: argparse.Namespace) -> int:
    from checkpoints_tools.exporting import export_checkpoint
    from checkpoints_tools.hub import push

    result = export_checkpoint(
        args.checkpoint,
        args.output,
        family=args.family,
        tokenizer=args.tokenizer,
        dtype=args.dtype,
        shard_bytes=args.shard_size,
        overwrite=args.overwrite,
    )
    print(
        f"{result.folder}: {result.parameters:,} parameters ({result.dtype}) "
        f"of step {result.step}, from {result.checkpoint}, as {result.family}"
    )
    if args.push:
        print(f"uploaded to {push(result.folder, args.push)}")
    return 0


def _add_verify(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "verify",
        help="compare a checkpoint with a Hugging Face folder",
        description="Compare every tensor, then the logits of both on text. Ends with 1 if they "
        "differ and says where first.",
    )
    _add_checkpoint(parser)
    parser.add_argument("--hf", type=Path, required=True, help="the Hugging Face folder")
    parser.add_argument(
        "--against",
        choices=("tensors", "own", "hf"),
        default="own",
        help="own: logits of our transformers model with the folder's weights (default); hf: of "
        "the model that the folder itself names, its code included; tensors: no logits",
    )
    parser.add_argument("--text", type=Path, help="UTF-8 text to compare on; default: a paragraph")
    parser.add_argument(
        "--tokens", type=int, default=256, help="tokens of the text that are used; default: 256"
    )
    parser.add_argument(
        "--max-kl", type=float, default=1e-9, help="largest KL a token, in nats; default: 1e-9"
    )
    parser.set_defaults(run=_verify)


def _verify(args: argparse.Namespace) -> int:
    from checkpoints_tools.verifying import verify

    report = verify(
        args.checkpoint,
        args.hf,
        against=args.against,
        text=args.text,
        tokens=args.tokens,
        max_kl=args.max_kl,
    )
    print("\n".join(report.lines))
    return 0 if report.equal else 1


def _add_inspect(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "inspect",
        help="say what a checkpoint or a Hugging Face folder is",
        description="Say what a checkpoint or a Hugging Face folder is. Reads no weights.",
    )
    parser.add_argument("path", type=Path, help="run, checkpoint or Hugging Face folder")
    parser.add_argument("--tensors", action="store_true", help="also list every tensor")
    parser.set_defaults(run=_inspect)


def _inspect(args: argparse.Namespace) -> int:
    from checkpoints_tools.inspecting import describe

    print("\n".join(describe(args.path, tensors=args.tensors)))
    return 0


def _add_reshard(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "reshard",
        help="rewrite a checkpoint: its weights alone, or in another dtype",
        description="Rewrite a checkpoint without its optimizer. Another number of ranks needs no "
        "conversion: checkpoints are read at any layout.",
    )
    _add_checkpoint(parser)
    parser.add_argument("--output", type=Path, required=True, help="the run folder to make")
    parser.add_argument(
        "--dtype",
        choices=("as-saved", "float32", "bfloat16"),
        default="as-saved",
        help="dtype of the weights; what training keeps in fp32 stays so; default: as-saved",
    )
    parser.add_argument(
        "--keep-optimizer",
        action="store_true",
        help="copy everything, optimizer and random states included",
    )
    parser.set_defaults(run=_reshard)


def _reshard(args: argparse.Namespace) -> int:
    from checkpoints_tools.resharding import reshard

    for line in reshard(
        args.checkpoint, args.output, dtype=args.dtype, keep_optimizer=args.keep_optimizer
    ):
        print(line)
    return 0


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        help="a run's folder or its checkpoints folder (the newest complete one), or one iter_ "
        "folder",
    )


def _size(text: str) -> int:
    """Bytes of a size such as 500MB or 4GB."""
    number, unit = text.strip().upper(), 1
    for name, factor in (("KB", 1000), ("MB", 1000**2), ("GB", 1000**3), ("B", 1)):
        if number.endswith(name):
            number, unit = number.removesuffix(name), factor
            break
    try:
        value = int(float(number) * unit)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it like 500MB or 4GB")
    return value


if __name__ == "__main__":
    sys.exit(main())
