"""A row cut into shards whose maps are put together equals one pass, without process groups.

For every linear mixer and variant: outputs and gradients, random cuts, documents that end at a cut,
inside a shard or after one token, 64 shards, and maps composed in any grouping.
"""

from bisect import bisect_left, bisect_right
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_lt2.config.schema import ModelConfig
from megatron_lt2.mixers.registry import RECURRENT, recurrent_mixer
from megatron_lt2.parallel.state_exchange import fold
from megatron_lt2.recurrent.base import Scan
from megatron_lt2.recurrent.shards import Span, shard_map
from tests.tiny_run import tiny_config

VARIANTS = {
    "mamba2 in groups": ("mamba2", {"groups": 4}),
    "hgrn2 bounded": ("hgrn2", {"lower_bound": 0.6}),
    "gdn with negative eigenvalues": ("gdn", {"allow_neg_eigval": True}),
    "deltanet with negative eigenvalues": ("deltanet", {"allow_neg_eigval": True}),
    "kda with negative eigenvalues": ("kda", {"allow_neg_eigval": True}),
    "linear normalised": ("linear", {"normalize": True}),
    "mlstm uncapped": ("mlstm", {"gate_cap": None}),
}
CASES = {**{name: (name, {}) for name in RECURRENT}, **VARIANTS}
ROWS = {
    # Tokens, documents, cuts.
    "one document": (90, [90], [30, 60]),
    "uneven cuts": (90, [90], [7, 8, 51]),
    "borders inside": (128, [37, 51, 40], [32, 64, 96]),
    "borders on cuts": (96, [32, 16, 16, 32], [32, 64]),
    "single tokens at cuts": (64, [15, 1, 1, 14, 1, 32], [16, 32, 48]),
    "a document inside": (60, [10, 5, 45], [20, 40]),
}


def build(case, dtype, length, batch=1, seed=0):
    """A mixer, random sections and parameters, and a direction for the gradients."""
    name, changes = CASES[case]
    model = tiny_config().model
    setattr(model, name, replace(getattr(model, name), **changes))
    mixer = recurrent_mixer(name)(model.mixer_settings(name), depth=0.5)
    layout = mixer.layout
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=dtype)

    parts = {
        section: random(batch, length, *(() if s.shared else (layout.heads,)), s.channels)
        for section, s in layout.sections.items()
    }
    if name == "mlstm":
        # Positive products keep the normaliser away from zero, where rounding is all there is.
        parts["q"], parts["k"] = parts["q"].abs(), parts["k"].abs()
        parts["input"] = parts["input"] * 8 - 12
        parts["forget"] = parts["forget"] + 2
    weights = {n: 0.5 * random(w.channels * layout.heads) for n, w in layout.weights.items()}
    weights = {n: w - 2 if n == "dt_bias" else w for n, w in weights.items()}
    direction = random(batch, length, layout.heads, layout.head_v_dim)
    return mixer, parts, weights, direction


def borders_of(documents):
    return [0, *torch.tensor(documents).cumsum(0).tolist()]


def one_pass(mixer, parts, weights, documents):
    length = next(iter(parts.values())).shape[1]
    bounds = torch.tensor(borders_of(documents)) if documents else None
    assert documents is None or int(bounds[-1]) == length
    out, _ = mixer.mix(parts, weights, Scan("torch", slice(0, mixer.layout.heads), bounds))
    return out


def shards_of(mixer, parts, weights, documents, cuts, backend="torch"):
    """The maps of the shards between the cuts, with their parts."""
    length = next(iter(parts.values())).shape[1]
    borders = borders_of(documents or [length])
    edges = [0, *cuts, length]
    found = []
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        inside = borders[bisect_right(borders, start) : bisect_left(borders, stop)]
        span = Span(
            continues=start not in borders,
            continued=stop not in borders,
            first=(inside[0] if inside else stop) - start,
            last=(inside[-1] if inside else start) - start,
        )
        place = torch.arange(start, stop)
        whole = torch.tensor(borders)
        positions = place - whole[torch.searchsorted(whole, place, right=True) - 1]
        local = torch.tensor([0, *(b - start for b in inside), stop - start], dtype=torch.int32)
        scan = Scan(
            backend,
            slice(0, mixer.layout.heads),
            local if documents else None,
            positions=positions[None],
        )
        own = {name: x[:, start:stop] for name, x in parts.items()}
        found.append((shard_map(mixer.prepare(own, weights, scan), scan, span), own, span))
    return found


def in_shards(mixer, parts, weights, documents, cuts, backend="torch"):
    shards = shards_of(mixer, parts, weights, documents, cuts, backend)
    outs, state = [], None
    for own, its_parts, span in shards:
        if state is None or not span.continues:
            state = tuple(torch.zeros_like(x) for x in own.state_map.written)
        outs.append(mixer.finish(own.output(state), its_parts, weights))
        state = own.state_map.apply(state)
    return torch.cat(outs, 1)


def with_gradients(compute, mixer, parts, weights, direction, *arguments):
    parts = {n: x.clone().requires_grad_() for n, x in parts.items()}
    weights = {n: x.clone().requires_grad_() for n, x in weights.items()}
    out = compute(mixer, parts, weights, *arguments)
    (out * direction).sum().backward()
    result = {"out": out.detach()}
    # A section that gates the output only gets its gradient behind the recurrence.
    for name, x in (parts | weights).items():
        if x.grad is not None:
            result[name] = x.grad
    return result


