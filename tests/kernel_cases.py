"""Every recurrence of `megatron_lt2.kernels` in one table, for the tests that compare backends."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lt2.kernels.gdn import delta_rule, gated_delta_net
from megatron_lt2.kernels.gla import gla
from megatron_lt2.kernels.kda import kimi_delta_attention
from megatron_lt2.kernels.linear import normalized_linear_attention
from megatron_lt2.kernels.mlstm import mlstm
from megatron_lt2.kernels.simple_gla import simple_gla
from megatron_lt2.ops.linear import feature_map

MLSTM_M = 0.3
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Kernel:
    """One kernel function, or one way to call it.

    `gates` maps names to shapes: "h" a number a token and head, "c" one a token, head and channel,
    "H" one a head, "HK" one a head and channel.
    """

    name: str
    function: Callable[..., Any]
    gates: dict[str, str]
    key: int
    """Production size of a head."""
    value: int
    options: dict[str, Any] = field(default_factory=dict)
    columns: int = 0
    """Columns of the state beyond the values."""
    padding: bool = False
    """Some tokens are padding (`real_BT`)."""

    def inputs(
        self,
        batch: int,
        length: int,
        heads: int,
        key: int,
        value: int,
        documents: int,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Inputs:
        """Random inputs, `initial_state` last; q, k, v and raw gates in `dtype`, the rest fp32."""
        random = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random, device=device)

        x = {name: normal(batch, length, heads, key).to(dtype) for name in "qk"}
        x["v"] = normal(batch, length, heads, value).to(dtype)
        shapes = {
            "h": (batch, length, heads),
            "c": (batch, length, heads, key),
            "H": (heads,),
            "HK": (heads * key,),
        }
        for name, kind in self.gates.items():
            raw = normal(*shapes[kind])
            if name in ("g", "f"):
                x[name] = F.logsigmoid(raw + 2)
            elif name == "beta":
                x[name] = raw.sigmoid()
            else:
                x[name] = raw.to(dtype) if name in ("a", "b") else raw
        state = normal(documents, heads, key, value + self.columns)
        x["initial_state"] = state.abs() if self.function is normalized_linear_attention else state
        return x

    def __call__(
        self,
        backend: str,
        x: Inputs,
        cu_seqlens: Tensor | None = None,
        output_final_state: bool = True,
    ) -> list[Tensor]:
        """Output and final states, without those that are None."""
        names = [name for name in x if name != "initial_state"]
        tensors = [x[name] for name in names]
        state: Any = x.get("initial_state")
        options = dict(self.options)
        if self.padding:
            length = x["q"].shape[1]
            token = torch.arange(length, device=x["q"].device)
            options["real_BT"] = ((token > 2) & (token % 11 != 5)).expand(x["q"].shape[:2])
        if self.function is mlstm and state is not None:
            state = state, torch.full_like(state[..., 0, 0], MLSTM_M)
        if self.function is simple_gla and "g" not in self.gates:
            tensors.append(None)
        if "decay" in options:
            heads = x["q"].shape[2]
            per_head = torch.arange(heads, device=x["q"].device)
            options["decay_H"] = torch.log1p(-(2.0 ** (options.pop("decay") - per_head)))
        if self.function is normalized_linear_attention:
            tensors[:2] = [feature_map(y, "elu1") for y in tensors[:2]]
        o, final = self.function(
            *tensors,
            backend=backend,
            initial_state=state,
            cu_seqlens=cu_seqlens,
            output_final_state=output_final_state,
            **options,
        )
        finals = final if isinstance(final, tuple) else (final,)
        return [o, *(y for y in finals if y is not None)]


GDN_GATES = {"a": "h", "b": "h", "A_log": "H", "dt_bias": "H"}
KDA_GATES = {"a": "c", "b": "h", "A_log": "H", "dt_bias": "HK"}
KERNELS = [
    Kernel("linear", simple_gla, {}, 128, 128),
    Kernel("retnet", simple_gla, {}, 128, 256, {"decay": -5.0}),
    Kernel("mamba2", simple_gla, {"g": "h"}, 64, 256, {"scale": 1.0}),
    Kernel("gla", gla, {"g": "c"}, 64, 128),
    Kernel("hgrn2", gla, {"g": "c"}, 128, 128, {"scale": 1.0}),
    Kernel("deltanet", delta_rule, {"beta": "h"}, 128, 128),
    Kernel("gdn", gated_delta_net, GDN_GATES, 96, 192),
    Kernel("gdn_negative", gated_delta_net, GDN_GATES, 128, 128, {"allow_neg_eigval": True}),
    Kernel("gdn_padding", gated_delta_net, GDN_GATES, 96, 192, padding=True),
    Kernel("kda", kimi_delta_attention, KDA_GATES, 128, 128),
    Kernel(
        "kda_padding",
        kimi_delta_attention,
        KDA_GATES,
        128,
        128,
        {"allow_neg_eigval": True},
        padding=True,
    ),
    Kernel("mlstm", mlstm, {"i": "h", "f": "h"}, 64, 128, columns=1),
    Kernel("normalized", normalized_linear_attention, {}, 128, 128, columns=1),
]
