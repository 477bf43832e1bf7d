"""Put the parts of a tokenizing job array together, as one process writes it."""

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
import re  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

if TYPE_CHECKING:
    from megatron_lt2.data.manifest import Manifest

SAME = ("format", "dtype", "append_eod", "text_key", "tokenizer")
"""What the parts must agree on."""

EXAMPLES = """\
example:
  python data_prep/merge.py --output data/train --parts data/train.parts

Parts are the outputs data/train.parts/0000, 0001, ... of `tokenize.py --slice I/N`, or those whose
prefixes are named after --parts. Documents keep the order of the parts; the result is byte for byte
what one process writes for all inputs. Memory does not grow with the data; the parts are kept."""


def merge(output: str, parts: list[str], command: list[str]) -> "Manifest":
    """Write an output with the documents of all parts, in their order.

    Raises:
        ValueError: a part is missing or not whole, parts differ in tokenizer or settings, or the
            output exists.
        OSError: it cannot be written.
    """
    import megatron_lt2
    from data_prep.cutting import join_inputs
    from data_prep.journal import Journal
    from data_prep.output import Layout, Output, finish_interrupted_publish
    from data_prep.shard_reader import has_metadata, pieces_of_output
    from megatron_lt2.data.manifest import VERSION, Manifest, manifest_path, read_manifest

    if not parts:
        raise ValueError(f"{output}: no parts to merge")
    if finish_interrupted_publish(output) or manifest_path(output).exists():
        raise ValueError(f"{manifest_path(output)}: exists; remove it to merge again")
    manifests = [read_manifest(part, checksums=True) for part in parts]
    for part, manifest in zip(parts[1:], manifests[1:], strict=True):
        _check_same(part, manifest, parts[0], manifests[0])
    first = manifests[0]
    options = first.get("options")
    layout = Layout(
        format=first["format"],
        dtype=first["dtype"],
        shard_bytes=options["shard_bytes"] if options else None,
        metadata=has_metadata(first),
    )
    Path(output).absolute().parent.mkdir(parents=True, exist_ok=True)
    journal = Journal(output)
    writer = None
    try:
        writer = Output(output, layout, [])
        for part, manifest in zip(parts, manifests, strict=True):
            for piece in pieces_of_output(part, manifest):
                writer.add(piece.data, piece.lengths, piece.metadata)
        writer.finish()
        result: Manifest = {
            **first,
            "version": VERSION,
            "documents": sum(shard["documents"] for shard in writer.shards),
            "tokens": sum(shard["tokens"] for shard in writer.shards),
            "files": writer.files,
            "inputs": join_inputs(
                [entry for manifest in manifests for entry in manifest["inputs"]]
            ),
            "command": command,
            "lt2_version": megatron_lt2.__version__,
        }
        if options:
            result["options"] = {**options, "part": [0, 1]}
        if layout.numbered:
            result["shards"] = writer.shards
        writer.publish(result)
    except BaseException:
        if writer is not None and not writer.published:
            writer.discard()
        raise
    finally:
        journal.close(remove=True)
    return result


def _check_same(part: str, manifest: "Manifest", other: str, first: "Manifest") -> None:
    """Refuse parts that do not belong together."""
    for name in SAME:
        ours, theirs = manifest.get(name), first.get(name)
        if name == "tokenizer":  # wherever it lay
            ours, theirs = ({**facts, "path": ""} for facts in (ours, theirs))  # type: ignore[dict-item]
        if ours != theirs:
            raise ValueError(f"{part}: its {name} is not that of {other}")
    ours, theirs = ({**m.get("options", {}), "part": None} for m in (manifest, first))
    if ours != theirs:
        changed = [key for key in ours | theirs if ours.get(key) != theirs.get(key)]
        raise ValueError(f"{part}: its {', '.join(sorted(changed))} is not that of {other}")


def part_prefixes(folder: str) -> list[str]:
    """The prefixes 0000, 0001, ... of a folder of parts.

    Raises:
        ValueError: one is missing.
    """
    names = sorted(
        match.group(1)
        for path in Path(folder).glob("*.manifest.json")
        if (match := re.fullmatch(r"(\d{4,})\.manifest\.json", path.name))
    )
    for number, name in enumerate(names):
        if int(name) != number:
            raise ValueError(f"{folder}: part {number:04d} is missing; run its array element again")
    _check_count(folder, names)
    return [str(Path(folder) / name) for name in names]


def _check_count(folder: str, names: list[str]) -> None:
    """The last parts may be missing too: each part knows of how many it is one."""
    from megatron_lt2.data.manifest import parse_manifest

    for name in names[:1]:
        manifest = parse_manifest(Path(folder) / f"{name}.manifest.json")
        count = manifest.get("options", {}).get("part", [0, len(names)])[1]
        if count > len(names):
            raise ValueError(
                f"{folder}: part {len(names):04d} is missing ({len(names)} of {count} are there); "
                "run its array element again"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Merge; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="merge.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", required=True, metavar="PREFIX", help="without suffix")
    parser.add_argument(
        "--parts",
        required=True,
        nargs="+",
        metavar="DIR",
        help="folder of 0000, 0001, ..., or the prefixes of finished outputs",
    )
    args = parser.parse_args(argv)
    words = ["data_prep/merge.py", *(sys.argv[1:] if argv is None else argv)]

    from data_prep.cli import run_tool

    def work() -> None:
        parts = args.parts
        if len(parts) == 1 and os.path.isdir(parts[0]):
            parts = part_prefixes(parts[0])
        done = merge(args.output, parts, words)
        print(f"wrote {args.output}: {done['documents']} documents, {done['tokens']} tokens")

    return run_tool(work)


if __name__ == "__main__":
    sys.exit(main())
