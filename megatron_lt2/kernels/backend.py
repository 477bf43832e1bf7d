"""Which kernels run, which software FLA's kernels need, and how they are imported.

`megatron_lt2.kernels.guards` holds the conditions on single calls.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from packaging.version import Version
from torch import Tensor

Backend = Literal["fla", "torch"]
State = Tensor | tuple[Tensor, ...]

FLA_MIN = Version("0.6.0")
"""Older releases have wrong gradients (fla-org/flash-linear-attention #1115, #1140)."""

HOPPER_BAD_TRITON = (Version("3.4.0"), Version("3.7.1"))
"""First bad and first good version: gated gradients are wrong on Hopper (FLA #640)."""

INSTALL_FLA = 'pip install "fla-core==0.6.0" "triton>=3.7.1"'
USE_TORCH = "or set precision.kernels=torch"


def _installed(distribution: str) -> Version | None:
    try:
        return Version(metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return None


def fla_version() -> Version | None:
    """Installed version of fla-core, which holds FLA's kernels; None without it."""
    return _installed("fla-core") or _installed("flash-linear-attention")


def triton_version() -> Version | None:
    """Installed version of Triton; None without it."""
    return _installed("triton")


def is_hopper() -> bool:
    """Whether the current GPU is of NVIDIA's Hopper generation (H100, H200)."""
    on_nvidia = torch.version.cuda is not None and torch.cuda.is_available()
    return on_nvidia and torch.cuda.get_device_capability()[0] == 9


def interpreting() -> bool:
    """Whether Triton interprets kernels on the CPU, as the tests do."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def check_fla_installed() -> None:
    """Refuse a software stack in which FLA is missing or known to compute wrong results.

    Triton before 3.8 has one more defect on Hopper, in GLA with states stored as [V, K]; states
    here are [K, V].

    Raises:
        RuntimeError: one sentence that says what to install.
    """
    fla, triton = fla_version(), triton_version()
    if fla is None:
        raise RuntimeError(f"FLA kernels need flash-linear-attention: {INSTALL_FLA}, {USE_TORCH}.")
    if fla < FLA_MIN:
        raise RuntimeError(
            f"fla-core {fla} has wrong gradients, at least {FLA_MIN} is needed:"
            f" {INSTALL_FLA}, {USE_TORCH}."
        )
    if triton is None:
        raise RuntimeError(f"FLA kernels need Triton: {INSTALL_FLA}, {USE_TORCH}.")
    first_bad, first_good = HOPPER_BAD_TRITON
    if first_bad <= triton < first_good and is_hopper():
        raise RuntimeError(
            f"Triton {triton} computes wrong gradients on Hopper GPUs, at least {first_good} is"
            f' needed: pip install "triton>={first_good}", {USE_TORCH}.'
        )


def resolve_backend(choice: str, device_type: str) -> Backend:
    """Turn the setting precision.kernels into the backend to use.

    Args:
        choice: "auto" (FLA on a CUDA GPU, torch elsewhere), "fla" or "torch".
        device_type: "cuda", "cpu", ..., where the model runs.

    Raises:
        ValueError: unknown choice, or FLA on a device without Triton.
        RuntimeError: FLA is to be used, but is missing or known to be wrong in this installation.
            "auto" does not fall back on a GPU: the torch form is many times slower there.
    """
    if choice not in ("auto", "fla", "torch"):
        raise ValueError(f"precision.kernels must be auto, fla or torch, not {choice!r}.")
    if choice == "torch" or (choice == "auto" and device_type != "cuda"):
        return "torch"
    check_device(device_type)
    check_fla_installed()
    return "fla"


def use_fla(backend: str) -> bool:
    """Read the `backend` argument of a kernel.

    Raises:
        ValueError: it is neither "fla" nor "torch" ("auto" must have been resolved).
    """
    if backend not in ("fla", "torch"):
        raise ValueError(f"A kernel's backend is 'fla' or 'torch', not {backend!r}.")
    return backend == "fla"


def check_device(device_type: str) -> None:
    """Refuse FLA on a device without Triton.

    Raises:
        ValueError: the device is not a CUDA GPU and Triton does not interpret.
    """
    if device_type != "cuda" and not interpreting():
        raise ValueError(
            f"FLA kernels need a CUDA GPU, not the device {device_type!r};"
            " set precision.kernels=torch."
        )


@cache
def fla_function(module: str, name: str) -> Callable[..., Any]:
    """A function of FLA, imported when first asked for.

    Through importlib, because transformers refuses code next to a checkpoint that names a package
    which is not installed, and these files travel with exported models.

    Args:
        module: "fla.ops.gla" and the like.
        name: of the function in it.

    Raises:
        RuntimeError: FLA is missing or known to be wrong in this installation.
    """
    check_fla_installed()
    return getattr(importlib.import_module(module), name)


def one_token(
    tensors: Sequence[Tensor | None], state: State | None, cu_seqlens: Tensor | None
) -> bool:
    """Whether a call decodes: one token a row, from a state, and nothing to differentiate.

    Args:
        tensors: what the call takes, queries [B, T, H, K] first.
        state: initial state, one tensor or several.
        cu_seqlens: document borders.
    """
    queries = tensors[0]
    assert queries is not None
    if queries.shape[1] != 1 or state is None or cu_seqlens is not None:
        return False
    everything = (*tensors, *(state if isinstance(state, tuple) else (state,)))
    return not (
        torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in everything)
    )


def run_torch(
    chunk: Callable[..., Any],
    step: Callable[..., Any],
    tensors: Sequence[Tensor | None],
    *,
    initial_state: State | None,
    cu_seqlens: Tensor | None,
    output_final_state: bool,
    scale: float | None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """A recurrence of `megatron_lt2.ops`: its step for one token of decoding, else its chunk form.

    Args:
        chunk, step: the two forms.
        tensors: what they take, with and without T.
        initial_state, cu_seqlens, output_final_state, scale, options: of the call.

    Returns:
        Output [B, T, H, V], and the final state or None.
    """
    options["scale"] = scale
    if one_token(tensors, initial_state, cu_seqlens):
        token = [None if x is None else x[:, 0] for x in tensors]
        o, state = step(*token, initial_state, **options)
        o = o.unsqueeze(1)
    else:
        o, state = chunk(*tensors, initial_state=initial_state, cu_seqlens=cu_seqlens, **options)
    return o, state if output_final_state else None


def detect_apex() -> Literal["nvidia", "unrelated"] | None:
    """Which package named `apex` is installed, without importing it.

    PyPI's `apex` is a web toolkit that has nothing to do with NVIDIA's library of fused optimizers;
    code that only tries `import apex` is misled by it.
    """
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return None
    folders = spec.submodule_search_locations or []
    has_fused = any((Path(folder) / "multi_tensor_apply").is_dir() for folder in folders)
    return "nvidia" if has_fused else "unrelated"
