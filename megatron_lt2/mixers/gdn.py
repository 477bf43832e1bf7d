"""Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024, arXiv 2412.06464) with LT2's geometry.

    S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,   o_t = S_t^T q_t / sqrt(K)

q, k and v pass through a short convolution and SiLU; q and k are L2-normalised; the log decay is
g = -exp(A_log) softplus(a + dt_bias) a head; the output is RMS-normed a head and gated by SiLU.
A_log and dt_bias stay in fp32 whatever the model's dtype: bf16 cannot hold decays near one.
"""

import math
from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megatron_lt2.config.schema import GDNConfig, ModelConfig
from megatron_lt2.kernels.gdn import gated_delta_rule
from megatron_lt2.mixers.entry import MixerEntry
from megatron_lt2.mixers.linear_base import Layout, LinearMixer
from megatron_lt2.mixers.parameters import Initialiser, Shards, declare, new_parameter
from megatron_lt2.ops.gdn import gdn_log_decay


class GatedDeltaNet(LinearMixer):
    """Gated DeltaNet in megatron-core's self_attention slot."""

    fp32_parameters = ("A_log", "dt_bias")

    def __init__(self, *args: Any, settings: GDNConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings = settings
        heads = self.layout.heads
        for name, init in (
            ("A_log", _log_uniform_up_to(settings.a_init_max)),
            ("dt_bias", _inverse_softplus_of_steps(settings.dt_min, settings.dt_max)),
        ):
            parameter = new_parameter(self.heads, dtype=torch.float32)
            declare(parameter, init=init, shards=Shards((heads,)))
            self.register_parameter(name, parameter)

    def recurrence(self, parts: dict[str, Tensor], cu_seqlens: Tensor | None) -> Tensor:
        """The gated delta rule on the convolved q, k and v; see LinearMixer.recurrence."""
        beta = parts["beta"].squeeze(-1).float().sigmoid()
        if self.settings.allow_neg_eigval:
            beta = beta * 2
        log_decay = gdn_log_decay(parts["decay"].squeeze(-1), self.A_log, self.dt_bias)
        out, _ = gated_delta_rule(
            parts["query"],
            parts["key"],
            parts["value"],
            log_decay,
            beta,
            cu_seqlens=cu_seqlens,
            backend=self.kernels,
        )
        return out


def gdn_layout(model: ModelConfig) -> Layout:
    """The geometry that the model config gives to its Gated DeltaNet layers."""
    k, v = model.gdn_head_k_dim, model.gdn_head_v_dim
    return Layout(
        heads=model.gdn_heads,
        head_v_dim=v,
        sections={"query": k, "key": k, "value": v, "gate": v, "beta": 1, "decay": 1},
        conv=("query", "key", "value"),
        gate="gate",
        conv_size=model.gdn.conv_size,
        norm_eps=model.gdn.norm_eps,
    )


def _log_uniform_up_to(largest: float) -> Initialiser:
    """log A with A uniform in (0, largest]; the smallest value keeps the logarithm finite."""

    def fill(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        rates = torch.rand(shape, generator=generator, device=generator.device) * largest
        return rates.clamp_min(1e-4).log()

    return fill


def _inverse_softplus_of_steps(smallest: float, largest: float) -> Initialiser:
    """dt_bias such that softplus(dt_bias) is log-uniform in [smallest, largest]."""

    def fill(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        u = torch.rand(shape, generator=generator, device=generator.device)
        steps = torch.exp(u * math.log(largest / smallest) + math.log(smallest)).clamp_min(1e-4)
        return steps + torch.log(-torch.expm1(-steps))

    return fill


def _spec(model: ModelConfig, kernels: str) -> ModuleSpec:
    return ModuleSpec(
        module=GatedDeltaNet,
        params={"layout": gdn_layout(model), "kernels": kernels, "settings": model.gdn},
    )


def _matrices(model: ModelConfig) -> int:
    heads, k, v = model.gdn_heads, model.gdn_head_k_dim, model.gdn_head_v_dim
    return model.hidden_size * heads * (2 * k + 3 * v + 2)


def _parameters(model: ModelConfig) -> int:
    heads, k, v = model.gdn_heads, model.gdn_head_k_dim, model.gdn_head_v_dim
    conv = heads * (2 * k + v) * model.gdn.conv_size
    return _matrices(model) + conv + 2 * heads + v


def _flops(model: ModelConfig, length: int) -> float:
    heads, k, v = model.gdn_heads, model.gdn_head_k_dim, model.gdn_head_v_dim
    conv = 2 * heads * (2 * k + v) * model.gdn.conv_size
    # The recurrence itself: read k^T S, rank-one write, read q^T S; 2 operations each a state
    # entry.
    return conv + 3 * 2 * heads * k * v


MIXER = MixerEntry(
    spec=_spec,
    heads=lambda m: {"model.gdn.num_heads": m.gdn_heads},
    parameters=_parameters,
    matrix_parameters=_matrices,
    token_flops=_flops,
)
