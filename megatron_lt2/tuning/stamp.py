"""Which runs have all their kernels in the cache, and who fills it.

A stamp is a small file inside Triton's cache folder, so that it goes when the cache goes. Its name
is a hash of everything that decides which kernels a step launches and how they are compiled.
"""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import megatron_lt2
from megatron_lt2.atomic import write_json_atomic
from megatron_lt2.config.schema import RunConfig
from megatron_lt2.tuning.table import own_file, shipped_file

LOCK_SECONDS = 900.0
"""How long one process waits for another that fills the cache, then it does so itself."""


def say(text: str) -> None:
    """A line of progress."""
    print(f"warmup: {text}", flush=True)


def architecture() -> str:
    """Of the current GPU, as in sm_90."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def facts_of(config: RunConfig, architecture: str) -> dict[str, Any]:
    """What the kernels of a run's steps depend on."""
    parallel, data = asdict(config.parallel), asdict(config.data)
    return {
        "architecture": architecture,
        "software": {name: _version(name) for name in ("torch", "triton", "fla-core")},
        "sources": _sources_hash(architecture),
        "model": asdict(config.model),
        "parallel": {name: parallel[name] for name in ("tensor", "context", "sequence")},
        "context_exchange": config.parallel.context_exchange,
        "data": {name: data[name] for name in ("sequence_length", "isolate_documents")},
        "micro_batch_size": config.training.micro_batch_size,
        "precision": asdict(config.precision),
        "memory": asdict(config.memory),
        "megatron": asdict(config.megatron),
    }


def stamp_file(cache: Path, facts: dict[str, Any]) -> Path:
    """Where the stamp of `facts` lies in the cache folder."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return cache / "warm" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def write_stamp(path: Path, facts: dict[str, Any], **figures: Any) -> None:
    """Say that the cache has everything; the file can be read by people."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(path, json.loads(json.dumps({**figures, "facts": facts}, default=str)))


@contextmanager
def one_at_a_time(cache: Path, wait_s: float = LOCK_SECONDS) -> Iterator[None]:
    """Hold the cache's lock within the block, also against other nodes that share the folder.

    Where files cannot be locked, or the holder takes longer than `wait_s`, the block runs all the
    same: Triton's files are renamed into place, so two writers only do the same work twice.
    """
    cache.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(cache / "warmup.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    end = time.monotonic() + wait_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    break
                time.sleep(0.2)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        with suppress(OSError):
            os.close(descriptor)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _sources_hash(architecture: str) -> str:
    """Of this package's own kernels and of the tuned configurations."""
    digest = hashlib.sha256()
    folder = Path(megatron_lt2.__file__).parent
    for path in sorted(folder.glob("**/*_triton.py")):
        digest.update(path.read_bytes())
    for path in (shipped_file(architecture), own_file(architecture)):
        with suppress(OSError):
            digest.update(path.read_bytes())
    return digest.hexdigest()
