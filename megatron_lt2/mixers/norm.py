"""RMS norm for megatron-core's layer-norm slots, without Transformer Engine."""

from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_lt2.kernels.stream_norm import stream_norm, stream_norm_and_skip
from megatron_lt2.mixers.parameters import declare, new_parameter
from megatron_lt2.parallel.remake import remakable
from megatron_lt2.recurrent.initial import constant


class RMSNorm(nn.Module):
    """x * rsqrt(mean(x^2) + eps) * weight over the last axis (Zhang, Sennrich, arXiv 1910.07467).

    Under sequence parallelism each tensor-parallel rank sees part of the tokens; the mark on the
    weight makes megatron-core add the gradients up.

    Args:
        config, hidden_size, eps: as megatron-core's layers give them.
        kernels: "fla" or "torch".
        with_skip: on a kernel of ours, give the input too, for the residual add: megatron-core's
            layer takes a pair so, and the input's two gradients are added in the kernel.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-6,
        kernels: str = "torch",
        with_skip: bool = False,
        **ignored: object,
    ) -> None:
        super().__init__()
        self.eps, self.kernels = eps, kernels
        self.with_skip = with_skip and kernels == "fla"
        self.remakable = bool(getattr(config, "recompute_cheap", False))
        self.weight = new_parameter(hidden_size, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        declare(self.weight, init=constant(1.0))

    def forward(self, x: Tensor) -> Any:
        """[..., d] -> [..., d], or a pair of it and the input."""
        skip, y = stream_norm_and_skip(x, self.weight, self.eps, backend=self.kernels)
        if self.remakable:
            y = remakable(y, (x, self.weight), self._norm)
        return (y, skip) if self.with_skip else y

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return stream_norm(x, weight, self.eps, backend=self.kernels)
