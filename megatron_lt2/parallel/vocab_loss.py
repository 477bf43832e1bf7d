"""The output head and its cross entropy over a vocabulary that is spread over ranks.

Every rank has some rows of the head. Of its logits it keeps three numbers a token (maximum, sum of
exponentials, the target's logit), which two small all-reduces make the loss of; the logits
themselves exist for a chunk of tokens at a time, see `megatron_lt2.kernels.linear_cross_entropy`.

Hidden states travel as in megatron-core's ColumnParallelLinear: under sequence parallelism they are
gathered before, and the gradient is reduced and scattered after; else it is all-reduced.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lt2.kernels.linear_cross_entropy import head_gradients, head_statistics
from megatron_lt2.parallel.weight_gradient import WeightGradient, mark_tied


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    group: Any,
    sequence_parallel: bool,
    real_vocab: int,
    backend: str,
    chunk: int | None = None,
) -> Tensor:
    """Cross entropy of every token, - log softmax(hidden W^T)[label].

    Args:
        hidden: [s, b, d], this rank's part of s under sequence parallelism.
        weight: [v, d], this rank's rows of the padded vocabulary.
        labels: [b, s] of the whole sequence, the same on all ranks of the group.
        group: tensor-parallel process group.
        sequence_parallel: whether hidden is such a part.
        real_vocab: rows of all ranks that are no padding: the others get no probability.
        backend: "fla" or "torch", of the kernels.
        chunk: tokens whose logits exist at a time; default: as many as are some 512 MB.

    Returns:
        [b, s] fp32 (fp64 for fp64).
    """
    return _LinearCrossEntropy.apply(
        hidden, weight, labels, group, sequence_parallel, real_vocab, backend, chunk
    )


class VocabularyHead(ColumnParallelLinear):
    """megatron-core's output layer, which also gives losses.

    They come from a call of the layer, because hooks on calls belong to it: DDP's, which waits for
    gathered weights, and the search for the first value that is no number.
    """

    real_vocab: int
    backend: str

    @classmethod
    def adopt(
        cls,
        layer: ColumnParallelLinear,
        real_vocab: int,
        backend: str,
        embedding: Tensor | None = None,
    ) -> "VocabularyHead":
        """Make `layer`, which GPTModel has built and marked, one of these.

        Args:
            real_vocab: rows of all ranks that are no padding.
            backend: "fla" or "torch".
            embedding: the embedding's weight on this rank if the head uses it too. megatron-core
                wants gradients of such a weight to pass through autograd; ours need not.
        """
        assert type(layer) is ColumnParallelLinear, type(layer)
        layer.__class__ = cls
        layer.real_vocab, layer.backend = real_vocab, backend
        if embedding is not None:
            embedding.zero_out_wgrad = False  # type: ignore[attr-defined]
            mark_tied(embedding)
        return layer

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        labels: Tensor | None = None,
        losses: Callable[[Tensor, Tensor], Any] | None = None,
    ) -> Any:
        """Losses [b, s] with labels [b, s]; else what megatron-core's layer gives.

        With `losses` what it gives of the hidden states and the weight.
        """
        if labels is None and losses is None:
            return super().forward(input_, weight, runtime_gather_output)
        weight = self.weight if weight is None else weight
        assert weight is not None
        if losses is not None:
            return losses(input_, weight)
        assert labels is not None
        return linear_cross_entropy(
            input_,
            weight,
            labels,
            group=self.tp_group,
            sequence_parallel=self.sequence_parallel,
            real_vocab=self.real_vocab,
            backend=self.backend,
        )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        group: Any,
        gather: bool,
        real_vocab: int,
        backend: str,
        chunk: int | None,
    ) -> Tensor:
        rows = len(weight)
        first = group.rank() * rows
        real = max(0, min(rows, real_vocab - first))
        targets = labels.t().reshape(-1) - first
        targets = torch.where(targets < rows, targets, -1)  # those of later ranks
        whole = gathered(hidden, group) if gather else hidden
        options = {"real": real, "backend": backend, "chunk": chunk}
        found = head_statistics(whole.reshape(-1, whole.shape[-1]), weight, targets, **options)
        highest, sums = found[0], found[1:]
        if group.size() > 1:
            highest = highest.clone()
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
            sums[0] *= (found[0] - highest).exp()
            dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        ctx.save_for_backward(hidden, weight, targets, highest + log_sum)
        ctx.group, ctx.gather, ctx.options = group, gather, options
        losses = log_sum + (highest - sums[1])
        return losses.view(whole.shape[:2]).t().contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_losses: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, lse = ctx.saved_tensors
        group = ctx.group
        whole = gathered(hidden, group) if ctx.gather else hidden
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        gradient = WeightGradient(weight, adds=True) if for_weight else None
        flat = head_gradients(
            whole.reshape(-1, whole.shape[-1]),
            weight,
            targets,
            lse,
            d_losses.t().reshape(-1).to(lse.dtype),
            **ctx.options,
            for_hidden=for_hidden,
            add=None if gradient is None else gradient.add,
        )
        d_hidden = None
        if flat is not None:
            d_hidden = flat.view(whole.shape)
            if ctx.gather:
                total, d_hidden = d_hidden, torch.empty_like(hidden)
                dist.reduce_scatter_tensor(d_hidden, total, group=group)
            elif group.size() > 1:
                dist.all_reduce(d_hidden, group=group)
        d_weight = None if gradient is None else gradient.for_autograd()
        return d_hidden, d_weight, None, None, None, None, None, None


def gathered(x: Tensor, group: Any) -> Tensor:
    """The whole sequence [s, b, d] from the ranks' parts."""
    whole = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return whole
