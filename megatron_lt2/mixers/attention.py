"""Softmax attention: megatron-core's SelfAttention with LT2's output gate and a plain core.

The gate is megatron-core's `attention_output_gate`: its rows are fused into linear_qkv, one block a
key/value group, [queries | gate | key | value]. LT2 starts them at zero (gate = 0.5 everywhere),
which is declared here. The core is torch's scaled_dot_product_attention, or its variable-length
form on GPU, so that neither Transformer Engine nor a dense mask is needed.

Under context parallelism a rank holds a stretch of the row (parallel/sequence.py), and the core
exchanges what attention needs of the others (parallel/attention_exchange.py): by heads where the
ranks divide them, else, and always with a window, by sending keys and values to the ranks behind.

`full` sees the whole document so far; `window.py` gives the same layer a limit.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megatron_lt2.config.schema import ModelConfig
from megatron_lt2.kernels.rotary import rotate_by_tables
from megatron_lt2.kernels.row_attention import row_attention
from megatron_lt2.kernels.window import (
    FLASH_DTYPES,
    varlen_attention,
    varlen_rows,
    window_attention,
)
from megatron_lt2.mixers.entry import MixerEntry
from megatron_lt2.mixers.parameters import Shards, declare
from megatron_lt2.parallel.attention_exchange import (
    heads_divide,
    to_heads,
    to_tokens,
    with_earlier_keys,
)
from megatron_lt2.parallel.linear import column_linear, row_linear
from megatron_lt2.parallel.sequence import SequenceShard, ShardedSequence
from megatron_lt2.recurrent.initial import truncated_normal


class FullAttention(SelfAttention):
    """Causal attention with rotary positions and a sigmoid output gate (LT2, Qiu et al. 2025)."""

    def __init__(self, *args: Any, init_std: float, init_cutoff: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.config
        groups, head_dim = config.num_query_groups, config.kv_channels
        queries = config.num_attention_heads // groups * head_dim
        normal = truncated_normal(init_std, init_cutoff)

        def zero_gate(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
            weight = normal(shape, generator)
            if config.attention_output_gate:
                weight.view(groups, -1, shape[-1])[:, queries : 2 * queries] = 0
            return weight

        rows = self.linear_qkv_out_dim
        declare(self.linear_qkv.weight, init=zero_gate, shards=Shards((rows,)))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *args: Any,
        rotary_pos_emb: Any = None,
        **kwargs: Any,
    ) -> Any:
        """As megatron-core's, but that the core rotates queries and keys where it has a kernel."""
        core: Any = self.core_attention
        core.angles = None
        if core.takes_angles(rotary_pos_emb):
            core.angles, rotary_pos_emb = rotary_pos_emb, None
        return super().forward(
            hidden_states, attention_mask, *args, rotary_pos_emb=rotary_pos_emb, **kwargs
        )


