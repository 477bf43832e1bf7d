"""Outputs that are dropped and made again, and what a linear mixer does with them."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_lt2.kernels.conv import Part, convolve_parts
from megatron_lt2.kernels.rematerialise import drop_and_rebuild
from megatron_lt2.ops.conv import causal_conv1d
from megatron_lt2.parallel import platform
from tests.ranks import run_ranks
from tests.tiny_run import tiny_config

platform.install()


def layer(x: Tensor, drop: bool, seen: list[Tensor] | None = None, factor: float = 1.0) -> Tensor:
    """exp(sin x) with sin x made again."""
    y = x.sin()
    out = y.square()
    if drop:
        inputs = x.detach()
        drop_and_rebuild([y], lambda to: to.copy_(inputs.sin() * factor), out)
    if seen is not None:
        seen.append(y)
    return out


def gradient(run: Callable[[Tensor], Tensor], **options: bool) -> Tensor:
    x = torch.arange(1.0, 5.0, requires_grad=True)
    run(x).sum().backward(**options)
    assert x.grad is not None
    return x.grad


def test_memory_is_given_back_and_filled_again() -> None:
    seen: list[Tensor] = []
    x = torch.arange(1.0, 5.0, requires_grad=True)
    out = layer(x, True, seen)
    assert seen[0].untyped_storage().nbytes() == 0
    out.sum().backward()
    assert torch.equal(x.grad, gradient(lambda x: layer(x, False)))
    assert torch.equal(seen[0], x.sin())


def test_what_is_made_again_is_what_counts() -> None:
    wrong = gradient(lambda x: layer(x, True, factor=2.0))
    assert not torch.equal(wrong, gradient(lambda x: layer(x, False)))


def test_two_backward_passes() -> None:
    x = torch.arange(1.0, 5.0, requires_grad=True)
    out = layer(x, True)
    (first,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(first, second)


def test_nothing_is_dropped_without_gradients() -> None:
    seen: list[Tensor] = []
    with torch.no_grad():
        layer(torch.ones(3, requires_grad=True), True, seen)
    layer(torch.ones(3), True, seen)
    assert all(torch.equal(y, torch.ones(3).sin()) for y in seen)


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint(reentrant: bool) -> None:
    def whole(x: Tensor) -> Tensor:
        return checkpoint(lambda x: layer(layer(x, True), True), x, use_reentrant=reentrant)

    assert torch.equal(gradient(whole), gradient(lambda x: layer(layer(x, False), False)))


def test_memory_is_not_held_once_the_gradient_has_passed() -> None:
    """The hook must let go of what it fills, or a whole pass would fill up."""
    seen: list[Tensor] = []
    x = torch.arange(1.0, 5.0, requires_grad=True)
    out = layer(x, True, seen)
    alive = torch.multiprocessing.reductions.StorageWeakRef(seen[0].untyped_storage())
    out.sum().backward()
    seen.clear()
    assert out.grad_fn is not None and alive.expired()


def test_parts_and_heads_of_length_one() -> None:
    random = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*s, generator=random).double() for s in ((2, 9, 10), (10, 4)))
    q, v = convolve_parts(x, weight, [Part(6, unit=3), Part(4)], backend="torch")
    plain, _ = causal_conv1d(x, weight)
    heads = plain[..., :6].unflatten(-1, (2, 3))
    expected = heads / (heads.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(q, expected.flatten(-2))
    torch.testing.assert_close(v, plain[..., 6:])
    assert q.is_contiguous() and v.is_contiguous()


def _both_ways(rank: int, world: int, name: str) -> list[list[np.ndarray]]:
    from tests.tiny_run import build

    config = tiny_config()
    config.model.pattern = name
    results = []
    for cheap in (False, True):
        mixer = build(config, restart=True).model.decoder.layers[0].self_attention.double()
        mixer.config.recompute_cheap = cheap
        for parameter in mixer.parameters():  # fp32; here gradients come by autograd
            vars(parameter).pop("main_grad", None)
        storages: list[torch.UntypedStorage] = []
        plain, first = mixer.recurrent.mix, mixer.layout.conv_names[0]

        def mix(parts, *rest, plain=plain, first=first, storages=storages):
            storages.append(parts[first].untyped_storage())
            return plain(parts, *rest)

        mixer.recurrent.mix = mix
        x = torch.randn(11, 2, config.model.hidden_size, dtype=torch.float64)
        x = x.copy_(torch.arange(x.numel()).view_as(x).sin()).requires_grad_()
        out, _ = mixer(x)
        assert (storages[0].nbytes() == 0) == cheap
        out.square().sum().backward()
        own = [parameter.grad for parameter in mixer.parameters()]
        results.append([y.detach().clone().numpy() for y in (out, x.grad, *own)])
    return results


@pytest.mark.parametrize("name", ["gdn", "mamba2"])
def test_a_mixer_s_gradients_are_the_same_to_the_bit(name: str) -> None:
    (results,) = run_ranks(1, _both_ways, name)
    plain, again = results
    assert len(plain) > 5
    for x, y in zip(plain, again, strict=True):
        assert np.array_equal(x, y) and np.abs(x).max() > 0
