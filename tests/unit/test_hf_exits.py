"""Sandwich norms, the norm between loops and early exits of the exported model.

Against an Ouro written from its description (tests/ouro_reference.py), in fp64; and against the
model itself: with and without cache, threshold and step against the outputs of all loops.
"""

import pytest
import torch
from tiny_lt2 import LOOPS, VOCAB, cache_of, tiny_config, tiny_model

from megatron_lt2.hf.cache_lt2 import LT2Cache
from megatron_lt2.hf.configuration_lt2 import LT2Config
from megatron_lt2.hf.modeling_lt2 import LT2ForCausalLM
from tests.ouro_reference import OuroShape, exit_loop, random_ouro

SHAPE = OuroShape(
    vocab_size=VOCAB,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    total_ut_steps=3,
    rope_theta=500.0,
)
OURO = {
    "loop_residual": "none",
    "norm_mode": "sandwich",
    "inter_loop_norm": True,
    "exit_gate": True,
    "attention_output_gate": False,
    "tie_word_embeddings": False,
}
HYBRID = {**OURO, "loop_residual": "per_channel", "inter_loop_norm": False}
"""gdn and full with rho and a gate; its final norm is not between loops."""
MODELS = {"ouro": {**OURO, "mixers": ["full", "full"]}, "hybrid": HYBRID}


def _pair(seed=0, **changes):
    """The reference and our model with its weights."""
    reference = random_ouro(SHAPE, seed)
    config = LT2Config(
        vocab_size=SHAPE.vocab_size,
        hidden_size=SHAPE.hidden_size,
        intermediate_size=SHAPE.intermediate_size,
        num_hidden_layers=SHAPE.num_hidden_layers,
        mixers=["full"] * SHAPE.num_hidden_layers,
        num_attention_heads=SHAPE.num_attention_heads,
        num_key_value_heads=SHAPE.num_key_value_heads,
        head_dim=SHAPE.head_dim,
        loops=SHAPE.total_ut_steps,
        rope_theta=SHAPE.rope_theta,
        **{**OURO, **changes},
    )
    model = LT2ForCausalLM(config).double().eval()
    weights = {k.replace("self_attn.", "mixer."): v for k, v in reference.state_dict().items()}
    model.load_state_dict({k: v for k, v in weights.items() if k in model.state_dict()})
    return reference, model


def _ids(rows=2, length=13):
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def pair():
    return _pair()


@pytest.mark.parametrize("loops", [None, 1, 2, 5])
@torch.no_grad()
def test_every_loop_equals_the_reference(pair, loops):
    reference, model = pair
    expected = reference(_ids(), loops=loops)
    got = model(_ids(), loops=loops, output_exits=True)
    # cos and sin of positions are fp32, which bounds the agreement.
    assert got.loop_logits.shape[0] == (loops or 3)
    torch.testing.assert_close(got.loop_logits, torch.stack(expected.logits), rtol=0, atol=1e-4)
    torch.testing.assert_close(
        got.exit_probabilities, expected.exit_probabilities, rtol=0, atol=1e-5
    )
    assert torch.equal(got.logits, got.loop_logits[-1])
    assert expected.logits[0].std() > 0.1


@pytest.mark.parametrize(
    "changes", [{"inter_loop_norm": False}, {"norm_mode": "pre"}, {"rope_theta": 10000.0}], ids=str
)
@torch.no_grad()
def test_every_switch_matters_to_the_reference(changes):
    reference, model = _pair(**changes) if "rope_theta" not in changes else _pair()
    if "rope_theta" in changes:
        model.config.rope_theta = changes["rope_theta"]
    difference = (model(_ids()).logits - reference(_ids()).logits[-1]).abs().max()
    assert difference > 1e-2


