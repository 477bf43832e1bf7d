"""Packed documents do not see each other: not in attention, recurrence, convolution or positions.

Every parameter is random, so that no gate, decay or residual that starts at zero hides a leak.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_lt2.config.schema import WindowConfig
from megatron_lt2.mixers.registry import RECURRENT
from tests.ranks import run_ranks
from tests.tiny_run import EOD, tiny_config

# Pattern and layers.
PATTERNS = {
    **{name: (name, 2) for name in RECURRENT},
    "full": ("full", 3),
    "hybrid": ("2*gdn+full", 3),
    "window": ("window", 3),
    "window hybrid": ("2*gdn+window", 3),
    "nsa": ("nsa", 2),
    "dsa": ("gdn+dsa", 2),  # alone it may not select the token that changed
}
LOOPS = (1, 2, 3)
VOCABULARY = 61
ENDS = ([4, 5, 12, 30], [0, 17, 35])
"""Places of EOD in two rows: documents of 5, 1, 7, 18 and 5, then of 1, 17 and 18 tokens."""
LENGTH = 36
BOUNDS = [0, 5, 6, 13, 31, 36, 37, 54, 72]
CHANGED = (2, 7, 30 - 1, 33, 40, 71)
"""Packed places whose token is changed, in documents 0, 2, 3, 4, 6 and 7."""


def _rows():
    tokens = torch.randint(1, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(2))
    for row, ends in zip(tokens, ENDS, strict=True):
        row[ends] = EOD
    return tokens


def _outputs(model, tokens, loops, isolate=True):
    """Logits [tokens, vocabulary] and losses [tokens] of a packed (or plain) batch."""
    from megatron_lt2.data.batch import make_batch

    labels = (tokens + 1) % VOCABULARY
    mask = torch.ones(tokens.shape)
    batch = make_batch(tokens, labels, mask, eod=EOD, isolate_documents=isolate)
    given = {"packed_seq_params": batch.packing, "loops": loops}
    with torch.no_grad():
        logits = model(batch.tokens, batch.positions, **given)
        losses = model(batch.tokens, batch.positions, labels=batch.labels, **given)
    return logits.flatten(0, 1)[:, :VOCABULARY].numpy(), losses.flatten().numpy()


def _config(name):
    config = tiny_config()
    pattern, layers = PATTERNS[name]
    config.model = replace(
        config.model,
        pattern=pattern,
        num_layers=layers,
        loops=max(LOOPS),
        # Three layers of this window cross the longest document in one loop.
        window=WindowConfig(size=8),
        # Borders count where the sum that divides an output starts, too.
        linear=replace(config.model.linear, normalize=True),
    )
    return config


def _run(rank, world):
    """By pattern, then as `_of_one_model`."""
    from tests.tiny_run import build

    return {name: _of_one_model(build(_config(name), restart=True).model) for name in PATTERNS}


def _of_one_model(model):
    """By number of loops: packed outputs, those after each change, and document by document."""
    model.eval()
    tokens = _rows()
    results = {}
    for loops in LOOPS:
        changed = []
        for place in CHANGED:
            other = tokens.clone()
            other.view(-1)[place] = other.view(-1)[place] % (VOCABULARY - 1) + 1
            changed.append(_outputs(model, other, loops))
        alone = [
            _outputs(model, tokens.view(1, -1)[:, start:end], loops, isolate=False)
            for start, end in zip(BOUNDS[:-1], BOUNDS[1:], strict=True)
        ]
        results[loops] = {
            "packed": _outputs(model, tokens, loops),
            "changed": changed,
            "alone": [np.concatenate(parts) for parts in zip(*alone, strict=True)],
            "together": _outputs(model, tokens, loops, isolate=False),
        }
    return results


@pytest.fixture(scope="module")
def all_results():
    return run_ranks(1, _run)[0]


@pytest.fixture(params=PATTERNS)
def results(all_results, request):
    return all_results[request.param]


@pytest.mark.parametrize("loops", LOOPS)
def test_a_changed_token_changes_its_own_document_only(results, loops):
    before = results[loops]["packed"]
    for place, after in zip(CHANGED, results[loops]["changed"], strict=True):
        end = next(bound for bound in BOUNDS if bound > place)
        for old, new in zip(before, after, strict=True):
            same = (old == new).reshape(len(old), -1).all(axis=1)
            # Bit for bit: what comes before the change, and every later document.
            assert same[:place].all() and same[end:].all(), place
        logits_differ = (before[0] != after[0]).any(axis=1)
        assert logits_differ[place:end].all(), place


@pytest.mark.parametrize("loops", LOOPS)
def test_packed_documents_equal_separate_ones(results, loops):
    for packed, alone in zip(results[loops]["packed"], results[loops]["alone"], strict=True):
        # Rounding only: other shapes sum in another order, through up to nine layers.
        np.testing.assert_allclose(packed, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("loops", LOOPS)
def test_without_isolation_the_documents_do_see_each_other(results, loops):
    """The same comparison finds a leak where there is one."""
    _, packed = results[loops]["packed"]
    _, together = results[loops]["together"]
    first = BOUNDS[1]
    np.testing.assert_allclose(packed[:first], together[:first], rtol=1e-4, atol=1e-4)
    assert np.abs(packed - together)[first:LENGTH].max() > 1e-2


def test_loops_are_not_all_the_same(results):
    losses = [results[loops]["packed"][1] for loops in LOOPS]
    assert np.abs(losses[0] - losses[1]).max() > 1e-2
    assert np.abs(losses[1] - losses[2]).max() > 1e-2
