"""Loss and gradients of a small hybrid with random parameters, for tests/gpu/test_parity_gpu.py.

    python -m tests.gpu.parity_run OUTPUT.npz [--break NAME ...]

The device is the GPU (bf16, FLA kernels) or, with LT2_FORCE_CPU=1, the CPU (fp32, plain torch).
Each name given with --break also runs the model with that fault and adds `NAME/...` entries.
"""

import argparse
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

from megatron_lt2.parallel import platform

platform.install()

import numpy as np  # noqa: E402
import torch  # noqa: E402

from megatron_lt2.config.schema import ModelConfig, RunConfig  # noqa: E402
from megatron_lt2.recurrent.gdn import GatedDeltaNet  # noqa: E402
from tests import tiny_run  # noqa: E402
from tests.tiny_run import (  # noqa: E402
    build,
    feed_of,
    global_tensors,
    micro_batch_count,
    random_batch,
    tiny_config,
)


def parity_config() -> RunConfig:
    """Head sizes of the 1.3B model, a length that no chunk divides."""
    config = tiny_config()
    config.model = ModelConfig(
        num_layers=2,
        pattern="gdn+full",
        hidden_size=512,
        num_heads=4,
        vocab_size=1000,
        loops=2,
        ffn_hidden_size=768,
        tie_embeddings=False,
    )
    config.parallel.distributed_optimizer = True  # bf16 with fp32 parameters needs it
    config.data.sequence_length = 333
    config.training.global_batch_size = 2
    return config


def few_labels(config: RunConfig, step: int) -> dict[str, torch.Tensor]:
    """Eight labels that depend on the token: gradients with a direction, not a sum that cancels."""
    batch = random_batch(config, step)
    return {**batch, "labels": batch["tokens"] % 8 + 1}


@contextlib.contextmanager
def fault(name: str) -> Iterator[None]:
    """Break every Gated DeltaNet layer in one way."""
    right = GatedDeltaNet.prepare

    def wrong(mixer, parts, weights, scan):  # type: ignore[no-untyped-def]
        recurrence = right(mixer, parts, weights, scan)
        q, k, v, decay, *rest = recurrence.tensors
        if name == "zero_mixer":
            v = v * 0
        elif name == "swap_qk":
            q, k = k, q
        else:  # no_decay: softplus of a very negative number is zero
            decay = decay * 0 - 1e4
        return replace(recurrence, tensors=(q, k, v, decay, *rest))

    with mock.patch.object(GatedDeltaNet, "prepare", wrong):
        yield


def measure(config: RunConfig, parts) -> dict[str, np.ndarray]:  # type: ignore[no-untyped-def]
    """Loss and all gradients of one global batch."""
    from megatron_lt2.training.steps import _run_schedule, mean_over_ranks

    parts.ddp.zero_grad_buffer()
    loss_sum, tokens = _run_schedule(
        config, parts, feed_of(config, range(1)), micro_batch_count(config), forward_only=False
    )
    gradients = global_tensors(parts, config, lambda p: p.main_grad.cpu())
    return {"loss": np.asarray(mean_over_ranks(loss_sum, tokens)), **gradients}


def main() -> None:
    """Run and write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("output")
    parser.add_argument("--break", nargs="*", default=[], dest="faults")
    arguments = parser.parse_args()
    if platform.has_gpu():
        from tests.gpu import untuned

        untuned.install()
    config = parity_config()
    tiny_run.random_batch = few_labels
    parts = build(config, rounded=True)
    results = measure(config, parts)
    for name in arguments.faults:
        with fault(name):
            results.update({f"{name}/{k}": v for k, v in measure(config, parts).items()})
    np.savez(arguments.output, **results)


if __name__ == "__main__":
    main()
