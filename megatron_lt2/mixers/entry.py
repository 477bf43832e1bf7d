"""What a mixer's file tells the rest of the project: its layer spec, head counts and costs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_lt2.config.schema import ModelConfig

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec


@dataclass(frozen=True)
class MixerEntry:
    """One mixer, as `model/specs.py`, `model/counting.py` and the config checks see it.

    spec: (model config, kernel backend) -> ModuleSpec for megatron-core's self_attention slot.
    heads: head counts which tensor parallelism must divide, by the setting that fixes them.
    parameters: parameters of one layer's mixer.
    matrix_parameters: those of them that multiply every token as a dense matrix.
    token_flops: (model, length) -> operations a token of one forward pass beyond those matrices,
        where a multiply-add counts as two and `length` is the tokens of a sequence.
    """

    spec: Callable[[ModelConfig, str], "ModuleSpec"]
    heads: Callable[[ModelConfig], dict[str, int]]
    parameters: Callable[[ModelConfig], int]
    matrix_parameters: Callable[[ModelConfig], int]
    token_flops: Callable[[ModelConfig, int], float]
