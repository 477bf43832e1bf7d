"""Early exits (Ouro, arXiv 2510.25741): how likely a token leaves after each loop, and their loss.

    lambda_t = sigmoid(w . norm(h_t) + b)        t = 1 .. T-1
    p_t      = lambda_t prod_{j<t} (1 - lambda_j),  p_T = prod_{j<T} (1 - lambda_j)
    loss     = sum_t p_t CE_t - beta H(p)           of every token; H(p) = - sum_t p_t log p_t

The gate decides about a token alone: no layer looks at it, and all loops always run in training.

On a pipeline the last stage sees the loops one after the other, each in a pass of the schedule that
autograd knows nothing of: the schedule sends h_t away and later brings its gradient back. What
loop t has to say to the loss waits in `PendingExits`, and its gradient returns into loop t's own
pass through `defer`.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_lt2.mixers.parameters import declare, new_parameter
from megatron_lt2.recurrent.initial import constant


class ExitGate(nn.Module):
    """w . x + b of every token, the logit of leaving; in fp32 at least.

    Under sequence parallelism a rank has some of the tokens: the marks make megatron-core add up
    the gradients of its ranks.

    Args:
        group: the tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, group: Any) -> None:
        super().__init__()
        self.group, self.cut = group, config.sequence_parallel
        weight: Any = new_parameter(1, config.hidden_size, dtype=config.params_dtype)
        bias: Any = new_parameter(1, dtype=config.params_dtype)
        weight.sequence_parallel = bias.sequence_parallel = config.sequence_parallel
        declare(bias, init=constant(0.0))
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        """Normed states [s, b, d], s this rank's share, to logits [b, s] of all tokens."""
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), self.weight.to(wide), self.bias.to(wide))
        if self.cut:
            # Every rank computes the same loss of all tokens, so its own part of the gradient is
            # whole and nothing has to be added up.
            logits = tensor_parallel.gather_from_sequence_parallel_region(
                logits, tensor_parallel_output_grad=False, group=self.group
            )
        return logits.squeeze(-1).t()


def log_exit_probabilities(gate_logits: Sequence[Tensor]) -> Tensor:
    """log p [T, ...] from the gate's logits of the loops before the last, each [...]."""
    logits = torch.stack(list(gate_logits))
    stays = F.logsigmoid(-logits).cumsum(0)
    stayed = torch.cat([torch.zeros_like(stays[:1]), stays[:-1]])
    return torch.cat([F.logsigmoid(logits) + stayed, stays[-1:]])


def exit_loss(losses: Sequence[Tensor], gate_logits: Sequence[Tensor], entropy: float) -> Tensor:
    """The loss of every token with what it is made of.

    Args:
        losses: cross entropies [b, s] of the T loops.
        gate_logits: [b, s] of the first T - 1.
        entropy: beta.

    Returns:
        [1 + 2 T, b, s]: the loss, then, without gradient, the T cross entropies and the T
        probabilities.
    """
    each = torch.stack(list(losses))
    log_p = log_exit_probabilities(gate_logits)
    p = log_p.exp()
    loss = (p * (each + entropy * log_p)).sum(0)
    return torch.cat([loss[None], each.detach(), p.detach().to(each.dtype)])


class PendingExits:
    """What finished loops say to the loss of micro-batches that are still on their way.

    Micro-batches reach every loop in the same order.

    Args:
        loops: T.
    """

    def __init__(self, loops: int) -> None:
        self._waiting: list[deque[tuple[Tensor, Tensor]]] = [deque() for _ in range(loops - 1)]

    def defer(self, loop: int, hidden: Tensor, loss: Tensor, gate_logit: Tensor) -> Tensor:
        """`hidden`, whose backward pass also goes through `loss` and `gate_logit`.

        By then the loss, to which they are handed by `collect`, has been differentiated: the
        gradient of `hidden` comes from later loops.
        """
        leaves = tuple(x.detach().requires_grad_(x.requires_grad) for x in (loss, gate_logit))
        self._waiting[loop].append((leaves[0], leaves[1]))
        if not torch.is_grad_enabled():
            return hidden
        return _Defer.apply(hidden, loss, gate_logit, leaves)

    def collect(self) -> tuple[list[Tensor], list[Tensor]]:
        """Losses and gate logits of the earlier loops, of the oldest micro-batch."""
        taken = [waiting.popleft() for waiting in self._waiting]
        return [loss for loss, _ in taken], [logit for _, logit in taken]


class _Defer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, loss: Tensor, gate_logit: Tensor, leaves: tuple[Tensor, Tensor]
    ) -> Tensor:
        ctx.leaves = leaves
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        loss, gate_logit = ctx.leaves
        assert loss.grad is not None, "a loop's backward pass ran before that of the loss"
        return dy, loss.grad, gate_logit.grad, None
