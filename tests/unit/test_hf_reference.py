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
        {"gdn_allow_neg_eigval": True, "gdn_conv_size": 3},
        {"loop_residual": "none", "loops": 2},
        {"num_key_value_heads": 1, "gdn_norm_eps": 1e-2, "rms_norm_eps": 1e-3},
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
        {"gdn_allow_neg_eigval": True},
        {"gdn_norm_eps": 1e-3},
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
