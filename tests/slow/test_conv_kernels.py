"""Our Triton kernels of the short convolution, interpreted on the CPU, against the plain form."""

import pytest
import torch
from torch import Tensor

from megatron_lt2.kernels import conv
from megatron_lt2.kernels.conv import Part, convolve_parts
from tests.slow.interpreted import (
    assert_backends_agree,
    inside,
    nan_in_fresh_memory,  # noqa: F401
    outside,
    run_inside,
)

pytest.importorskip("triton")

pytestmark = pytest.mark.slow

PARTS = [Part(24, unit=12), Part(24, unit=12), Part(10)]
CHANNELS = sum(part.channels for part in PARTS)
PACKED = [0, 1, 3, 6, 11, 75, 75, 140]


@outside
def test_in_a_process_with_the_interpreter() -> None:
    run_inside(__file__)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(bounds: list[int] | None, taps: int, bias: bool, state: bool) -> dict[str, Tensor]:
    """Rows of 37 tokens, or one packed row; the input is a slice of `wide`."""
    batch, length = (2, 37) if bounds is None else (1, bounds[-1])
    documents = batch if bounds is None else len(bounds) - 1
    inputs = {
        "wide": normal(length, batch, CHANNELS + 8, seed=0),
        "weight": normal(CHANNELS, taps, seed=1),
    }
    if bias:
        inputs["bias"] = normal(CHANNELS, seed=2)
    if state:
        inputs["state"] = normal(documents, CHANNELS, taps - 1, seed=3)
    return inputs


def check(
    inputs: dict[str, Tensor], bounds: list[int] | None, parts: list[Part] = PARTS, **options
) -> None:
    borders = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)

    def call(backend: str, x: dict[str, Tensor]) -> list[Tensor]:
        return convolve_parts(
            x["wide"].transpose(0, 1)[..., 3 : 3 + CHANNELS],
            x["weight"],
            parts,
            backend=backend,
            bias_D=x.get("bias"),
            initial_state_NDW=x.get("state"),
            cu_seqlens=borders,
        )

    assert_backends_agree(call, inputs, **options)


@inside
@pytest.mark.parametrize("state", [False, True], ids=["", "state"])
@pytest.mark.parametrize("taps", [1, 2, 3, 4])
@pytest.mark.parametrize("bounds", [None, PACKED, [0, 2]], ids=["rows", "packed", "short"])
def test_agrees(bounds: list[int] | None, taps: int, state: bool) -> None:
    check(make(bounds, taps, bias=taps % 2 == 0, state=state and taps > 1), bounds)


@inside
def test_16_bit() -> None:
    """fp16: the interpreter cannot do bf16 right."""
    inputs = {name: x.half() for name, x in make(PACKED, 4, bias=True, state=True).items()}
    check(inputs, PACKED, tolerance=2e-3)


@inside
def test_a_head_wider_than_a_program_s_channels() -> None:
    check(make(PACKED, 4, bias=False, state=False), PACKED, [Part(CHANNELS, unit=CHANNELS)])


@inside
def test_another_document_is_not_seen() -> None:
    x = normal(1, 75, CHANNELS, seed=0)
    borders = torch.tensor([0, 20, 41, 75])
    weight = normal(CHANNELS, 4, seed=1)

    def run() -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        made = convolve_parts(leaf, weight, PARTS, backend="fla", cu_seqlens=borders)
        (dx,) = torch.autograd.grad(sum(y.square().sum() for y in made), leaf)
        return [*made, dx]

    before = run()
    x[:, 20:41] = float("nan")
    for old, new in zip(before, run(), strict=True):
        assert torch.equal(old[:, :20], new[:, :20]) and torch.equal(old[:, 41:], new[:, 41:])
        assert new[:, 20:41].isnan().any()


@inside
def test_borders_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    plain = conv.document_ids
    monkeypatch.setattr(conv, "document_ids", lambda *x: calls.append(x) or plain(*x))
    x, weight = normal(1, 9, 4, seed=0), normal(4, 4, seed=1)
    borders = torch.tensor([0, 4, 9])
    first = convolve_parts(x, weight, [Part(4)], backend="fla", cu_seqlens=borders)[0]
    convolve_parts(x, weight, [Part(4)], backend="fla", cu_seqlens=borders)
    assert len(calls) == 1
    borders[1] = 5  # another batch in the same tensor
    second = convolve_parts(x, weight, [Part(4)], backend="fla", cu_seqlens=borders)[0]
    assert len(calls) == 2 and not torch.equal(first, second)


@inside
def test_written_again_into_the_same_memory() -> None:
    inputs = make(PACKED, 4, bias=True, state=True)
    x = inputs["wide"].transpose(0, 1)[..., :CHANNELS]
    options = {
        "backend": "fla",
        "bias_D": inputs["bias"],
        "initial_state_NDW": inputs["state"],
        "cu_seqlens": torch.tensor(PACKED),
    }
    made = convolve_parts(x, inputs["weight"], PARTS, **options)
    into = [torch.empty_like(y) for y in made]
    convolve_parts(x, inputs["weight"], PARTS, into=into, **options)
    assert all(torch.equal(y, z) for y, z in zip(made, into, strict=True))


@inside
@pytest.mark.parametrize("wrong", ["since", "taps"])
def test_a_planted_mistake_is_found(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if wrong == "since":
        plain = conv._places
        monkeypatch.setattr(
            conv, "_places", lambda *x: ((plain(*x)[0] + 1).clamp(max=3), plain(*x)[1])
        )
    else:
        plain_launch = conv._launch
        monkeypatch.setattr(
            conv, "_launch", lambda x, weight, *rest: plain_launch(x, weight.flip(1), *rest)
        )
    with pytest.raises(AssertionError, match="relative errors above"):
        check(make(PACKED, 4, bias=False, state=False), PACKED)
