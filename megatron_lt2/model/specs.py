"""Layer specs: LT2 layers for megatron-core's TransformerBlock.

`layer_spec` gives one layer and can be used by any megatron-core model; `block_spec` gives the
per-layer list that a layer pattern describes.
"""

import functools

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_lt2.config.schema import ModelConfig
from megatron_lt2.mixers.norm import RMSNorm
from megatron_lt2.mixers.registry import MIXER_NAMES, get_mixer
from megatron_lt2.model.pattern import expand_pattern


def layer_spec(mixer: str, model: ModelConfig, kernels: str = "torch") -> ModuleSpec:
    """One pre-norm LT2 layer: norm, mixer, add, norm, SwiGLU, add.

    Args:
        mixer: a name from mixers/registry.py.
        model: geometry of the mixers.
        kernels: "fla" or "torch", see kernels/backend.py.
    """
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=get_mixer(mixer).spec(model, kernels),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=functools.partial(
                MLP.as_mlp_submodule,
                submodules=MLPSubmodules(
                    linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear
                ),
            ),
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
    return TransformerBlockSubmodules(
        layer_specs=[layer_spec(names[i], model, kernels) for i in wanted], layer_norm=RMSNorm
    )
