"""RMS norm for megatron-core's layer-norm slots, without Transformer Engine."""

import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_lt2.mixers.parameters import declare, new_parameter
from megatron_lt2.recurrent.initial import constant


class RMSNorm(nn.Module):
    """x * rsqrt(mean(x^2) + eps) * weight over the last axis (Zhang, Sennrich, arXiv 1910.07467).

    Under sequence parallelism each tensor-parallel rank sees part of the tokens; the mark on the
    weight makes megatron-core add the gradients up.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **ignored: object
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = new_parameter(hidden_size, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        declare(self.weight, init=constant(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