def errors(got, expected):
    """Largest relative error of the output and of each gradient."""
    assert got.keys() == expected.keys()
    return {
        name: float((got[name] - x).abs().max() / x.abs().max().clamp_min(1e-30))
        for name, x in expected.items()
    }


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("case", CASES)
def test_shards_equal_one_pass(case, row):
    length, documents, cuts = ROWS[row]
    given = build(case, torch.float64, length)
    expected = with_gradients(one_pass, *given, documents)
    got = with_gradients(in_shards, *given, documents, cuts)
    assert len(expected) > 3
    for name, error in errors(got, expected).items():
        assert error < 1e-11, f"{name}: {error:.1e}"


@pytest.mark.parametrize("case", CASES)
def test_shards_of_two_unpacked_rows_equal_one_pass(case):
    given = build(case, torch.float64, 48, batch=2)
    expected = with_gradients(one_pass, *given, None)
    got = with_gradients(in_shards, *given, None, [16, 32])
    for name, error in errors(got, expected).items():
        assert error < 1e-11, f"{name}: {error:.1e}"


@pytest.mark.parametrize("case", CASES)
def test_sixty_four_shards_in_fp32(case):
    """Rounding does not add up over a chain: against one pass in fp64."""
    length = 64 * 8
    mixer, *given = build(case, torch.float64, length)
    given = [
        {n: y.float().double() for n, y in x.items()} if isinstance(x, dict) else x.float().double()
        for x in given
    ]
    expected = with_gradients(one_pass, mixer, *given, None)
    given32 = [
        {n: y.float() for n, y in x.items()} if isinstance(x, dict) else x.float() for x in given
    ]
    got = with_gradients(in_shards, mixer, *given32, None, list(range(8, length, 8)))
    for name, error in errors(got, expected).items():
        assert error < 1e-5, f"{name}: {error:.1e}"


@pytest.mark.parametrize("case", CASES)
def test_any_grouping_gives_the_same_state(case):
    mixer, parts, weights, _ = build(case, torch.float64, 70)
    shards = shards_of(mixer, parts, weights, None, [11, 19, 40, 52])
    # Every map as one of the middle, where M is not zero.
    maps = [own.state_map for own, *_ in shards]
    for own, _, span in shards[1:-1]:
        assert span.through
        assert all(bool(x.abs().max() > 0) for x in own.state_map.tensors())
    a, b, c = maps[1:4]
    left, right = c.after(b).after(a), c.after(b.after(a))
    for x, y in zip(left.tensors(), right.tensors(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)
    expected = fold(maps[:4])
    for grouped in (left, right):
        for x, y in zip(grouped.apply(maps[0].written), expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_a_document_never_reaches_the_next(case):
    """Changes of a document, broken numbers too, leave the others' output the same."""
    # To the bit but for mLSTM, whose scale is chosen from the whole row and changes rounding.
    same = {"rtol": 1e-12, "atol": 1e-13} if case.startswith("mlstm") else {"rtol": 0, "atol": 0}
    documents, cuts = [20, 12, 8, 24], [16, 32, 48]
    mixer, parts, weights, _ = build(case, torch.float64, 64)
    before = in_shards(mixer, parts, weights, documents, cuts)
    borders = borders_of(documents)
    for start, stop in zip(borders[:-1], borders[1:], strict=True):
        for change in (lambda x: x + 1, lambda x: x * float("nan")):
            changed = {n: x.clone() for n, x in parts.items()}
            for x in changed.values():
                x[:, start:stop] = change(x[:, start:stop])
            after = in_shards(mixer, changed, weights, documents, cuts)
            assert not torch.equal(after[:, start:stop], before[:, start:stop])
            torch.testing.assert_close(after[:, :start], before[:, :start], **same)
            torch.testing.assert_close(after[:, stop:], before[:, stop:], **same)


@pytest.mark.parametrize("case", CASES)
def test_a_skipped_state_is_seen(case):
    """The comparison above is not one that passes whatever the exchange does."""
    given = build(case, torch.float64, 90)
    mixer, parts, weights, _ = given
    expected = one_pass(mixer, parts, weights, [90])
    shards = shards_of(mixer, parts, weights, [90], [30, 60])
    outs = []
    for own, its_parts, _ in shards:
        empty = tuple(torch.zeros_like(x) for x in own.state_map.written)
        outs.append(mixer.finish(own.output(empty), its_parts, weights))
    error = (torch.cat(outs, 1) - expected).abs().max() / expected.abs().max()
    assert error > 1e-3


def test_a_kernel_without_a_map_is_refused():
    mixer, parts, weights, _ = build("gdn", torch.float64, 8)
    scan = Scan("torch", slice(0, 4))
    known = mixer.prepare(parts, weights, scan)

    def new_kernel():
        raise AssertionError("never called")

    with pytest.raises(ValueError, match="new_kernel has no state map"):
        shard_map(replace(known, kernel=new_kernel), scan, Span(True, True, 8))


@pytest.mark.parametrize("name", RECURRENT)
def test_volumes_of_the_documentation(name):
    page = (Path(__file__).resolve().parents[2] / "docs/parallelism.md").read_text("utf-8")
    mixer = recurrent_mixer(name)(ModelConfig().mixer_settings(name))
    layout, length = mixer.layout, 2
    parts = {
        section: torch.zeros(1, length, *(() if s.shared else (layout.heads,)), s.channels)
        for section, s in layout.sections.items()
    }
    weights = {n: torch.zeros(w.channels * layout.heads) for n, w in layout.weights.items()}
    scan = Scan("torch", slice(0, layout.heads), positions=torch.arange(length)[None])
    found = shard_map(mixer.prepare(parts, weights, scan), scan, Span(True, True, length))
    state = 4 * sum(x.numel() for x in found.state_map.tensors()) / 2**20
    halo = 2 * (layout.conv_size - 1) * sum(map(layout.rows, layout.conv_names)) / 2**10
    assert f"| `{name}` | {state:.2f} MiB | {abs(halo):.0f} KiB |" in page
