"""The modeling file against a token-by-token fp64 forward pass, also across chunks of 64."""

import pytest
import torch
from plain_lt2 import plain_logits
from tiny_lt2 import VOCAB, tiny_model


def _ids(length: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (1, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_interleaved": True, "rope_theta": 500.0},
        {"attention_output_gate": False, "tie_word_embeddings": False},
        {"gdn": {"allow_neg_eigval": True, "conv_size": 3}},
        {"loop_residual": "none", "loops": 2},
        {"num_key_value_heads": 1, "gdn": {"norm_eps": 1e-2}, "rms_norm_eps": 1e-3},
    ],
    ids=["default", "interleaved", "no-gate", "negative", "no-rho", "one-key-head"],
)
def test_equals_the_plain_forward_pass(changes):
    model = tiny_model(**changes).double()
    ids = _ids(19)
    expected = plain_logits(model.state_dict(), model.config, ids[0].tolist())
    with torch.no_grad():
        logits = model(ids).logits[0]
    # cos and sin are fp32, which bounds the agreement.
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("mixer", "changes", "tolerance"),
    [
        ("gdn", {}, 1e-9),
        ("kda", {}, 1e-9),
        ("kda", {"allow_neg_eigval": True}, 1e-9),
        ("deltanet", {}, 1e-5),  # makes its write strength in fp32
        ("deltanet", {"output_gate": False, "allow_neg_eigval": True}, 1e-5),
        ("mamba2", {}, 1e-9),
        ("mamba2", {"groups": 1}, 1e-9),
        ("retnet", {}, 2e-5),  # cos and sin are fp32
        ("retnet", {"rope_theta": 30.0}, 2e-5),
        ("gla", {}, 1e-9),
        ("linear", {}, 1e-9),
        ("linear", {"normalize": False}, 1e-9),
        ("mlstm", {}, 1e-9),
        ("mlstm", {"gate_cap": 2.0}, 1e-9),
        ("mlstm", {"gate_cap": None}, 1e-9),
        ("hgrn2", {}, 1e-9),
        ("hgrn2", {"lower_bound": 0.0}, 1e-9),
        ("window", {}, 2e-5),
        ("nsa", {}, 2e-5),
        ("dsa", {}, 2e-5),
    ],
)
def test_every_mixer_equals_its_plain_form(mixer, changes, tolerance):
    changes = {mixer: changes} if changes else {}
    model = tiny_model(mixers=[mixer, mixer], loops=1, **changes).double()
    ids = _ids(21)
    expected = plain_logits(model.state_dict(), model.config, ids[0].tolist())
    with torch.no_grad():
        logits = model(ids).logits[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance)


def test_exact_across_chunks_without_rotary_positions():
    model = tiny_model(mixers=["gdn", "gdn"], loops=2).double()
    ids = _ids(131)
    expected = plain_logits(model.state_dict(), model.config, ids[0].tolist())
    with torch.no_grad():
        logits = model(ids).logits[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_interleaved": True},
        {"rope_theta": 20000.0},
        {"loops": 2},
        {"gdn": {"allow_neg_eigval": True}},
        {"gdn": {"norm_eps": 1e-3}},
        {"rms_norm_eps": 1e-3},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_switch_changes_the_logits(changes):
    model, ids = tiny_model(), _ids(19)
    weights = model.state_dict()
    other = tiny_model(**changes)
    if "loops" in changes:
        weights["model.loop_residual"] = weights["model.loop_residual"][: changes["loops"]]
    other.load_state_dict(weights)
    with torch.no_grad():
        difference = (model(ids).logits - other(ids).logits).abs().max()
    assert difference > 1e-4
