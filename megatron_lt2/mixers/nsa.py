"""Native sparse attention (Yuan et al. 2025, arXiv 2502.11089): compressed blocks, selected blocks
and a window, summed with a sigmoid gate a head and branch.

The attention is `megatron_lt2/ops/nsa.py`; this is the layer. Keys and values are grouped: 16 query
heads share one, as FLA's kernel wants it, which bounds tensor parallelism by the key heads.
"""

from typing import TYPE_CHECKING, Any

from megatron_lt2.config.schema import ModelConfig
from megatron_lt2.mixers.entry import MixerEntry
from megatron_lt2.mixers.window import mean_keys

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec


def _spec(model: ModelConfig, kernels: str) -> "ModuleSpec":
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_lt2.mixers.nsa_layer import NSAMixer

    rope = (model.rope.theta, model.rope.interleaved)
    settings: Any = model.mixer_settings("nsa")
    params = {"mixer": "nsa", "settings": settings, "rope": rope, "kernels": kernels}
    return ModuleSpec(module=NSAMixer, params=params)


def _heads(model: ModelConfig) -> dict[str, int]:
    s = model.mixer_settings("nsa")
    return {"model.nsa.num_heads": s.num_heads, "model.nsa.num_kv_heads": s.num_kv_heads}


def _parameters(model: ModelConfig) -> int:
    s = model.mixer_settings("nsa")
    rows = (2 * s.num_heads + 2 * s.num_kv_heads) * s.head_dim + 3 * s.num_heads
    return model.hidden_size * rows


def _token_flops(model: ModelConfig, length: int) -> float:
    """q k^T and the product with v: of whole blocks, of the selected tokens and of the window."""
    s = model.mixer_settings("nsa")
    blocks = (length + 1) / 2 / s.block_size
    keys = blocks + mean_keys(length, s.selected_blocks * s.block_size)
    keys += mean_keys(length, s.window)
    return 2 * 2 * s.num_heads * s.head_dim * keys


MIXER = MixerEntry(
    spec=_spec,
    heads=_heads,
    parameters=_parameters,
    matrix_parameters=_parameters,
    token_flops=_token_flops,
)
