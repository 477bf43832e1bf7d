"""Where compiled kernels are kept: folders that survive a job and that all ranks of a node share.

Standard library only, because it runs before anything that could import Triton.
"""

import os
from collections.abc import MutableMapping
from pathlib import Path


def cache_root(environment: MutableMapping[str, str] = os.environ) -> Path:
    """LT2_CACHE_DIR, or ~/.cache/megatron_lt2."""
    given = environment.get("LT2_CACHE_DIR")
    return Path(given).expanduser().absolute() if given else Path.home() / ".cache/megatron_lt2"


def use_cache_folders(environment: MutableMapping[str, str] = os.environ) -> Path:
    """Have Triton keep its kernels, FLA its timings and torch.compile its code below `cache_root`;
    returns Triton's folder.

    A variable that is set already stays: it was chosen by somebody.
    """
    for name, folder in (("TRITON_CACHE_DIR", "triton"), ("TORCHINDUCTOR_CACHE_DIR", "inductor")):
        if not environment.get(name):
            environment[name] = str(cache_root(environment) / folder)
    return Path(environment["TRITON_CACHE_DIR"])