class CausalCoreAttention(MegatronModule):
    """softmax(q k^T / sqrt(d)) v with a causal mask, separate for each packed document.

    Fills megatron-core's core_attention slot. Inputs are [s, b, heads, d], or [t, heads, d] for
    'thd' packing; keys and values may have fewer heads (grouped queries). Output: [s, b, heads * d]
    ([t, ...]). s is a context-parallel rank's own share.

    Args:
        pg_collection: megatron-core's process groups, of which `cp` is used.
        windows: tokens that a query sees, itself included, in each loop (the last one in all that
            follow); None: all so far.
        kernels: "fla" or "torch", for the window.
        Others as megatron-core gives them.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        windows: Sequence[int | None] = (None,),
        kernels: str = "torch",
        **ignored: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale, self.windows, self.kernels = softmax_scale, tuple(windows), kernels
        self.context_group = None if pg_collection is None else pg_collection.cp
        self.angles: Tensor | None = None
        for window in self.windows:
            _check_core(config, window)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend; documents that `packed_seq_params` bounds do not see each other.

        attention_mask: the number of the loop, see model/looped_block.py; the mask itself is
        causal by construction, and the other mask arguments are unused.

        Raises:
            ValueError: context parallelism without a ShardedSequence.
        """
        assert attention_bias is None, "CausalCoreAttention has no attention bias"
        window = self.windows[min(loop_number(attention_mask), len(self.windows) - 1)]
        if self.angles is not None:
            query, key = _rotated(query, key, self.angles)
        if self.config.context_parallel_size > 1:
            shard = _shard_of(packed_seq_params)
            return self._sharded(query, key, value, window, shard, packed_seq_params).flatten(2)
        bounds, longest = None, None
        if packed_seq_params is not None:
            bounds, longest = packed_seq_params.cu_seqlens_q, int(packed_seq_params.max_seqlen_q)
        if query.dim() == 3:
            q, k, v = (x.unsqueeze(1) for x in (query, key, value))
            return self._whole(q, k, v, window, bounds, longest).squeeze(1).flatten(1)
        return self._whole(query, key, value, window, bounds, longest).flatten(2)

    def takes_angles(self, angles: Any) -> bool:
        """Whether `forward` is to rotate queries and keys by `angles` [s, 1, 1, d], once they are
        left in the attribute of that name: with FLA's kernel, where megatron-core would need seven
        operations."""
        return (
            self.kernels == "fla"
            and isinstance(angles, Tensor)
            and not self.config.rotary_interleaved
        )

    def _sharded(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None,
        shard: SequenceShard,
        packing: Any,
    ) -> Tensor:
        """Attention of this rank's tokens to those of all ranks; q, k, v are [s, b, heads, d]."""
        group = self.context_group
        assert group is not None and group.size() == shard.size and group.rank() == shard.rank
        if window is None and heads_divide(q, k, shard.size):
            q, k, v = to_heads(q, k, v, group)
            return to_tokens(self._whole(q, k, v, None, shard.bounds, shard.longest), group)
        heads = k.shape[2]
        together = with_earlier_keys(torch.cat([k, v], dim=2), shard, group, window)
        k, v = together.split(heads, dim=2)
        return self._whole(q, k, v, window, packing.cu_seqlens_q, packing.max_seqlen_q)

    def _whole(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None,
        bounds: Tensor | None,
        longest: int | None,
    ) -> Tensor:
        """Attention with all keys at hand, [s, b, heads, d] -> the same.

        More keys than queries are tokens before the first query, of its document.
        """
        if bounds is None:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
            return self._attend(q, k, v, window).transpose(0, 1)
        assert q.shape[1] == 1 and longest is not None, "packed documents need a batch of one row"
        q, k, v = (x.squeeze(1) for x in (q, k, v))
        return self._packed(q, k, v, window, bounds, longest).unsqueeze(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """Attention within each row; q, k, v are [b, s, heads, d]."""
        earlier = k.shape[1] - q.shape[1]
        if window is not None:
            return window_attention(
                q,
                k,
                v,
                window,
                backend=self.kernels,
                scale=self.softmax_scale,
                earlier=earlier,
            )
        if earlier and q.is_cuda and q.dtype in FLASH_DTYPES:
            return varlen_rows(q, k, v, scale=self.softmax_scale)
        if not earlier:
            return row_attention(q, k, v, scale=self.softmax_scale)
        grouped = q.shape[2] != k.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        # torch's causal mask begins at the first key, so fewer queries need one of their own.
        mask = _causal_mask(q.shape[2], k.shape[2], q.device)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=self.softmax_scale, enable_gqa=grouped
        )
        return out.transpose(1, 2)

    def _packed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None,
        bounds: Tensor,
        longest: int,
    ) -> Tensor:
        """Attention within each document; q, k, v are [t, heads, d], bounds are the queries'."""
        earlier = len(k) - len(q)
        if window is not None:
            return window_attention(
                q[None],
                k[None],
                v[None],
                window,
                backend=self.kernels,
                scale=self.softmax_scale,
                cu_seqlens=bounds,
                max_length=longest,
                earlier=earlier,
            )[0]
        documents = len(bounds) - 1
        if not earlier and documents * longest == len(q):  # all as long as the longest
            q, k, v = (x.unflatten(0, (documents, longest)) for x in (q, k, v))
            return self._attend(q, k, v, None).flatten(0, 1)
        if q.is_cuda and q.dtype in FLASH_DTYPES:
            return varlen_attention(
                q, k, v, bounds, longest, scale=self.softmax_scale, earlier=earlier
            )
        outputs = []
        starts = bounds.tolist()
        for start, end in zip(starts[:-1], starts[1:], strict=True):
            first = start + earlier if start else 0
            keys = slice(first, end + earlier)
            outputs.append(self._attend(q[None, start:end], k[None, keys], v[None, keys], None)[0])
        return torch.cat(outputs)


