"""The teacher in the student's process, spread over the same ranks."""

import copy
from pathlib import Path
from typing import Any

from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.schema import ModelConfig, RunConfig


def load_teacher(config: RunConfig, folder: Path, model: ModelConfig, kernels: str) -> Any:
    """LT2Model of this rank with a checkpoint's weights, in evaluation mode and without gradients.

    Args:
        config: of the student's run, whose layout and dtype the teacher has.
        folder: iteration folder of the teacher's checkpoint.
        model: the teacher's architecture.
        kernels: "fla" or "torch".

    Raises:
        ConfigError: the checkpoint cannot be loaded.
    """
    from megatron_lt2.model.core_config import padded_vocab_size, transformer_config
    from megatron_lt2.model.lt2_model import LT2Model
    from megatron_lt2.parallel import platform
    from megatron_lt2.training.initial_weights import load_model_weights

    own = copy.deepcopy(config)
    own.model = copy.deepcopy(model)
    own.model.loss = "final"
    own.memory.recompute_cheap, own.memory.recompute_layers = False, 0.0
    on_gpu = platform.has_gpu()
    try:
        teacher: Any = LT2Model(
            transformer_config(own, on_gpu),
            own.model,
            padded_vocab_size=padded_vocab_size(own),
            max_sequence_length=own.data.sequence_length,
            kernels=kernels,
        )
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"teacher: {' '.join(str(error).split())}") from error
    if on_gpu:
        teacher.cuda()
    load_model_weights(teacher, folder)
    return teacher.requires_grad_(False).eval()


def check_same_tokens(prefixes: list[str], folder: Path, vocabulary: int, tokenizer: Any) -> None:
    """Refuse data whose token ids mean something else to the teacher.

    Args:
        prefixes: of the token files; empty for conversations.
        folder: iteration folder of the teacher.
        vocabulary: of the teacher.
        tokenizer: of the data.

    Raises:
        ConfigError: names both.
    """
    from megatron_lt2.data.tokenizer import load_tokenizer

    own = folder.absolute().parent.parent / "tokenizer"
    if tokenizer.vocab_size > vocabulary:
        raise ConfigError(
            f"the data's tokenizer {tokenizer.path} has {tokenizer.vocab_size} tokens, the teacher "
            f"{vocabulary}; tokenize the text with the teacher's"
        )
    if not own.is_dir():
        return
    try:
        theirs = load_tokenizer(own)
    except ValueError as error:
        raise ConfigError(f"teacher: {error}") from None
    if theirs.backend.get_vocab() != tokenizer.backend.get_vocab():
        raise ConfigError(
            f"the data was made with the tokenizer {tokenizer.path}, the teacher's is {own}, and "
            "their token ids differ; tokenize the text with the teacher's"
        )
