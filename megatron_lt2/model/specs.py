"""Layer specs: LT2 layers for megatron-core's TransformerBlock.

`layer_spec` gives one layer and can be used by any megatron-core model; `block_spec` gives the
per-layer list that a layer pattern describes.
"""

import functools
from collections.abc import Sequence

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_lt2.config.schema import ModelConfig
from megatron_lt2.mixers.attention import attention_spec
from megatron_lt2.mixers.norm import RMSNorm
from megatron_lt2.mixers.registry import MIXER_NAMES, get_mixer
from megatron_lt2.model.pattern import MASKS, expand_pattern, loop_windows
from megatron_lt2.model.sandwich import SandwichLayer
from megatron_lt2.parallel.feed_forward import FeedForward


def layer_spec(
    mixer: str,
    model: ModelConfig,
    kernels: str = "torch",
    windows: Sequence[int | None] | None = None,
) -> ModuleSpec:
    """One LT2 layer: norm, mixer, add, norm, SwiGLU, add; `model.norm_mode` may put norms before
    the adds too.

    Args:
        mixer: a name from mixers/registry.py.
        model: geometry of the mixers.
        kernels: "fla" or "torch", see kernels/backend.py.
        windows: of an attention layer whose window differs between loops, one for each loop.
    """
    if windows is None:
        attention = get_mixer(mixer).spec(model, kernels)
    else:
        attention = attention_spec(model, kernels, windows)
    return ModuleSpec(
        module=SandwichLayer if model.norm_mode == "sandwich" else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=functools.partial(RMSNorm, kernels=kernels, with_skip=True),
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=functools.partial(RMSNorm, kernels=kernels, with_skip=True),
            mlp=functools.partial(FeedForward.for_layer, kernels=kernels),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def block_spec(
    model: ModelConfig, kernels: str = "torch", layers: range | None = None
) -> TransformerBlockSubmodules:
    """The physical layers that `model.pattern` describes, and the final norm.

    layers: those of one pipeline stage, counted from 0 in the whole model; default: all.
    """
    names = expand_pattern(model.pattern, model.num_layers, MIXER_NAMES)
    wanted = range(len(names)) if layers is None else layers
    by_loop = loop_windows(
        model.pattern, model.num_layers, model.loops, model.window.size, MIXER_NAMES
    )

    def spec(i: int) -> ModuleSpec:
        scheduled = by_loop is not None and names[i] in MASKS
        windows = [windows[i] for windows in by_loop or ()] if scheduled else None
        return layer_spec(names[i], model, kernels, windows)

    return TransformerBlockSubmodules(
        layer_specs=[spec(i) for i in wanted],
        layer_norm=functools.partial(RMSNorm, kernels=kernels),
    )
