"""Full causal attention of rows of one length, by the fastest kernel that torch has for it.

cuDNN's kernel is twice as fast on Hopper as the flash attention that torch prefers (measured on an
H200 with 128 channels: 4,096 tokens 0.26 against 0.6 ms forward), but torch's variable-length
attention does not use it before 2.14, and where 2.11 lets one call it for several lengths it is
wrong. So documents of different lengths take flash attention (kernels/window.py).
"""

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Best first."""


def row_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """softmax(q k^T scale) v with a causal mask in each row of [b, s, heads, d]; k and v may have
    fewer heads."""
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=grouped
        )

    if not q.is_cuda:
        return attend().transpose(1, 2)
    with sdpa_kernel(BACKENDS, set_priority=True):
        return attend().transpose(1, 2)
