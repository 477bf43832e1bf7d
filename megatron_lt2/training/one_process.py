"""The training model with a checkpoint's weights, in one process on the CPU, for comparisons."""

import os
from pathlib import Path
from typing import Any

from megatron_lt2.config.load import load_saved
from megatron_lt2.config.schema import MegatronConfig, ParallelConfig

_CHANGED = ("LT2_FORCE_CPU", "RANK", "WORLD_SIZE", "LOCAL_RANK")
_before: dict[str, str | None] = {}


def load_model(folder: Path) -> Any:
    """LT2Model of an iteration folder, in fp32 and in evaluation mode.

    Starts torch.distributed with one rank; `close` ends it and gives back the environment.

    Raises:
        ConfigError: the checkpoint cannot be loaded.
    """
    if not _before:
        _before.update({name: os.environ.get(name) for name in _CHANGED})
    os.environ["LT2_FORCE_CPU"] = "1"  # products in fp32, which a GPU may round to TF32
    from megatron_lt2.parallel import platform

    platform.install()
    from megatron.core import parallel_state

    from megatron_lt2.model.core_config import padded_vocab_size, transformer_config
    from megatron_lt2.model.lt2_model import LT2Model
    from megatron_lt2.parallel.start import start_ranks
    from megatron_lt2.training.initial_weights import load_weights

    config = load_saved(folder / "run_config.yaml")
    config.parallel, config.megatron = ParallelConfig(), MegatronConfig()
    config.precision.dtype = "fp32"
    start_ranks(config.parallel, 1)
    model = LT2Model(
        transformer_config(config, on_gpu=False),
        config.model,
        padded_vocab_size=padded_vocab_size(config),
        max_sequence_length=config.data.sequence_length,
    )
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    load_weights(model, folder, {"dp_cp_group": group})
    return model.eval()


def close() -> None:
    """End what `load_model` began."""
    from megatron_lt2.parallel.start import stop_ranks

    stop_ranks()
    for name, value in _before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _before.clear()
