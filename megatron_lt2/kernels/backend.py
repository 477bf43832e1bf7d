"""Which kernels run, and every condition that FLA's kernels need.

The kernels assume much and check little: some wrong inputs read out of bounds, some versions
compute wrong gradients in silence. All guards are kept here, so that one place shows what is
supported.
"""

import importlib.util
import os
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch
from packaging.version import Version
from torch import Tensor

from megatron_lt2.ops.gdn import check_shapes

Backend = Literal["fla", "torch"]

FLA_MIN = Version("0.5.2")
"""Older releases have wrong gradients (fla-org/flash-linear-attention #1115)."""

HOPPER_BAD_TRITON = (Version("3.4.0"), Version("3.7.1"))
"""First bad and first good version: gated gradients are wrong on Hopper (FLA #640)."""

FLA_MAX_KEY_DIM = 256
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


def _interpreting() -> bool:
    """Whether Triton interprets kernels on the CPU, as the tests do."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def check_fla_installed() -> None:
    """Refuse a software stack in which FLA is missing or known to compute wrong results.

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
    _check_device(device_type)
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


def _check_device(device_type: str) -> None:
    if device_type != "cuda" and not _interpreting():
        raise ValueError(
            f"FLA kernels need a CUDA GPU, not the device {device_type!r};"
            " set precision.kernels=torch."
        )


def _check_dtypes(**tensors: Tensor) -> None:
    dtypes = {x.dtype for x in tensors.values()}
    if len(dtypes) != 1 or not dtypes <= {torch.bfloat16, torch.float16, torch.float32}:
        found = ", ".join(f"{name} {x.dtype}" for name, x in tensors.items())
        raise ValueError(
            f"FLA kernels need one of bf16, fp16, fp32 for {', '.join(tensors)}, not {found}."
        )


def _check_packed(cu_seqlens: Tensor | None, batch: int) -> None:
    if cu_seqlens is not None and batch != 1:
        raise ValueError(f"cu_seqlens needs one packed row, but the batch size is {batch}.")


def guard_gdn(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None
) -> None:
    """Conditions of FLA's gated delta rule; shapes as in `megatron_lt2.ops.gdn`.

    Raises:
        ValueError: one of them is not met.
    """
    _check_device(q.device.type)
    _check_dtypes(q=q, k=k, v=v)
    _check_packed(cu_seqlens, q.shape[0])
    check_shapes(q, k, v, g, beta)
    key_dim, value_dim = k.shape[-1], v.shape[-1]
    if key_dim > FLA_MAX_KEY_DIM:
        raise ValueError(
            f"FLA's gated delta rule takes up to {FLA_MAX_KEY_DIM} key channels a head,"
            f" not {key_dim}."
        )
    if key_dim % 2 or value_dim % 2:
        raise ValueError(
            "FLA's gated delta rule needs even numbers of key and value channels a head,"
            f" not {key_dim} and {value_dim}."
        )


def guard_conv(x_BTD: Tensor, weight_DW: Tensor, cu_seqlens: Tensor | None) -> None:
    """Conditions of FLA's convolution.

    A packed batch of two rows would get a wrong weight gradient there (FLA #955).

    Raises:
        ValueError: one of them is not met.
    """
    _check_device(x_BTD.device.type)
    _check_dtypes(x=x_BTD)
    _check_packed(cu_seqlens, x_BTD.shape[0])
    if x_BTD.shape[-1] != weight_DW.shape[0]:
        raise ValueError(
            f"The convolution has {weight_DW.shape[0]} channels,"
            f" but its input has {x_BTD.shape[-1]}."
        )


def guard_gated_norm(x: Tensor, gate: Tensor, weight: Tensor) -> None:
    """Conditions of FLA's gated norm.

    Raises:
        ValueError: one of them is not met.
    """
    _check_device(x.device.type)
    _check_dtypes(x=x, gate=gate)
    if x.shape != gate.shape or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"The gated norm needs a gate of the input's shape {tuple(x.shape)} and a weight of"
            f" {x.shape[-1]} numbers, not {tuple(gate.shape)} and {tuple(weight.shape)}."
        )


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
