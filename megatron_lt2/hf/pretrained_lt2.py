"""What every LT2 model class shares: initial weights and what transformers must know."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .configuration_lt2 import LT2Config
from .layers_lt2 import LT2GateProjection, LT2RMSNorm
from .linear_lt2 import LT2LinearMixer, LT2OutputNorm, LT2ShortConv

INIT_CUTOFF = 3.0


class LT2PreTrainedModel(PreTrainedModel):
    """Base of the model classes."""

    config_class = LT2Config
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LT2Block"]
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _supports_sdpa = True
    _is_stateful = True
    # Trained in fp32 in 16-bit models too, and kept so whatever dtype a model is loaded in; the
    # mixers' own weights are added by LT2Model. transformers reads regular expressions here.
    _keep_in_fp32_modules_strict: Any = ["loop_residual$"]

    @property
    def dtype(self) -> torch.dtype:
        """Of the matrices; the first parameter, which transformers looks at, is the fp32 rho."""
        return self.get_input_embeddings().weight.dtype

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """LT2's initial weights; parameters that came from a checkpoint are left alone."""
        fresh = {
            name: parameter
            for name, parameter in module.named_parameters(recurse=False)
            if not getattr(parameter, "_is_hf_initialized", False)
        }
        if isinstance(module, LT2GateProjection) and "weight" in fresh:
            module.weight.zero_()
        elif isinstance(module, nn.Linear | nn.Embedding):
            if "weight" in fresh:
                std = module.weight.shape[-1] ** -0.5
                cutoff = INIT_CUTOFF * std
                nn.init.trunc_normal_(module.weight, std=std, a=-cutoff, b=cutoff)
            if "bias" in fresh:
                fresh["bias"].zero_()
        elif isinstance(module, LT2RMSNorm | LT2OutputNorm) and "weight" in fresh:
            module.weight.fill_(1.0)
        elif isinstance(module, LT2ShortConv):
            bound = module.weight.shape[-1] ** -0.5
            for parameter in fresh.values():
                parameter.uniform_(-bound, bound)
        elif isinstance(module, LT2LinearMixer):
            for name, parameter in fresh.items():
                # Drawn on the CPU: a few numbers, and the same on every device.
                values = module.layout.weights[name].init(
                    tuple(parameter.shape), torch.default_generator
                )
                parameter.copy_(values)
        elif "loop_residual" in fresh:
            fresh["loop_residual"].zero_()
