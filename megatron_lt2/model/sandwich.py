"""A layer with norms on both sides of mixer and FFN, as Ouro has it (arXiv 2510.25741).

    h <- h + norm(mixer(norm(h)));   h <- h + norm(SwiGLU(norm(h)))

The norms behind bound what a layer adds to the stream, however often the stack runs.
"""

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_lt2.mixers.norm import RMSNorm

Adder = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]
"""megatron-core's residual add: (output, bias), residual, dropout."""


class SandwichLayer(TransformerLayer):
    """megatron-core's layer; arguments as there."""

    def __init__(self, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        width, eps = config.hidden_size, config.layernorm_epsilon
        self.post_mixer_layernorm = RMSNorm(config, width, eps)
        self.post_mlp_layernorm = RMSNorm(config, width, eps)
        self.self_attn_bda: Any = _norm_first(self.post_mixer_layernorm, submodules.self_attn_bda)
        self.mlp_bda: Any = _norm_first(self.post_mlp_layernorm, submodules.mlp_bda)


def _norm_first(norm: RMSNorm, make_add: Callable[..., Adder]) -> Callable[..., Adder]:
    """The same residual add of normed outputs."""

    def make(training: bool, fused: bool) -> Adder:
        add = make_add(training, fused)

        def normed_add(
            output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float
        ) -> Tensor:
            values, bias = output
            assert bias is None, "LT2's projections have no bias"
            return add((norm(values), None), residual, dropout)

        return normed_add

    return make
