"""Generation: cached against uncached, pieces against the whole, batches against rows alone."""

from typing import Any

import pytest
import torch
from tiny_lt2 import ALL, LINEAR, LOOPS, PATTERN, SPARSE, VOCAB, WINDOW, cache_of, tiny_model
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from megatron_lt2.hf.cache_lt2 import LinearSlot, LT2Cache, WindowSlot
from megatron_lt2.hf.modeling_lt2 import CACHE_NAME
from megatron_lt2.hf.sparse_slots_lt2 import BlockSlot, SparseSlot
from megatron_lt2.ops.nsa import RowBlocks

EOS, PAD = 0, 1
PROMPT_LENGTHS = [1, 2, 7, 70]


@pytest.fixture(scope="module")
def model():
    made = tiny_model()
    with torch.no_grad():  # no row may end early
        made.model.embed_tokens.weight[:2] *= 1e-3
    return made


@pytest.fixture(scope="module")
def exact_model():
    """In fp64, so that only mistakes are larger than the tolerance, not rounding."""
    return tiny_model().double()


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def prompt(length: int, rows: int = 1, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + length)
    return torch.randint(2, VOCAB, (rows, length), generator=generator)


def left_padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Ids and attention mask of rows [1, T_i] as one batch; the padding holds an ordinary token."""
    longest = max(row.shape[1] for row in rows)
    ids = torch.full((len(rows), longest), 17)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, longest - row.shape[1] :] = row
        mask[i, longest - row.shape[1] :] = 1
    return ids, mask


def greedy(model, ids: Tensor, **options) -> Tensor:
    options = {"max_new_tokens": 64, "do_sample": False, "pad_token_id": PAD, **options}
    return model.generate(ids, **options)


@pytest.mark.parametrize("length", PROMPT_LENGTHS)
def test_cached_greedy_equals_uncached(model, length):
    ids = prompt(length, rows=2)
    cached = greedy(model, ids)
    assert cached.shape == (2, length + 64)
    assert len(cached[0, length:].unique()) > 8, "a constant continuation proves nothing"
    assert torch.equal(cached, greedy(model, ids, use_cache=False))


def test_one_slot_for_every_loop_and_layer(model):
    cache = cache_of(model(prompt(5)))
    assert len(cache) == LOOPS * len(PATTERN)
    kinds = {"full": DynamicLayer, "gdn": LinearSlot}
    for loop in range(LOOPS):
        for layer, mixer in enumerate(PATTERN):
            slot = cache.slot(loop, layer)
            assert slot is cache.layers[loop * len(PATTERN) + layer]
            assert type(slot) is kinds[mixer]
            assert slot.get_seq_length() == 5
    states = [cache.slot(loop, 0).state[0] for loop in range(LOOPS)]
    assert not torch.allclose(states[0], states[1])
    assert not torch.allclose(states[1], states[2])


def one_mixer(name: str, **changes: Any):
    """A model of this mixer and full attention, in fp64: only mistakes exceed a tolerance."""
    if name == "schedule":
        changes["loop_windows"] = [[None, 4], [7, None]]
        name = "window"
    mixers = [name] if name == "full" else [name, "full"]
    return tiny_model(mixers=mixers, loops=2, **changes).double()


def exactness(name: str) -> float:
    """DeltaNet makes its write strength in fp32, and rounding to it can go either way."""
    return 1e-5 if name == "deltanet" else 1e-9


@pytest.mark.parametrize("name", [*LINEAR, *SPARSE, "window", "schedule"])
def test_every_mixer_in_pieces_equals_the_whole(name):
    model, ids = one_mixer(name), prompt(38, rows=2)
    whole = model(ids, use_cache=False).logits
    cache, pieces = None, []
    for piece in ids.split([1, 3, 9, 1, 1, 18, 5], dim=1):
        out = model(piece, cache=cache, use_cache=True)
        cache = cache_of(out)
        pieces.append(out.logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=exactness(name))


def test_nsa_averages_a_block_once(monkeypatch):
    """A new token completes one block or none, and the blocks there were are not made again."""
    model, ids = one_mixer("nsa"), prompt(38)
    whole = model(ids, use_cache=False).logits
    cache = cache_of(model(ids[:, :20], use_cache=True))
    slot = cache.slot(0, 0)
    assert isinstance(slot, BlockSlot)
    size = model.config.mixer_settings["nsa"]["block_size"]
    made, add = [], RowBlocks.add

    def counted(self, x, means, known):
        made.append((x.shape[1] - known) // self.size + 1)
        return add(self, x, means, known)

    monkeypatch.setattr(RowBlocks, "add", counted)
    for t in range(20, 38):
        before = slot.state[2]
        out = model(ids[:, t : t + 1], cache=cache)
        torch.testing.assert_close(out.logits[:, 0], whole[:, t], rtol=0, atol=1e-9)
        assert torch.equal(slot.state[2][:, : t // size], before[:, : t // size])
    assert set(made) == {1}
    means = slot.state[0][:, : 38 // size * size].unflatten(1, (-1, size)).mean(2)
    torch.testing.assert_close(slot.state[2][:, : 38 // size], means)
    cache.crop(-7)
    out = model(ids[:, 31:], cache=cache)
    torch.testing.assert_close(out.logits, whole[:, 31:], rtol=0, atol=1e-9)
    # The test can fail: with a wrong mean in the cache, something else comes out.
    cache.crop(-1)
    slot.state = (*slot.state[:3], slot.state[3] + 0.1)
    assert (model(ids[:, 37:], cache=cache).logits - whole[:, 37:]).abs().max() > 1e-6


@pytest.mark.parametrize("name", SPARSE)
def test_a_row_of_padding_alone_begins_later(name):
    """Padding so long that the first call has nothing else of a row."""
    model = one_mixer(name)
    ids, mask = left_padded([prompt(3), prompt(30)])
    cache, pieces = LT2Cache(model.config), []
    for start, stop in ((0, 21), (21, 26), (26, 30)):
        given = {"attention_mask": mask[:, :stop], "cache": cache}
        pieces.append(model(ids[:, start:stop], **given).logits)
    together = torch.cat(pieces, 1)
    for row, tokens in enumerate((prompt(3), prompt(30))):
        alone = model(tokens).logits[0]
        torch.testing.assert_close(together[row, -len(alone) :], alone, rtol=0, atol=1e-9)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", [*LINEAR, *SPARSE, "window", "schedule", "full"])
def test_padded_rows_of_every_mixer_equal_rows_alone(name, side):
    model = one_mixer(name)
    rows = [prompt(length) for length in (1, 3, 17, 40)]
    ids, mask = left_padded(rows)
    if side == "right":
        for i, row in enumerate(rows):
            shift = row.shape[1] - ids.shape[1]
            ids[i], mask[i] = ids[i].roll(shift), mask[i].roll(shift)
    cache = LT2Cache(model.config)
    logits = model(ids, attention_mask=mask, cache=cache).logits
    more = prompt(4, rows=len(rows), seed=1)
    for i, row in enumerate(rows):
        alone = model(row).logits[0]
        torch.testing.assert_close(logits[i][mask[i].bool()], alone, rtol=0, atol=exactness(name))
    if side == "right":
        return
    steps = [model(more[:, :3], cache=cache).logits, model(more[:, 3:], cache=cache).logits]
    later = torch.cat(steps, 1)
    for i, row in enumerate(rows):
        alone = model(torch.cat([row, more[i : i + 1]], 1)).logits[0, -4:]
        torch.testing.assert_close(later[i], alone, rtol=0, atol=exactness(name))


def test_all_mixers_together_generate_alike_with_and_without_cache():
    model = tiny_model(mixers=ALL, loops=2)
    with torch.no_grad():
        model.model.embed_tokens.weight[:2] *= 1e-3
    rows = [prompt(length) for length in (1, 4, 9)]
    ids, mask = left_padded(rows)
    options = {"attention_mask": mask, "max_new_tokens": 16}
    cached = greedy(model, ids, **options)
    assert len(cached[0, 9:].unique()) > 4
    assert torch.equal(cached, greedy(model, ids, use_cache=False, **options))
    for i, row in enumerate(rows):
        alone = greedy(model, row, max_new_tokens=16)[0, row.shape[1] :]
        assert torch.equal(cached[i, 9:], alone)
    beams = {"attention_mask": mask, "num_beams": 3, "max_new_tokens": 6}
    assert torch.equal(greedy(model, ids, **beams), greedy(model, ids, use_cache=False, **beams))


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_windows_of_any_size(size):
    ids = prompt(30, rows=2)
    model = tiny_model(mixers=["window", "window"], loops=1, window_size=size).double()
    whole = model(ids, use_cache=False).logits
    cache, pieces = None, []
    for piece in ids.split([4, 1, 9, 1, 15], dim=1):
        out = model(piece, cache=cache, use_cache=True)
        cache = cache_of(out)
        pieces.append(out.logits)
        kept = min(cache.get_seq_length(), size - 1)
        assert cache.slot(0, 0).keys.shape[-2] == cache.slot(0, 1).values.shape[-2] == kept
        assert cache.slot(0, 0).get_mask_sizes(3) == (kept + 3, cache.get_seq_length() - kept)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e-9)
    # Two layers look back 2 * (size - 1) tokens and not one further.
    reach, last = 2 * (size - 1), ids.shape[1] - 1
    for distance in {reach, reach + 1}:
        if distance > last:
            continue
        other = ids.clone()
        other[:, last - distance] = (other[:, last - distance] + 1) % VOCAB
        change = (model(other).logits[:, -1] - whole[:, -1]).abs().max()
        assert (change > 1e-9) == (distance == reach), distance


def test_what_a_cache_held_is_never_written_to():
    model = tiny_model(mixers=ALL, loops=1)
    cache = cache_of(model(prompt(6)))
    for new in (1, 3):
        held = [
            tensor
            for slot in cache.layers
            for tensor in (
                [*slot.state, *([] if slot.conv_state is None else [slot.conv_state])]
                if isinstance(slot, LinearSlot)
                else slot.state
                if isinstance(slot, SparseSlot)
                else [slot.keys, slot.values]
            )
        ]
        assert len(held) == 24
        copies = [tensor.clone() for tensor in held]
        model(prompt(new), cache=cache)
        assert all(torch.equal(a, b) for a, b in zip(held, copies, strict=True))
    window = cache.layers[ALL.index("window")]
    assert isinstance(window, WindowSlot)
    assert window.keys.untyped_storage().nbytes() == window.keys.numel() * 4
    states = cache.layers[ALL.index("mlstm")].state
    assert [tuple(state.shape) for state in states] == [(1, 3, 5, 5), (1, 3)]


def test_slots_move_between_devices_and_come_back():
    model, ids = tiny_model(mixers=ALL, loops=1), prompt(6, rows=2)
    cache, other = (cache_of(model(ids)) for _ in range(2))
    for slot in cache.layers:
        slot.offload()
        slot.prefetch()
    more = prompt(3, rows=2)
    assert torch.equal(model(more, cache=cache).logits, model(more, cache=other).logits)


@pytest.mark.parametrize("splits", [[1], [12], [3, 1, 1, 5], [1] * 12, [2, 8]], ids=str)
def test_pieces_equal_the_whole(exact_model, splits):
    ids = prompt(13, rows=2)
    whole = exact_model(ids, use_cache=False).logits
    cache, pieces = None, []
    for piece in ids.split([*splits, 13 - sum(splits)], dim=1):
        out = exact_model(piece, cache=cache, use_cache=True)
        cache = cache_of(out)
        pieces.append(out.logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e-9)


def test_pieces_longer_than_a_chunk_equal_the_whole(exact_model):
    ids = prompt(150)
    whole = exact_model(ids, use_cache=False).logits
    first = exact_model(ids[:, :70])
    second = exact_model(ids[:, 70:], past_key_values=cache_of(first))
    torch.testing.assert_close(
        torch.cat([first.logits, second.logits], 1), whole, rtol=0, atol=1e-9
    )


def test_left_padded_logits_equal_rows_alone(model):
    rows = [prompt(length) for length in (1, 2, 5, 11, 70)]
    ids, mask = left_padded(rows)
    logits = model(ids, attention_mask=mask).logits
    assert torch.isfinite(logits).all()
    for i, row in enumerate(rows):
        alone = model(row).logits[0]
        torch.testing.assert_close(logits[i, -row.shape[1] :], alone, rtol=0, atol=1e-5)


def test_left_padding_is_exact_in_fp64(exact_model):
    rows = [prompt(length) for length in (1, 5, 70)]
    ids, mask = left_padded(rows)
    logits = exact_model(ids, attention_mask=mask).logits
    for i, row in enumerate(rows):
        alone = exact_model(row).logits[0]
        torch.testing.assert_close(logits[i, -row.shape[1] :], alone, rtol=0, atol=1e-9)


def test_left_padded_generation_equals_rows_alone(model):
    rows = [prompt(length) for length in (1, 2, 5, 11)]
    ids, mask = left_padded(rows)
    together = greedy(model, ids, attention_mask=mask)
    without_cache = greedy(model, ids, attention_mask=mask, use_cache=False)
    assert torch.equal(together, without_cache)
    for i, row in enumerate(rows):
        alone = greedy(model, row)[0, row.shape[1] :]
        assert torch.equal(together[i, ids.shape[1] :], alone)


def test_a_padded_batch_of_one_equals_the_row_alone(model):
    row = prompt(6)
    ids, mask = left_padded([row, prompt(20)])
    out = model(ids[:1], attention_mask=mask[:1]).logits[0, -6:]
    torch.testing.assert_close(out, model(row).logits[0], rtol=0, atol=1e-5)
    assert torch.equal(
        greedy(model, ids[:1], attention_mask=mask[:1])[0, 20:], greedy(model, row)[0, 6:]
    )


def test_padding_content_is_never_seen(model):
    ids, mask = left_padded([prompt(3), prompt(9)])
    other = torch.where(mask.bool(), ids, 40)
    logits = model(ids, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(
        model(other, attention_mask=mask).logits[mask.bool()], logits, rtol=0, atol=0
    )


def test_right_padding_with_and_without_a_mask(model):
    row = prompt(9)
    ids = torch.cat([row, torch.full((1, 5), 17)], 1)
    mask = (torch.arange(14) < 9).long()[None]
    alone = model(row).logits
    torch.testing.assert_close(model(ids).logits[:, :9], alone, rtol=0, atol=1e-5)
    masked = model(ids, attention_mask=mask).logits[:, :9]
    torch.testing.assert_close(masked, alone, rtol=0, atol=1e-5)


def test_the_cache_remembers_padding(model):
    rows = [prompt(4), prompt(9)]
    ids, mask = left_padded(rows)
    more = prompt(3, rows=2, seed=1)
    expected = [
        model(torch.cat([row, more[i : i + 1]], 1)).logits[0, -3:] for i, row in enumerate(rows)
    ]
    full = torch.cat([mask, torch.ones_like(more)], 1)
    for given in (full, torch.ones_like(more), None):
        cache = cache_of(model(ids, attention_mask=mask))
        logits = model(more, attention_mask=given, cache=cache).logits
        torch.testing.assert_close(logits, torch.stack(expected), rtol=0, atol=1e-5)


def test_chunked_prefill_equals_prefill(model):
    ids, mask = left_padded([prompt(3), prompt(11)])
    assert torch.equal(
        greedy(model, ids, attention_mask=mask, prefill_chunk_size=4),
        greedy(model, ids, attention_mask=mask),
    )


def test_beam_search_reorders_every_slot(model):
    ids, mask = left_padded([prompt(3), prompt(8)])
    options = {"attention_mask": mask, "num_beams": 3, "max_new_tokens": 12}
    assert torch.equal(
        greedy(model, ids, **options), greedy(model, ids, use_cache=False, **options)
    )


def test_sampling_draws_the_same_with_and_without_cache(model):
    drawn = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        options = {"do_sample": True, "num_return_sequences": 3, "use_cache": use_cache}
        drawn.append(model.generate(prompt(5), max_new_tokens=20, pad_token_id=PAD, **options))
    assert torch.equal(*drawn)
    assert not torch.equal(drawn[0][0], drawn[0][1])


@pytest.mark.parametrize("mixers", [PATTERN, ALL], ids=["gdn", "all"])
def test_cache_rows_can_be_selected_and_repeated(mixers):
    model = tiny_model(mixers=mixers, loops=2).double()
    ids, mask = left_padded([prompt(2), prompt(7), prompt(4)])
    more = prompt(2, rows=3, seed=2)
    expected = model(more, cache=cache_of(model(ids, attention_mask=mask))).logits
    cache = cache_of(model(ids, attention_mask=mask))
    cache.batch_select_indices(torch.tensor([2, 0]))
    picked = model(more[[2, 0]], cache=cache).logits
    torch.testing.assert_close(picked, expected[[2, 0]], rtol=0, atol=1e-5)
    cache = cache_of(model(ids, attention_mask=mask))
    cache.batch_repeat_interleave(2)
    doubled = model(more.repeat_interleave(2, 0), cache=cache).logits
    torch.testing.assert_close(doubled, expected.repeat_interleave(2, 0), rtol=0, atol=1e-5)
    cache.reset()
    assert cache.get_seq_length() == 0
    again = model(ids, attention_mask=mask, cache=cache).logits
    torch.testing.assert_close(again, model(ids, attention_mask=mask).logits, rtol=0, atol=0)


def test_a_model_without_attention_counts_its_tokens():
    model = tiny_model(mixers=["gdn", "gdn"])
    ids = prompt(5)
    cache = cache_of(model(ids))
    assert cache.get_seq_length() == 5
    assert torch.equal(greedy(model, ids), greedy(model, ids, use_cache=False))


def test_a_model_of_attention_only():
    model = tiny_model(mixers=["full", "full"], num_key_value_heads=4)
    ids, mask = left_padded([prompt(3), prompt(6)])
    assert torch.equal(
        greedy(model, ids, attention_mask=mask),
        greedy(model, ids, attention_mask=mask, use_cache=False),
    )


def test_generation_continues_from_a_returned_cache(model):
    ids = prompt(4)
    first = greedy(model, ids, max_new_tokens=6, return_dict_in_generate=True)
    assert isinstance(cache_of(first), LT2Cache)
    past = {CACHE_NAME: cache_of(first)}
    longer = greedy(model, first.sequences, max_new_tokens=5, **past)
    assert torch.equal(longer, greedy(model, ids, max_new_tokens=11))


def test_inputs_that_cannot_be_exact_are_refused(model):
    ids = prompt(5)
    with pytest.raises(ValueError, match="one slot per"):
        model(ids, cache=DynamicCache())
    with pytest.raises(ValueError, match="padding between the tokens"):
        model(ids, attention_mask=torch.tensor([[1, 0, 1, 1, 1]]))
    with pytest.raises(ValueError, match="attention_mask has shape"):
        model(ids, attention_mask=torch.ones(1, 4))
    with pytest.raises(ValueError, match="must be \\[batch, tokens\\]"):
        model(ids, attention_mask=torch.ones(1, 1, 5, 5))
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="leave cache_implementation unset"):
        greedy(model, ids, cache_implementation="static")
    padded = torch.cat([ids, torch.full((1, 2), 17)], 1)
    cache = cache_of(model(padded, attention_mask=torch.tensor([[1, 1, 1, 1, 1, 0, 0]])))
    with pytest.raises(ValueError, match="padding between the tokens"):
        model(ids, cache=cache)


def test_a_cache_is_cropped_as_a_whole_or_not_at_all():
    ids = prompt(9)
    for mixers in (["full", "gdn"], ["full", "window"]):
        model = tiny_model(mixers=mixers)
        cache = cache_of(model(ids))
        with pytest.raises(ValueError, match="cannot be cropped"):
            cache.crop(-1)
        assert all(slot.get_seq_length() == 9 for slot in cache.layers)
        cache.crop(0)
        assert all(slot.get_seq_length() == 9 for slot in cache.layers)
    model = tiny_model(mixers=["full", "window"])
    first, mask = left_padded([prompt(WINDOW - 1), prompt(1)])
    cache = cache_of(model(first, attention_mask=mask))
    cache.crop(-1)
    shorter = cache_of(model(first[:, :-1], attention_mask=mask[:, :-1]))
    more = prompt(3, rows=2)
    assert cache.get_seq_length() == WINDOW - 2
    torch.testing.assert_close(model(more, cache=cache).logits, model(more, cache=shorter).logits)


def test_other_loop_counts_are_refused():
    model = tiny_model()
    model.config.loops = LOOPS + 1
    with pytest.raises(ValueError, match=f"built with {LOOPS} loops"):
        model(prompt(3))
