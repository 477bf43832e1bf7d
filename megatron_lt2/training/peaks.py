"""Peak speed of known devices, for model FLOPs utilisation (MFU)."""

import torch

from megatron_lt2.parallel import platform

PEAK_TFLOPS_BF16 = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "GH200": 989.0,
    "H100": 989.0,
    "H200": 989.0,
    "H800": 989.0,
    "B200": 2250.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
}
"""Vendors' dense bf16 figures; the first name that the device's name contains counts."""


def peak_tflops(dtype: torch.dtype) -> tuple[float | None, str]:
    """Peak of this rank's device in TFLOP/s and its origin; (None, why) if unknown."""
    if not platform.has_gpu():
        return None, "n/a on CPU"
    name = torch.cuda.get_device_name()
    if dtype != torch.bfloat16:
        return None, f"n/a for {dtype}"
    for known, peak in PEAK_TFLOPS_BF16.items():
        if known in name:
            return peak, f"{known} dense bf16 peak"
    return None, f"n/a: no known peak for {name}, set logging.peak_tflops"
