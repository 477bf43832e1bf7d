"""The SwiGLU feed-forward layer, over tensor-parallel ranks.

    y = (silu(x W_gate^T) * x W_up^T) W_down^T

Parameters, names and checkpoints are those of megatron-core's MLP. The activation and the product
behind it are one function: its backward pass makes the activation's output again while it computes
the activation's gradient, which takes no longer than to read a kept one.
"""

from typing import Any

import torch
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lt2.kernels.swiglu import swiglu, swiglu_backward
from megatron_lt2.parallel.linear import column_linear, row_linear
from megatron_lt2.parallel.weight_gradient import add_weight_gradient


class FeedForward(MLP):
    """megatron-core's MLP for SwiGLU without biases.

    Args:
        kernels: "fla" or "torch".
        Others as MLP.
    """

    def __init__(self, config: Any, kernels: str, **kwargs: Any) -> None:
        linears = MLPSubmodules(linear_fc1=column_linear, linear_fc2=row_linear)
        super().__init__(config, linears, **kwargs)
        self.kernels = kernels

    @classmethod
    def for_layer(
        cls, config: Any, pg_collection: Any, kernels: str, **ignored: Any
    ) -> "FeedForward":
        """As megatron-core's layer builds what is in its slot for the MLP."""
        return cls(
            config, kernels, tp_group=pg_collection.tp, ffn_hidden_size=config.ffn_hidden_size
        )

    def forward(self, hidden_states: Tensor, *unused: Any, **options: Any) -> tuple[Tensor, None]:
        """[s, b, d] -> [s, b, d], and no bias."""
        both, _ = self.linear_fc1(hidden_states)
        down: Any = self.linear_fc2
        if self.config.fp8:  # the quantised output is kept
            return down(_SwiGLU.apply(both, self.kernels))
        return down.reduced(_SwiGLUDown.apply(both, down.weight, self.kernels)), None


class _SwiGLU(torch.autograd.Function):
    """swiglu(x); keeps x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernels: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kernels = kernels
        return swiglu(x, backend=kernels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return swiglu_backward(x, dy, backend=ctx.kernels)[0], None


class _SwiGLUDown(torch.autograd.Function):
    """swiglu(x) W^T; keeps x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kernels: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.kernels = kernels
        return swiglu(x, backend=kernels) @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        dx, activated = swiglu_backward(x, dy @ weight, backend=ctx.kernels)
        dw = None
        if ctx.needs_input_grad[1]:
            dw = add_weight_gradient(weight, dy.reshape(-1, dy.shape[-1]), activated.flatten(0, -2))
        return dx, dw, None
