"""Let Triton compile for an H200 where there is none. Import this before anything of FLA, in a
process of its own.

Triton asks its driver which GPU there is; this one says sm_90. Compiling needs no more than that.
Launching is not possible, and not needed while kernels are collected.
"""

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

_PROPERTIES = {"multiprocessor_count": 132, "max_shared_mem": 232448, "warpSize": 32}


class _Driver:
    utils = SimpleNamespace(get_device_properties=lambda device: _PROPERTIES)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind


def install() -> None:
    """From now on Triton, and torch's questions that FLA asks, know an H200."""
    driver.set_active(_Driver())
    memory = _PROPERTIES["max_shared_mem"]
    properties = SimpleNamespace(
        shared_memory_per_block_optin=memory,
        shared_memory_per_block=memory,
        multi_processor_count=_PROPERTIES["multiprocessor_count"],
    )
    cuda: Any = torch.cuda
    cuda.get_device_name = lambda device=0: "NVIDIA H200"
    cuda.get_device_capability = lambda device=0: (9, 0)
    cuda.get_device_properties = lambda device=0: properties
    cuda.current_device = lambda: 0
    cuda.device = lambda device: contextlib.nullcontext()
