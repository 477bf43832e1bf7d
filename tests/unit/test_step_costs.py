"""What a step does beside the model: norms of all gradients at once, garbage collection."""

import gc

import pytest
import torch

from megatron_lt2.parallel import platform

platform.install()

from megatron.core.optimizer import clip_grads  # noqa: E402

from megatron_lt2.training import multi_tensor  # noqa: E402
from megatron_lt2.training.garbage import INTERVAL, Collections  # noqa: E402


@pytest.fixture
def installed(monkeypatch):
    from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale

    monkeypatch.setattr(clip_grads, "l2_norm_impl", local_multi_tensor_l2_norm)
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", local_multi_tensor_scale)
    multi_tensor.install()


def test_norm_and_scale(installed):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(n, generator=generator) for n in (3, 1, 50)]
    whole = torch.cat(tensors)
    found, _ = clip_grads.l2_norm_impl(0, None, [tensors], False)
    torch.testing.assert_close(found, whole.norm().reshape(1))
    clip_grads.multi_tensor_scale_impl(0, None, [tensors, tensors], 0.25)
    torch.testing.assert_close(torch.cat(tensors), whole / 4)
    others = [torch.zeros_like(x) for x in tensors]
    clip_grads.multi_tensor_scale_impl(0, None, [tensors, others], 2.0)
    torch.testing.assert_close(torch.cat(others), whole / 2)
    torch.testing.assert_close(torch.cat(tensors), whole / 4)


def test_other_kernels_stay(monkeypatch):
    def of_apex():
        raise AssertionError

    monkeypatch.setattr(clip_grads, "l2_norm_impl", of_apex)
    multi_tensor.install()
    assert clip_grads.l2_norm_impl is of_apex


class _Cycle:
    alive = 0

    def __init__(self):
        type(self).alive += 1
        self.me = self

    def __del__(self):
        type(self).alive -= 1


def test_garbage_is_collected_at_set_times_only():
    before = gc.isenabled()
    with Collections() as collections:
        assert not gc.isenabled()
        collections.after_step()
        _Cycle()
        for _ in range(INTERVAL - 2):
            collections.after_step()
        assert _Cycle.alive == 1
        collections.after_step()
        assert _Cycle.alive == 0
    assert gc.isenabled() == before
    assert gc.get_freeze_count() == 0
