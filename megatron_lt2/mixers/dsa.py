"""DeepSeek sparse attention (DeepSeek-V3.2, arXiv 2512.02556): a lightning indexer picks `top_k`
keys for each query, and attention sees these.

By default all heads share one key/value head of 512 + 64 channels, so that a query gathers each key
once and not once a head. The attention is `megatron_lt2/ops/dsa.py`; the layer is dsa_layer.py, the
indexer and its loss indexer.py.
"""

from typing import TYPE_CHECKING, Any

from megatron_lt2.config.schema import ModelConfig
from megatron_lt2.mixers.entry import MixerEntry
from megatron_lt2.mixers.window import mean_keys

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec


def _spec(model: ModelConfig, kernels: str) -> "ModuleSpec":
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_lt2.mixers.dsa_layer import DSAMixer

    rope = (model.rope.theta, model.rope.interleaved)
    settings: Any = model.mixer_settings("dsa")
    params = {"mixer": "dsa", "settings": settings, "rope": rope, "kernels": kernels}
    return ModuleSpec(module=DSAMixer, params=params)


def _heads(model: ModelConfig) -> dict[str, int]:
    s = model.mixer_settings("dsa")
    found = {"model.dsa.num_heads": s.num_heads}
    if s.kv == "shared":
        found["model.dsa.latent_dim + model.dsa.rope_dim"] = s.latent_dim + s.rope_dim
    else:
        found["model.dsa.num_kv_heads"] = s.num_kv_heads
    return found


def _parameters(model: ModelConfig) -> int:
    s = model.mixer_settings("dsa")
    if s.kv == "shared":
        key = s.latent_dim + s.rope_dim
        rows = (s.num_heads + 1) * key + s.num_heads * s.latent_dim
    else:
        rows = (2 * s.num_heads + 2 * s.num_kv_heads) * s.head_dim
    indexer = s.index_heads * (s.index_dim + 1) + s.index_dim
    return model.hidden_size * (rows + indexer)


def _token_flops(model: ModelConfig, length: int) -> float:
    """q k^T and the product with v of the selected keys, and the indexer's scores of all keys."""
    s = model.mixer_settings("dsa")
    shared = s.kv == "shared"
    channels = 2 * s.latent_dim + s.rope_dim if shared else 2 * s.head_dim
    attention = 2 * s.num_heads * channels * mean_keys(length, s.top_k)
    return attention + 2 * s.index_heads * s.index_dim * (length + 1) / 2


MIXER = MixerEntry(
    spec=_spec,
    heads=_heads,
    parameters=_parameters,
    matrix_parameters=_parameters,
    token_flops=_token_flops,
)