def _rotated(query: Tensor, key: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys, [s, b, heads, d] or [t, heads, d], by angles [s, 1, 1, d]."""
    tables = getattr(angles, "lt2_tables", None)
    if tables is None:  # once for all layers and loops
        half = angles[:, 0, 0, : angles.shape[-1] // 2]
        tables = half.cos().to(query.dtype), half.sin().to(query.dtype)
        angles.lt2_tables = tables  # type: ignore[attr-defined]  # tensors take attributes
    if query.dim() == 3:
        q, k = rotate_by_tables(query[None], key[None], *tables)
        return q[0], k[0]
    q, k = rotate_by_tables(query.transpose(0, 1), key.transpose(0, 1), *tables)
    return q.transpose(0, 1), k.transpose(0, 1)


def loop_number(attention_mask: Tensor | None) -> int:
    """The loop that a layer runs in, which model/looped_block.py passes as the attention mask."""
    return 0 if attention_mask is None else int(attention_mask)


def _shard_of(packing: PackedSeqParams | None) -> SequenceShard:
    if not isinstance(packing, ShardedSequence) or packing.shard is None:
        raise ValueError(
            "attention layers under context parallelism need to know which tokens a rank holds; "
            "pass the ShardedSequence that data/batch.py makes as packed_seq_params"
        )
    return packing.shard


def _causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Bool [queries, keys], true where a query sees a key; the last query is as late as the last
    key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def _check_core(config: Any, window: int | None) -> None:
    """Refuse what the core would compute wrongly or ignore.

    Raises:
        ValueError: one sentence.
    """
    if config.cp_comm_type is not None:
        raise ValueError(
            f"megatron.transformer.cp_comm_type {config.cp_comm_type!r} has no effect on LT2's "
            "attention, which chooses its exchange by itself; leave it out"
        )
    if window is not None and (isinstance(window, bool) or window != int(window) or window < 1):
        raise ValueError(
            f"model.window.size is {window}; a token sees at least itself, set a whole number of "
            "1 or more"
        )


def attention_spec(
    model: ModelConfig, kernels: str, windows: Sequence[int | None] = (None,)
) -> ModuleSpec:
    """The attention layer, limited to the last `windows[t]` tokens in loop t."""
    return ModuleSpec(
        module=FullAttention,
        params={
            "attn_mask_type": AttnMaskType.causal,
            "init_std": model.init.std or model.hidden_size**-0.5,
            "init_cutoff": model.init.cutoff,
        },
        submodules=SelfAttentionSubmodules(
            linear_qkv=column_linear,
            core_attention=functools.partial(CausalCoreAttention, windows=windows, kernels=kernels),
            linear_proj=row_linear,
        ),
    )


def attention_heads(model: ModelConfig) -> dict[str, int]:
    """Head counts that tensor parallelism must divide, by setting."""
    return {"model.num_heads": model.num_heads, "model.num_kv_heads": model.kv_heads}


def attention_parameters(model: ModelConfig) -> int:
    """Parameters of one layer, all of them in matrices."""
    queries = model.num_heads * model.attention_head_dim
    keys = model.kv_heads * model.attention_head_dim
    projections = queries * (2 if model.attention.output_gate else 1) + 2 * keys
    return model.hidden_size * (projections + queries)


def attention_flops(model: ModelConfig, keys: float) -> float:
    """Operations a token that sees `keys` tokens on average, beyond the matrices."""
    # q k^T and the product with v, one multiply-add a channel and key each.
    return 2 * 2 * model.num_heads * model.attention_head_dim * keys


MIXER = MixerEntry(
    spec=attention_spec,
    heads=attention_heads,
    parameters=attention_parameters,
    matrix_parameters=attention_parameters,
    # A causal query sees half of the sequence.
    token_flops=lambda model, length: attention_flops(model, (length + 1) / 2),
)
