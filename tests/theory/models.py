"""Tiny looped models of random parameters in fp64, several of them in one process."""

from typing import Any

from megatron_lt2.config.schema import RunConfig


def random_model(config: RunConfig, seed: int = 5, initial: bool = False) -> Any:
    """An LT2Model in fp64; the parallel settings are those of the first call.

    Args:
        initial: keep the initial values that training starts from; else all are random.
    """
    from megatron.core import parallel_state

    from megatron_lt2.model.init import initialise
    from megatron_lt2.parallel.start import start_ranks
    from megatron_lt2.training.setup import build_parts
    from tests.tiny_run import make_random

    if not parallel_state.model_parallel_is_initialized():
        start_ranks(config.parallel, config.training.seed)
    parts = build_parts(config)
    if initial:
        initialise(parts.model, config.model, seed)
    else:
        make_random(parts, config, seed=seed)
    return parts.model.double().eval()
