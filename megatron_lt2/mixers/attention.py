"""Full softmax attention: megatron-core's SelfAttention with LT2's output gate and a plain core.

The gate is megatron-core's `attention_output_gate`: its rows are fused into linear_qkv, one block a
key/value group, [queries | gate | key | value]. LT2 starts them at zero (gate = 0.5 everywhere),
which is declared here. The core is torch's scaled_dot_product_attention, or its variable-length
form on GPU, so that neither Transformer Engine nor a dense mask is needed.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megatron_lt2.config.schema import ModelConfig
from megatron_lt2.mixers.entry import MixerEntry
from megatron_lt2.mixers.parameters import Shards, declare, truncated_normal


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


class CausalCoreAttention(MegatronModule):
    """softmax(q k^T / sqrt(d)) v with a causal mask, separate for each packed document.

    Fills megatron-core's core_attention slot. Inputs are [s, b, heads, d], or [t, heads, d] for
    'thd' packing; keys and values may have fewer heads (grouped queries). Output: [s, b, heads * d]
    ([t, ...]).
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **ignored: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

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

        The mask arguments are megatron-core's and unused: the mask is causal by construction.
        """
        assert attention_bias is None, "CausalCoreAttention has no attention bias"
        if packed_seq_params is None:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            out = self._attend(q, k, v)
            return out.permute(2, 0, 1, 3).flatten(2)
        if query.dim() == 4:
            assert query.shape[1] == 1, "packed documents need a batch of one row"
            q, k, v = query.squeeze(1), key.squeeze(1), value.squeeze(1)
            return self._packed(q, k, v, packed_seq_params).flatten(1).unsqueeze(1)
        return self._packed(query, key, value, packed_seq_params).flatten(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=q.shape[1] != k.shape[1]
        )

    def _packed(self, q: Tensor, k: Tensor, v: Tensor, packing: PackedSeqParams) -> Tensor:
        """Attention within each document; q, k, v are [t, heads, d]."""
        bounds = packing.cu_seqlens_q
        if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
            return varlen_attention(q, k, v, bounds, int(packing.max_seqlen_q), self.softmax_scale)
        documents = []
        starts = bounds.tolist()
        for start, end in zip(starts[:-1], starts[1:], strict=True):
            rows = (x[start:end].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
            documents.append(self._attend(*rows).squeeze(0).transpose(0, 1))
        return torch.cat(documents)


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float | None
) -> Tensor:
    """Flash attention over packed documents; q [t, heads, d], bounds int32 [documents + 1].

    torch renamed the causal switch: `is_causal` up to 2.11, a window open to the left later.
    """
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    if k.shape[1] != q.shape[1]:
        repeats = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    accepted = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = (
        {"window_size": (-1, 0)} if "window_size" in accepted else {"is_causal": True}
    )
    if scale is not None:
        causal["scale"] = scale
    out: Any = varlen_attn(q, k, v, bounds, bounds, longest, longest, **causal)
    return out


def _spec(model: ModelConfig, kernels: str) -> ModuleSpec:
    return ModuleSpec(
        module=FullAttention,
        params={
            "attn_mask_type": AttnMaskType.causal,
            "init_std": model.init.std or model.hidden_size**-0.5,
            "init_cutoff": model.init.cutoff,
        },
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=CausalCoreAttention,
            linear_proj=RowParallelLinear,
        ),
    )


def _parameters(model: ModelConfig) -> int:
    queries = model.num_heads * model.attention_head_dim
    keys = model.kv_heads * model.attention_head_dim
    projections = queries * (2 if model.attention.output_gate else 1) + 2 * keys
    return model.hidden_size * (projections + queries)


def _flops(model: ModelConfig, length: int) -> float:
    # q k^T and the product with v, 2 multiply-adds each; a causal query sees half of the keys.
    return 2 * 2 * model.num_heads * model.attention_head_dim * (length + 1) / 2


MIXER = MixerEntry(
    spec=_spec,
    heads=lambda m: {"model.num_heads": m.num_heads, "model.num_kv_heads": m.kv_heads},
    parameters=_parameters,
    matrix_parameters=_parameters,
    token_flops=_flops,
)
