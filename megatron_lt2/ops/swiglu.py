"""SwiGLU (Shazeer 2020, arXiv 2002.05202): silu(gate) * up, of rows [gate | up]."""

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(x: Tensor) -> Tensor:
    """[..., 2 F] -> [..., F], computed in fp32 for 16-bit inputs and rounded once."""
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def swiglu_backward(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of x [..., 2 F] from that of the output, and the output [..., F] once more."""
    wide = torch.promote_types(x.dtype, torch.float32)
    gate, up = x.to(wide).chunk(2, dim=-1)
    d = dy.to(wide)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    d_gate = d * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([d_gate, d * silu], dim=-1).to(x.dtype), (silu * up).to(x.dtype)
