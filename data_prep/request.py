"""What a run of tokenize.py was asked for, and whether an output is that already."""

import os
from dataclasses import dataclass, field

from data_prep.encoders import check_available
from data_prep.encoding import Job
from data_prep.inputs import Source
from data_prep.output import Layout
from data_prep.readers import sha256_of
from megatron_lt2.data.manifest import (
    InputFacts,
    Manifest,
    Options,
    data_paths,
    manifest_path,
    read_manifest,
)
from megatron_lt2.data.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the command line asked for."""

    inputs: list[str]
    tokenizer: str
    output: str
    text_key: str = "text"
    append_eod: bool = True
    workers: int = 1
    overwrite: bool = False
    command: list[str] = field(default_factory=list)
    part: tuple[int, int] = (0, 1)
    """(i, n): of the inputs only the i-th of n runs, see `cutting.part_of`."""
    format: str = "megatron"
    shard_bytes: int | None = None
    prepend_bos: bool = False
    id_key: str | None = None
    metadata: bool = False
    min_chars: int = 0
    max_chars: int | None = None
    on_error: str = "stop"
    encoder: str = "tokenizers"
    slice_bytes: int = 1 << 26
    """Text between two points from which a killed run can go on."""

    def check(self, tokenizer: Tokenizer) -> None:
        """Refuse what cannot be.

        Raises:
            ValueError: names the option.
        """
        check_available(self.encoder)
        if self.workers < 1:
            raise ValueError(f"--workers: {self.workers} is less than 1")
        if os.path.basename(self.output) in ("", ".", ".."):
            raise ValueError(
                f"--output: {self.output} is a folder; give a prefix such as "
                f"{os.path.join(self.output, 'train')}"
            )
        if self.prepend_bos and tokenizer.bos_id is None:
            raise ValueError(
                f"--prepend-bos: {tokenizer.path} names no BOS token; leave the option out or name "
                "one as bos_token in tokenizer_config.json"
            )
        for name in ("shard_bytes", "slice_bytes", "max_chars"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.split('_')[0]}...: {value} is less than 1")
        if self.max_chars is not None and self.max_chars < self.min_chars:
            raise ValueError(
                f"--max-chars {self.max_chars} is below --min-chars {self.min_chars}: nothing is "
                "left"
            )

    @property
    def options(self) -> Options:
        """What a manifest says of it."""
        return {
            "prepend_bos": self.prepend_bos,
            "id_key": self.id_key,
            "metadata": self.metadata,
            "min_chars": self.min_chars,
            "max_chars": self.max_chars,
            "shard_bytes": self.shard_bytes,
            "on_error": self.on_error,
            "part": list(self.part),
        }

    def job(self, tokenizer: Tokenizer) -> Job:
        """What the workers need to know."""
        return Job(
            tokenizer_path=tokenizer.path,
            tokenizer_sha256=tokenizer.sha256,
            text_key=self.text_key,
            append_eod=self.append_eod,
            prepend_bos=self.prepend_bos,
            id_key=self.id_key,
            metadata=self.metadata,
            min_chars=self.min_chars,
            max_chars=self.max_chars,
            skip_faults=self.on_error == "skip",
            encoder=self.encoder,
        )

    def layout(self, dtype: str) -> Layout:
        """What the shards are."""
        number, count = self.part
        return Layout(
            format=self.format,
            dtype=dtype,
            shard_bytes=self.shard_bytes,
            metadata=self.metadata,
            key_prefix=f"{number:04d}_" if count > 1 else "",
        )


def is_up_to_date(
    prefix: str, sources: list[Source], tokenizer: Tokenizer, request: Request
) -> bool:
    """Whether the output exists and is what the request would make.

    Raises:
        ValueError: it exists and is something else.
    """
    present = [path for path in (*data_paths(prefix), manifest_path(prefix)) if path.exists()]
    if not present:
        return False
    if not manifest_path(prefix).exists():
        raise ValueError(
            f"{present[0]}: exists without a manifest, so it was made by something else; "
            "choose another --output or pass --overwrite"
        )
    try:
        manifest = read_manifest(prefix)
    except ValueError as error:
        advice = "" if "--overwrite" in str(error) else "; pass --overwrite to build it anew"
        raise ValueError(f"{error}{advice}") from None
    difference = _difference(manifest, sources, tokenizer, request)
    if difference is not None:
        raise ValueError(
            f"{manifest_path(prefix)}: exists and was made with {difference}; "
            "choose another --output or pass --overwrite"
        )
    return True


def _difference(
    manifest: Manifest, sources: list[Source], tokenizer: Tokenizer, request: Request
) -> str | None:
    """The first thing that differs between a manifest and a request, in words."""
    if manifest["tokenizer"]["sha256"] != tokenizer.sha256:
        return "another tokenizer"
    if manifest["tokenizer"]["eos_id"] != tokenizer.eos_id:
        return "another EOS token"
    if manifest["append_eod"] != request.append_eod:
        return "the opposite of --append-eod"
    if manifest.get("text_key") != request.text_key:
        return f"--text-key {manifest.get('text_key')}"
    if manifest["format"] != request.format:
        return f"--format {manifest['format']}"
    before = manifest.get("options")
    if before is not None:
        for name, value in request.options.items():
            if before.get(name) != value:
                return f"another {name.replace('_', ' ')} ({before.get(name)})"
    inputs = manifest["inputs"]
    if [_place(entry) for entry in inputs] != [(s.path, s.span) for s in sources]:
        return "other input files"
    for entry, source in zip(inputs, sources, strict=True):
        if source.kind == "hub":
            continue
        same = entry["bytes"] == source.size and (
            entry["mtime_ns"] == source.mtime_ns or entry["sha256"] == sha256_of(source)
        )
        if not same:
            return f"another version of {source.path}"
    return None


def _place(entry: InputFacts) -> tuple[str, tuple[int, int] | None]:
    """An input of a manifest: its path, and which bytes of it were read if not all."""
    span = entry.get("span")
    return entry["path"], (span[0], span[1]) if span else None
