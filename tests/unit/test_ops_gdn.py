"""What is special about the delta rules; test_ops_recurrences.py compares them with their loops."""

import pytest
import torch

from megatron_lt2.ops.chunks import l2_normalize
from megatron_lt2.ops.gdn import gdn_log_decay
from megatron_lt2.ops.kda import kda_log_decay
from tests.unit.recurrences import BY_NAME, make, run_chunk, run_loop

DELTA_RULES = ["delta", "gdn", "kda"]


@pytest.mark.parametrize("name", DELTA_RULES)
def test_repeated_keys_stay_accurate(name: str) -> None:
    """Undamped writes to one key make a dense system, whose powers are huge."""
    x = {n: y.detach() for n, y in make(BY_NAME[name], 1, 64).items()}
    x["k"] = x["k"][:, :1].expand_as(x["k"]).contiguous()
    x["beta"] = torch.ones_like(x["beta"])
    if "g" in x:
        x["g"] = torch.zeros_like(x["g"])
    expected = run_loop(BY_NAME[name], x)
    result = run_chunk(BY_NAME[name], {n: y.float() for n, y in x.items()})
    for y, z in zip(result, expected, strict=True):
        torch.testing.assert_close(y.double(), z, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", DELTA_RULES)
def test_write_strengths_up_to_two_are_exact(name: str) -> None:
    x = {n: y.detach() for n, y in make(BY_NAME[name], 2, 100).items()}
    x["beta"] = x["beta"] * 2
    for y, z in zip(run_chunk(BY_NAME[name], x), run_loop(BY_NAME[name], x), strict=True):
        torch.testing.assert_close(y, z, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", DELTA_RULES)
def test_normalisation_can_be_left_to_the_caller(name: str) -> None:
    mixer = BY_NAME[name]
    x = {n: y.detach() for n, y in make(mixer, 1, 20).items()}
    default = run_chunk(mixer, x)[0]
    normal = {**x, "q": l2_normalize(x["q"]), "k": l2_normalize(x["k"])}
    torch.testing.assert_close(run_chunk(mixer, normal, qk_l2norm=False)[0], default)
    assert not torch.allclose(run_chunk(mixer, x, qk_l2norm=False)[0], default)
    token = [normal[n][:, 0] for n in mixer.names()]
    one, _ = mixer.step(*token, x["initial_state"], qk_l2norm=False)
    torch.testing.assert_close(one, default[:, 0])


def test_log_decay_of_a_head() -> None:
    a, A_log, dt_bias = torch.randn(2, 3, 4), torch.randn(4), torch.randn(4)
    expected = -torch.exp(A_log) * torch.log1p(torch.exp(a + dt_bias))
    torch.testing.assert_close(gdn_log_decay(a, A_log, dt_bias), expected)
    assert gdn_log_decay(a.bfloat16(), A_log.bfloat16(), dt_bias).dtype == torch.float32
    assert gdn_log_decay(a.double(), A_log, dt_bias).dtype == torch.float64
    assert (gdn_log_decay(a * 1e4, A_log, dt_bias) <= 0).all()


def test_log_decay_of_a_channel() -> None:
    a, A_log, dt_bias = torch.randn(2, 3, 4, 5), torch.randn(4), torch.randn(20)
    g = kda_log_decay(a, A_log, dt_bias)
    for head in range(4):
        for channel in range(5):
            raw = a[:, :, head, channel] + dt_bias[5 * head + channel]
            expected = -torch.exp(A_log[head]) * torch.log1p(torch.exp(raw))
            torch.testing.assert_close(g[:, :, head, channel], expected)
    assert torch.equal(g, kda_log_decay(a, A_log, dt_bias.view(4, 5)))
    assert kda_log_decay(a.bfloat16(), A_log.bfloat16(), dt_bias).dtype == torch.float32
    assert (kda_log_decay(a * 1e4, A_log, dt_bias) <= 0).all()
