"""megatron-core on CPU ranks with gloo; on a machine with CUDA nothing is touched.

megatron-core names the CUDA device in many places (`device="cuda"`, `torch.cuda.current_device()`,
streams, tensor type strings). On a machine without a GPU, `install()` answers all of them with the
CPU: one `TorchFunctionMode` rewrites devices in torch calls, and a handful of `torch.cuda`
functions are replaced. Call it before megatron.core is imported.
"""

import contextlib
import importlib.util
import logging
import os
import sys
import types
import warnings
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")

_mode: TorchFunctionMode | None = None


def has_gpu() -> bool:
    """Whether ranks run on CUDA devices (LT2_FORCE_CPU=1 says no)."""
    return torch.cuda.is_available() and not os.environ.get("LT2_FORCE_CPU")


def device() -> torch.device:
    """The device of this rank: its CUDA device, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu() else CPU


def backend() -> str:
    """The torch.distributed backend for the ranks of this machine."""
    return "nccl" if has_gpu() else "gloo"


def install() -> None:
    """Make megatron.core importable and runnable here. Idempotent; patches nothing with CUDA."""
    global _mode
    _quiet_imports()
    if has_gpu() or _mode is not None:
        return
    _stub_triton_import()
    _replace_cuda_functions()
    _import_without_compile()
    _mode = _CudaMeansCpu()
    _mode.__enter__()
    _patch_rng_tracker()


def _quiet_imports() -> None:
    """megatron-core warns of every absent optional package; the run's log says it once."""
    warnings.filterwarnings("ignore", module=r"megatron\.core.*")
    # When Python compiles its files, the module is known by path only.
    warnings.filterwarnings("ignore", category=SyntaxWarning, module=r".*/megatron/core/.*")
    # megatron-core 0.19.2 uses names that torch renames, and looks at .grad of tensors without one.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\..*` is deprecated")
    warnings.filterwarnings(
        "ignore", message=r"The \.grad attribute of a Tensor that is not a leaf"
    )
    # It reads the common part of a checkpoint in every rank for itself.
    for message in (
        r"torch\.distributed is disabled, unavailable or uninitialized",
        r"The argument order of load has been changed",
    ):
        warnings.filterwarnings("ignore", message=message)
    for name in ("megatron.core", "torch.utils.cpp_extension", "torch.distributed.checkpoint"):
        logging.getLogger(name).setLevel(logging.ERROR)


class _CudaMeansCpu(TorchFunctionMode):
    """Sends torch calls that ask for CUDA to the CPU, and lets tensor type strings say CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The distributed optimizer sorts parameters by 'torch.cuda.FloatTensor' and the like.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


def _is_cuda(value: Any) -> bool:
    if isinstance(value, str):
        return value.startswith("cuda")
    return isinstance(value, torch.device) and value.type == "cuda"


class _Stream:
    """A CUDA stream where work is done by the time a call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *exc: Any) -> None: ...


class _Event:
    """A CUDA event that has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _nothing() -> Any:
    """A new function that does nothing: torch.compile wants distinct torch.cuda functions."""
    return lambda *args, **kwargs: None


def _replace_cuda_functions() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.set_device, cuda.synchronize, cuda.empty_cache = _nothing(), _nothing(), _nothing()
    cuda.current_stream = lambda *args: _Stream()
    cuda.default_stream = lambda *args: _Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.get_rng_state = _cpu_rng_state
    cuda.set_rng_state = _set_cpu_rng_state
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _nothing(), _nothing()


def _cpu_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_cpu_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


def _stub_triton_import() -> None:
    """Without Triton, one mixture-of-experts module, unused here, stops `import megatron.core`."""
    if importlib.util.find_spec("triton") is not None:
        return
    name = "megatron.core.transformer.moe.ops.paged_stash"
    stub = types.ModuleType(name)

    def missing(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _needs_triton

    stub.__getattr__ = missing  # type: ignore[method-assign]
    sys.modules[name] = stub


def _needs_triton(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("this part of megatron-core needs triton, which is not installed")


def _no_compile(model: Any = None, **options: Any) -> Any:
    """torch.compile as a plain decorator, with or without options."""
    return model or (lambda function: function)


def _import_without_compile() -> None:
    """megatron-core compiles small functions when imported; on CPU that only costs time."""
    compiler: Any = torch.compile
    torch.compile = _no_compile
    try:
        from megatron.core import jit

        jit.disable_jit_fuser()
    finally:
        torch.compile = compiler


def _patch_rng_tracker() -> None:
    """The RNG tracker reads torch.cuda.default_generators, which a machine without CUDA lacks."""
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = _cpu_rng_state
    random._set_cuda_rng_state = _set_cpu_rng_state
