"""Tensors that are made again instead of kept: gradients, memory, what stays kept."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from megatron_lt2.parallel.remake import Keeping, remakable
from megatron_lt2.parallel.sectioned_linear import project


def _norm(x, weight):
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-5)


def _numbers():
    generator = torch.Generator().manual_seed(2)
    shapes = ((6, 2, 5), (5,), (7, 5), (6, 2, 7))
    return [torch.randn(s, generator=generator).requires_grad_() for s in shapes]


def _gradients(made_again, make=_norm):
    x, scale, weight, direction = _numbers()
    y = _norm(x, scale)
    if made_again:
        remakable(y, (x, scale), make)
    out = project(y, weight, None, False)
    return [out, *torch.autograd.grad(out, (x, scale, weight), direction.detach())]


def test_gradients_are_the_same_to_the_bit():
    for ours, plain in zip(_gradients(True), _gradients(False), strict=True):
        assert torch.equal(ours, plain)


def test_what_is_made_again_is_what_counts():
    twice = _gradients(True, lambda x, weight: 2 * _norm(x, weight))
    plain = _gradients(False)
    assert torch.equal(twice[3], 2 * plain[3])
    assert torch.equal(twice[1], plain[1])


@pytest.mark.parametrize("made_again", [False, True])
def test_the_output_is_freed(made_again):
    x, scale, weight, _ = _numbers()
    y = _norm(x, scale)
    if made_again:
        remakable(y, (x, scale), _norm)
    seen = weakref.ref(y)
    gc.disable()  # nothing may hang on a cycle, which would wait for the collector
    try:
        out = project(y, weight, None, False)
        del y
        assert (seen() is None) == made_again
    finally:
        gc.enable()
    kept = {t.untyped_storage().data_ptr() for t in _saved(out)}
    inputs = {t.untyped_storage().data_ptr() for t in (x, scale, weight)}
    assert (kept <= inputs) == made_again


def _saved(out):
    """Tensors that the projection's backward pass holds."""
    node = out.grad_fn
    while not hasattr(node, "saved_tensors"):
        node = node.next_functions[0][0]
    return node.saved_tensors


def test_without_gradients_nothing_is_marked():
    x, scale, _, _ = _numbers()
    with torch.no_grad():
        y = remakable(_norm(x, scale), (x, scale), _norm)
    assert Keeping(y).tensors[0] is y


def test_a_view_is_kept_as_it_is():
    x, scale, weight, _ = _numbers()
    y = remakable(_norm(x, scale), (x, scale), _norm)
    keeping = Keeping(y.transpose(0, 1))
    assert len(keeping.tensors) == 1
    assert torch.equal(keeping.again(keeping.tensors), y.transpose(0, 1))
