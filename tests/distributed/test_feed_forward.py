"""Our SwiGLU layer is megatron-core's MLP, forward and backward, on one rank and on two (fp64)."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.ranks import run_ranks
from tests.tiny_run import tiny_config

LENGTH, BATCH, WIDTH = 6, 3, 32


def _inputs():
    generator = torch.Generator().manual_seed(8)
    shape = (LENGTH, BATCH, WIDTH)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))


def _layers(rank, world, sequence):
    """By layer: parameter names and shapes, output, gradients of input and weights."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules

    from megatron_lt2.model.core_config import transformer_config
    from megatron_lt2.parallel.feed_forward import FeedForward
    from megatron_lt2.parallel.start import start_ranks

    config = tiny_config()
    config.parallel.tensor, config.parallel.sequence = world, sequence
    config.precision.dtype = "fp32"
    start_ranks(config.parallel, 1)
    core = transformer_config(config, on_gpu=False)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    layers = {
        "ours": FeedForward.for_layer(core, SimpleNamespace(tp=groups.tp), "torch"),
        "theirs": MLP(core, linears, tp_group=groups.tp, ffn_hidden_size=core.ffn_hidden_size),
    }
    found = {}
    for name, layer in layers.items():
        layer.double()
        generator = torch.Generator().manual_seed(10 + rank)
        for weight in layer.parameters():
            values = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.data.copy_(values / weight.shape[1] ** 0.5)
        x, dy = ((t.chunk(world)[rank] if sequence else t).clone() for t in _inputs())
        x.requires_grad_()
        out, bias = layer(x)
        assert bias is None
        out.backward(dy)
        weights = {n: w.grad.numpy() for n, w in layer.named_parameters()}
        found[name] = (out.detach().numpy(), x.grad.numpy(), weights)
    return found


@pytest.mark.parametrize("world, sequence", [(1, False), (2, False), (2, True)])
def test_equals_megatron_cores(world, sequence):
    for found in run_ranks(world, _layers, sequence):
        ours, theirs = found["ours"], found["theirs"]
        assert list(ours[2]) == list(theirs[2])
        pairs = [*zip(ours[:2], theirs[:2], strict=True)]
        pairs += [(ours[2][name], theirs[2][name]) for name in theirs[2]]
        for got, expected in pairs:
            assert np.abs(expected).max() > 0.1
            np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)