@pytest.mark.parametrize("choice", [{}, {"exit_step": 2}, {"exit_threshold": 0.6}, {"loops": 4}])
@pytest.mark.parametrize("use_cache", [True, False])
def test_generation_equals_the_reference(pair, choice, use_cache):
    reference, model = pair
    names = {"exit_step": "step", "exit_threshold": "threshold"}
    theirs = {names[k]: v - (k == "exit_step") for k, v in choice.items() if k in names}
    if "loops" in choice:
        reference, _ = _pair()
        object.__setattr__(reference.shape, "total_ut_steps", choice["loops"])
    expected = reference.generate(_ids(), 12, **theirs)
    object.__setattr__(reference.shape, "total_ut_steps", 3)
    got = model.generate(
        _ids(), max_new_tokens=12, do_sample=False, use_cache=use_cache, pad_token_id=0, **choice
    )
    assert torch.equal(got, expected)


@torch.no_grad()
def test_loop_t_of_layer_i_has_slot_t_layers_plus_i(pair):
    reference, model = pair
    from tests.ouro_reference import Slots

    slots = Slots()
    reference(_ids(), slots)
    cache = cache_of(model(_ids(), use_cache=True))
    assert len(cache.layers) == len(slots.keys) == 6
    for slot, layer in enumerate(cache.layers):
        torch.testing.assert_close(layer.keys, slots.keys[slot], rtol=0, atol=1e-4)
        torch.testing.assert_close(layer.values, slots.values[slot], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_threshold_and_step_pick_the_right_loop(name):
    model, ids = tiny_model(**MODELS[name]).double(), _ids(3, 17)
    every = model(ids, output_exits=True)
    p = every.exit_probabilities
    assert p.shape == (3, 17, LOOPS)
    torch.testing.assert_close(p.sum(-1), torch.ones(3, 17, dtype=p.dtype))
    for step in range(1, LOOPS + 1):
        assert torch.equal(model(ids, exit_step=step).logits, every.loop_logits[step - 1])
        # A loop sees earlier loops only, so this is the same as a smaller T.
        assert torch.equal(model(ids, loops=step).logits, every.loop_logits[step - 1])
    threshold = float(p.cumsum(-1)[..., :-1].median())
    chosen = exit_loop(p, threshold)
    assert len(chosen.unique()) == LOOPS
    expected = every.loop_logits.gather(0, chosen[None, ..., None].expand(1, -1, -1, VOCAB))[0]
    assert torch.equal(model(ids, exit_threshold=threshold).logits, expected)
    assert torch.equal(model(ids, exit_threshold=0.0).logits, every.loop_logits[0])
    model.config.exit_threshold = threshold
    assert torch.equal(model(ids).logits, expected)
    assert torch.equal(model(ids, exit_step=1).logits, every.loop_logits[0])
    model.config.exit_threshold, model.config.exit_step = None, 2
    assert torch.equal(model(ids).logits, every.loop_logits[1])


@pytest.mark.parametrize("choice", [{}, {"exit_step": 2}, {"exit_threshold": 0.5}, {"loops": 2}])
@pytest.mark.parametrize("name", MODELS)
def test_cached_pieces_equal_the_whole(name, choice):
    model, ids = tiny_model(**MODELS[name]).double(), _ids(2, 12)
    with torch.no_grad():
        whole = model(ids, use_cache=False, output_exits=True, **choice)
        cache, pieces = None, []
        for piece in ids.split([5, 1, 1, 3, 2], dim=1):
            out = model(piece, cache=cache, use_cache=True, output_exits=True, **choice)
            cache, pieces = cache_of(out), [*pieces, out]
    for attribute, axis in (("logits", 1), ("loop_logits", 2), ("exit_probabilities", 1)):
        got = torch.cat([getattr(out, attribute) for out in pieces], axis)
        torch.testing.assert_close(got, getattr(whole, attribute), rtol=0, atol=1e-9)
    loops = choice.get("exit_step", choice.get("loops", LOOPS))
    assert len(cache.layers) == loops * model.config.num_hidden_layers


def test_left_padding_changes_no_exit():
    model, ids = tiny_model(**HYBRID).double(), _ids(1, 9)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], 1)
    mask = torch.cat([torch.zeros(1, 4), torch.ones(1, 9)], 1)
    with torch.no_grad():
        alone = model(ids, exit_threshold=0.5, output_exits=True)
        got = model(padded, attention_mask=mask, exit_threshold=0.5, output_exits=True)
    torch.testing.assert_close(got.logits[:, 4:], alone.logits)
    torch.testing.assert_close(got.exit_probabilities[:, 4:], alone.exit_probabilities)


