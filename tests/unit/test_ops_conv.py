"""The short causal convolution against torch's own, with carried history and packed documents."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lt2.ops.conv import causal_conv1d, conv1d_step

CHANNELS = 5


def make(batch: int, length: int, taps: int, documents: int | None = None) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(0)
    shapes = (
        (batch, length, CHANNELS),
        (CHANNELS, taps),
        (documents or batch, CHANNELS, taps - 1),
    )
    x, weight, state = (torch.randn(*s, generator=random, dtype=torch.float64) for s in shapes)
    return x.requires_grad_(), weight.requires_grad_(), state.requires_grad_()


def reference(x: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """torch's convolution over history and input."""
    extended = torch.cat([state, x.transpose(1, 2)], -1)
    y = F.conv1d(extended, weight[:, None], groups=weight.shape[0]).transpose(1, 2)
    return F.silu(y), extended[..., x.shape[1] :]


def assert_same(
    result: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], inputs: tuple[Tensor, ...]
) -> None:
    random = torch.Generator().manual_seed(7)
    weights = [torch.randn(y.shape, generator=random, dtype=y.dtype) for y in expected]
    grads = []
    for pair in (result, expected):
        loss = sum((y * w).sum() for y, w in zip(pair, weights, strict=True))
        grads.append(torch.autograd.grad(loss, inputs))
    for y, z in zip((*result, *grads[0]), (*expected, *grads[1]), strict=True):
        torch.testing.assert_close(y, z)


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 2, 3, 11])
def test_equals_torch(length: int, taps: int) -> None:
    x, weight, state = make(2, length, taps)
    result = causal_conv1d(x, weight, initial_state_NDW=state)
    assert_same(result, reference(x, weight, state), (x, weight, state))


def test_no_state_means_zeros_and_no_activation_is_linear() -> None:
    x, weight, state = make(2, 7, 4)
    expected = F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), weight[:, None], groups=CHANNELS)
    y, final = causal_conv1d(x, weight, activation=None)
    torch.testing.assert_close(y, expected.transpose(1, 2))
    torch.testing.assert_close(final, x[:, -3:].transpose(1, 2))
    torch.testing.assert_close(causal_conv1d(x, weight)[0], F.silu(y))


@pytest.mark.parametrize("bounds", [[0, 9], [0, 1, 2, 9], [0, 3, 3, 7, 9], [0, 0, 9], [0, 4, 9, 9]])
def test_packed_equals_separate_documents(bounds: list[int]) -> None:
    x, weight, state = make(1, 9, 4, documents=len(bounds) - 1)
    result = causal_conv1d(x, weight, initial_state_NDW=state, cu_seqlens=torch.tensor(bounds))
    pieces = [
        reference(x[:, start:end], weight, state[n : n + 1])
        if end > start
        else (x[:, :0], state[n : n + 1])
        for n, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False))
    ]
    outputs, finals = zip(*pieces, strict=True)
    expected = torch.cat(outputs, 1), torch.cat(finals)
    assert_same(result, expected, (x, weight, state))


def test_document_cannot_see_another() -> None:
    x, weight, _ = (y.detach() for y in make(1, 9, 4))
    borders = torch.tensor([0, 4, 6, 9])
    before, state = causal_conv1d(x, weight, cu_seqlens=borders)
    x[:, 4:6] = float("nan")
    after, changed_state = causal_conv1d(x, weight, cu_seqlens=borders)
    others = [0, 1, 2, 3, 6, 7, 8]
    assert torch.equal(before[:, others], after[:, others])
    assert torch.equal(state[[0, 2]], changed_state[[0, 2]])
    assert after[:, 4:6].isnan().all()


@pytest.mark.parametrize("cut", [1, 2, 3, 8, 10])
def test_state_carries_over_a_cut(cut: int) -> None:
    x, weight, state = make(2, 11, 4)
    first, middle = causal_conv1d(x[:, :cut], weight, initial_state_NDW=state)
    second, final = causal_conv1d(x[:, cut:], weight, initial_state_NDW=middle)
    whole = causal_conv1d(x, weight, initial_state_NDW=state)
    assert_same((torch.cat([first, second], 1), final), whole, (x, weight, state))


def test_bias_is_added_before_the_activation() -> None:
    x, weight, state = make(2, 11, 4)
    bias = torch.randn(CHANNELS, dtype=torch.float64, requires_grad=True)
    extended = torch.cat([state, x.transpose(1, 2)], -1)
    y = F.conv1d(extended, weight[:, None], bias, groups=CHANNELS).transpose(1, 2)
    result = causal_conv1d(x, weight, bias_D=bias, initial_state_NDW=state)
    assert_same(result, (F.silu(y), extended[..., 11:]), (x, weight, state, bias))
    first, _ = conv1d_step(x[:, 0], weight, state, bias_D=bias)
    torch.testing.assert_close(first, result[0][:, 0])
    packed, _ = causal_conv1d(x[:1], weight, bias_D=bias, cu_seqlens=torch.tensor([0, 3, 11]))
    torch.testing.assert_close(packed[0, 3:], causal_conv1d(x[:1, 3:], weight, bias_D=bias)[0][0])


@pytest.mark.parametrize("taps", [1, 4])
def test_steps_equal_the_whole(taps: int) -> None:
    x, weight, state = make(2, 6, taps)
    expected = causal_conv1d(x, weight, initial_state_NDW=state)
    current, outputs = state, []
    for t in range(6):
        y, current = conv1d_step(x[:, t], weight, current)
        outputs.append(y)
    assert_same((torch.stack(outputs, 1), current), expected, (x, weight, state))


def test_state_does_not_share_memory_with_the_input() -> None:
    x, weight, _ = (y.detach() for y in make(1, 9, 2))
    _, state = causal_conv1d(x, weight)
    assert state.untyped_storage().nbytes() == state.numel() * state.element_size()


def test_16_bit_is_accumulated_in_fp32() -> None:
    x, weight, _ = (y.detach().bfloat16() for y in make(1, 9, 4))
    y, state = causal_conv1d(x, weight)
    exact, _ = causal_conv1d(x.float(), weight.float())
    assert y.dtype == state.dtype == torch.bfloat16
    assert torch.equal(y, exact.bfloat16())


def test_wrong_inputs_are_refused() -> None:
    x, weight, state = (y.detach() for y in make(2, 4, 4))
    with pytest.raises(ValueError, match="channels"):
        causal_conv1d(x[..., :3], weight)
    with pytest.raises(ValueError, match="state must have shape"):
        causal_conv1d(x, weight, initial_state_NDW=F.pad(state, (1, 0)))
    with pytest.raises(ValueError, match="state must have shape"):
        conv1d_step(x[:, 0], weight, state[:1])
    for call in (
        lambda b: causal_conv1d(x, weight, bias_D=b),
        lambda b: conv1d_step(x[:, 0], weight, state, bias_D=b),
    ):
        with pytest.raises(ValueError, match="bias has shape"):
            call(torch.zeros(3))
    with pytest.raises(ValueError, match="relu"):
        causal_conv1d(x, weight, activation="relu")
    with pytest.raises(ValueError, match="batch size is 2"):
        causal_conv1d(x, weight, cu_seqlens=torch.tensor([0, 4]))