@pytest.mark.parametrize(
    ("changes", "call", "message"),
    [
        ({}, {"loops": 4}, "loops 4: rho has a row for each of 3 loops"),
        ({}, {"loops": 0}, "loops must be at least 1"),
        ({}, {"exit_step": 4}, "exit_step must be a loop from 1 to 3, got 4"),
        ({}, {"exit_step": 3, "loops": 2}, "exit_step must be a loop from 1 to 2"),
        ({}, {"exit_threshold": 1.5}, "exit_threshold must be a probability"),
        ({}, {"exit_threshold": 0.5, "exit_step": 1}, "give one of them"),
        ({"exit_gate": False}, {"exit_threshold": 0.5}, "needs an exit gate"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_what_a_model_cannot_do_is_refused(changes, call, message):
    model = tiny_model(**{**HYBRID, **changes})
    with pytest.raises(ValueError, match=message):
        model(_ids(), **call)
    with pytest.raises(ValueError, match=message):
        model.generate(_ids(), max_new_tokens=2, pad_token_id=0, **call)


def test_a_cache_keeps_to_its_loops():
    model = tiny_model(**HYBRID)
    with torch.no_grad():
        cache = cache_of(model(_ids(), loops=2, use_cache=True))
        with pytest.raises(ValueError, match="calls with 2 loops, this one runs 3"):
            model(_ids(), cache=cache)
    assert len(LT2Cache(model.config, 2).layers) == 2 * model.config.num_hidden_layers
    with pytest.raises(ValueError, match="norm_mode"):
        tiny_config(norm_mode="post")


def test_names_initial_values_and_saving(tmp_path):
    model = LT2ForCausalLM(tiny_config(**HYBRID))
    state = model.state_dict()
    assert state["model.early_exit_gate.weight"].shape == (1, 32)
    assert torch.equal(state["model.early_exit_gate.bias"], torch.zeros(1))
    for name in ("input_layernorm_2", "post_attention_layernorm_2"):
        assert torch.equal(state[f"model.layers.0.{name}.weight"], torch.ones(32))
    plain = set(tiny_model(norm_mode="pre", exit_gate=False).state_dict())
    assert not any("_2" in name or "exit" in name for name in plain)
    model = tiny_model(**HYBRID)
    model.save_pretrained(tmp_path)
    again = LT2ForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        got, expected = (m(_ids(), output_exits=True) for m in (again, model))
    assert torch.equal(got.loop_logits, expected.loop_logits)
    assert torch.equal(got.exit_probabilities, expected.exit_probabilities)
    half = LT2ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        p = half(_ids(), output_exits=True).exit_probabilities
    assert p.dtype == torch.float32 and half.model.early_exit_gate.weight.dtype == torch.bfloat16
    assert (p - expected.exit_probabilities).abs().max() < 0.1


def test_hidden_states_and_gradients():
    model = tiny_model(**MODELS["ouro"]).train()
    out = model(_ids(), labels=_ids(), output_hidden_states=True, output_exits=True)
    assert len(out.hidden_states) == 2 * LOOPS + 1
    states = model.model(_ids(), output_exits=True).loop_states
    for loop, state in enumerate(states, 1):  # the norm between loops is part of the stream
        torch.testing.assert_close(out.hidden_states[2 * loop], state)
    (out.loss + out.exit_probabilities[..., 0].mean()).backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
