"""Names, initial values, training, dtypes, and saving and loading of the Hugging Face model."""

from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from tiny_lt2 import (
    ALL,
    LINEAR,
    LOOPS,
    PATTERN,
    VOCAB,
    WIDTH,
    cache_of,
    own_names,
    settings_of,
    tiny_config,
    tiny_model,
    to_bfloat16,
)

from megatron_lt2.config.schema import ModelConfig
from megatron_lt2.hf.configuration_lt2 import LT2Config
from megatron_lt2.hf.modeling_lt2 import LT2ForCausalLM, LT2Model

BLOCK = {
    "input_layernorm.weight": (32,),
    "post_attention_layernorm.weight": (32,),
    "mlp.gate_proj.weight": (44, 32),
    "mlp.up_proj.weight": (44, 32),
    "mlp.down_proj.weight": (32, 44),
}
FULL = {
    "mixer.q_proj.weight": (40, 32),
    "mixer.k_proj.weight": (20, 32),
    "mixer.v_proj.weight": (20, 32),
    "mixer.g_proj.weight": (40, 32),
    "mixer.o_proj.weight": (32, 40),
}
GDN = {
    "mixer.q_proj.weight": (21, 32),
    "mixer.k_proj.weight": (21, 32),
    "mixer.v_proj.weight": (27, 32),
    "mixer.gate_proj.weight": (27, 32),
    "mixer.beta_proj.weight": (3, 32),
    "mixer.decay_proj.weight": (3, 32),
    "mixer.q_conv1d.weight": (21, 1, 4),
    "mixer.k_conv1d.weight": (21, 1, 4),
    "mixer.v_conv1d.weight": (27, 1, 4),
    "mixer.A_log": (3,),
    "mixer.dt_bias": (3,),
    "mixer.o_norm.weight": (9,),
    "mixer.o_proj.weight": (32, 27),
}
KDA = {
    "mixer.q_proj.weight": (12, 32),
    "mixer.k_proj.weight": (12, 32),
    "mixer.v_proj.weight": (10, 32),
    "mixer.gate_down.weight": (3, 32),
    "mixer.gate_up.weight": (10, 3),
    "mixer.gate_up.bias": (10,),
    "mixer.decay_down.weight": (3, 32),
    "mixer.decay_up.weight": (12, 3),
    "mixer.beta_proj.weight": (2, 32),
    "mixer.q_conv1d.weight": (12, 1, 4),
    "mixer.k_conv1d.weight": (12, 1, 4),
    "mixer.v_conv1d.weight": (10, 1, 4),
    "mixer.A_log": (2,),
    "mixer.dt_bias": (12,),
    "mixer.o_norm.weight": (5,),
    "mixer.o_proj.weight": (32, 10),
}
MAMBA2 = {
    "mixer.x_proj.weight": (20, 32),
    "mixer.B_proj.weight": (12, 32),
    "mixer.C_proj.weight": (12, 32),
    "mixer.gate_proj.weight": (20, 32),
    "mixer.dt_proj.weight": (4, 32),
    "mixer.x_conv1d.weight": (20, 1, 4),
    "mixer.x_conv1d.bias": (20,),
    "mixer.B_conv1d.weight": (12, 1, 4),
    "mixer.B_conv1d.bias": (12,),
    "mixer.C_conv1d.weight": (12, 1, 4),
    "mixer.C_conv1d.bias": (12,),
    "mixer.A_log": (4,),
    "mixer.dt_bias": (4,),
    "mixer.D": (4,),
    "mixer.o_norm.weight": (20,),
    "mixer.o_proj.weight": (32, 20),
}
SHAPES = {"full": FULL, "window": FULL, "gdn": GDN, "kda": KDA, "mamba2": MAMBA2}


def ids(rows: int = 2, length: int = 11) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("mixers", [PATTERN, ["kda", "window", "mamba2"]], ids=str)
def test_state_dict_names_and_shapes_are_pinned(mixers):
    expected = {
        "model.embed_tokens.weight": (61, 32),
        "model.loop_residual": (3, 32),
        "model.norm.weight": (32,),
        "lm_head.weight": (61, 32),
    }
    for i, mixer in enumerate(mixers):
        shapes = {**BLOCK, **SHAPES[mixer]}
        expected |= {f"model.layers.{i}.{name}": shape for name, shape in shapes.items()}
    found = {name: tuple(x.shape) for name, x in tiny_model(mixers=mixers).state_dict().items()}
    assert found == expected


def test_optional_parts_have_no_parameters_when_off():
    names = set(tiny_model(attention_output_gate=False, loop_residual="none").state_dict())
    assert "model.loop_residual" not in names
    assert "model.layers.1.mixer.g_proj.weight" not in names


def test_initial_values():
    torch.manual_seed(0)
    model = LT2ForCausalLM(tiny_config(hidden_size=64, mixers=["gdn", "full"]))
    state = model.state_dict()
    assert (state["model.loop_residual"] == 0).all()
    assert (state["model.layers.1.mixer.g_proj.weight"] == 0).all()
    assert (state["model.norm.weight"] == 1).all()
    weight = state["model.layers.0.mlp.gate_proj.weight"]
    assert weight.abs().max() <= 3 / 64**0.5
    assert weight.std() == pytest.approx(64**-0.5, rel=0.1)
    steps = F.softplus(state["model.layers.0.mixer.dt_bias"])
    assert (steps >= 0.99e-3).all() and (steps <= 0.101).all()
    assert (state["model.layers.0.mixer.A_log"].exp() <= 16).all()
    assert torch.isfinite(torch.cat([x.flatten() for x in state.values()])).all()


def test_initial_values_of_every_mixer():
    model = LT2ForCausalLM(tiny_config(mixers=ALL, mlstm={"forget_bias_max": 9.0}))
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all() and parameter.abs().max() < 20, name
        spread = parameter.numel() > 1 and parameter.std() > 0
        constant = ("norm.weight", "bias", "g_proj.weight", "D", "loop_residual")
        assert spread or name.endswith(constant), name
    own = {name: model.get_parameter(name) for name in own_names(model)}
    layer = {mixer: f"model.layers.{i}.mixer" for i, mixer in enumerate(ALL)}
    assert (own[f"{layer['mamba2']}.D"] == 1).all()
    assert (own[f"{layer['gla']}.decay_bias"] == 0).all()
    assert own[f"{layer['mlstm']}.input_bias"].tolist() == [-10.0] * 3
    assert own[f"{layer['mlstm']}.forget_bias"].tolist() == [3.0, 6.0, 9.0]
    rates = own[f"{layer['kda']}.A_log"].exp()
    assert (rates >= 1).all() and (rates <= 16).all()
    state = model.state_dict()
    assert (state[f"{layer['kda']}.gate_up.bias"] == 0).all()
    bias = state[f"{layer['mamba2']}.x_conv1d.bias"]
    assert 0 < bias.abs().max() <= 0.5


def test_initial_values_follow_the_seed():
    made = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        model = LT2ForCausalLM(tiny_config(mixers=["gdn", "kda"]))
        made.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])


def test_loss_is_the_shifted_cross_entropy_and_reaches_every_parameter():
    model, tokens = tiny_model(mixers=ALL).train(), ids()
    labels = tokens.clone()
    labels[0, 4] = -100
    out = model(tokens, labels=labels)
    assert cache_of(out) is None
    expected = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected)
    out.loss.backward()
    for name, parameter in model.named_parameters():
        if ".indexer." in name:  # only training here has the loss that trains it
            assert parameter.grad is None
            continue
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 0, name


def test_gradient_checkpointing_gives_the_same_gradients():
    tokens, gradients = ids(), []
    for checkpointing in (False, True):
        model = tiny_model().train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            assert any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
        model(tokens, labels=tokens, use_cache=True).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


def test_eager_attention_equals_sdpa():
    tokens = ids(2, 9)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    logits = {}
    mixers = ["window", "full"]
    for kind in ("sdpa", "eager"):
        config = tiny_config(mixers=mixers)
        model = LT2ForCausalLM._from_config(config, attn_implementation=kind).eval()
        model.load_state_dict(tiny_model(mixers=mixers).state_dict())
        assert model.config._attn_implementation == kind
        with torch.no_grad():
            first = model(tokens[:, :6], attention_mask=mask[:, :6])
            rest = model(tokens[:, 6:], attention_mask=mask, cache=cache_of(first)).logits
            logits[kind] = torch.cat([model(tokens).logits, rest], 1)
    torch.testing.assert_close(logits["sdpa"], logits["eager"], rtol=0, atol=1e-5)


def test_flash_attention_is_refused_by_name():
    with pytest.raises((ValueError, ImportError), match="(?i)flash"):
        LT2ForCausalLM._from_config(tiny_config(), attn_implementation="flash_attention_2")


def test_hidden_states_cover_every_loop_and_layer():
    model = tiny_model()
    with torch.no_grad():
        out = model(ids(), output_hidden_states=True)
        embedded = model.model.embed_tokens(ids())
    assert len(out.hidden_states) == LOOPS * len(PATTERN) + 1
    assert torch.equal(out.hidden_states[0], embedded)
    torch.testing.assert_close(model.lm_head(out.hidden_states[-1]), out.logits)


def test_logits_to_keep_embeddings_and_tuples():
    model, tokens = tiny_model(), ids()
    with torch.no_grad():
        logits = model(tokens).logits
        torch.testing.assert_close(model(tokens, logits_to_keep=2).logits, logits[:, -2:])
        wanted = torch.tensor([0, 5])
        torch.testing.assert_close(model(tokens, logits_to_keep=wanted).logits, logits[:, wanted])
        embedded = model.model.embed_tokens(tokens)
        torch.testing.assert_close(model(inputs_embeds=embedded).logits, logits)
        torch.testing.assert_close(model(tokens, return_dict=False)[0], logits)


@pytest.mark.parametrize("tied", [True, False])
def test_saving_and_loading_keeps_every_byte(tmp_path, tied):
    model = tiny_model(tie_word_embeddings=tied, mixers=ALL)
    model.save_pretrained(tmp_path)
    again, report = LT2ForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert again.config.to_dict() == {**model.config.to_dict(), "_name_or_path": str(tmp_path)} or (
        again.config.to_diff_dict() == model.config.to_diff_dict()
    )
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
    base = LT2Model.from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(
            again.lm_head(base(ids()).last_hidden_state), model(ids()).logits
        )


def test_fp32_parameters_survive_loading_in_bf16(tmp_path):
    model = tiny_model(mixers=ALL)
    own = own_names(model)
    assert len(own) == 11
    model.save_pretrained(tmp_path)
    low = LT2ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, parameter in low.named_parameters():
        fp32 = name in own
        assert parameter.dtype == (torch.float32 if fp32 else torch.bfloat16), name
        if fp32:
            assert torch.equal(parameter, model.get_parameter(name)), name
    with torch.no_grad():
        logits = low(ids()).logits
    assert logits.dtype == torch.bfloat16
    assert low.generate(ids(), max_new_tokens=3, do_sample=False).shape == (2, 14)
    low.save_pretrained(tmp_path / "low")
    assert LT2ForCausalLM.from_pretrained(tmp_path / "low").dtype == torch.bfloat16


@pytest.mark.parametrize("mixer", ALL)
def test_bf16_logits_are_close(mixer):
    """Rounded weights alone move the logits by about 1 %; the median, because the norm enlarges the
    error of a token whose query happens to be orthogonal to its past."""
    model, tokens = tiny_model(mixers=[mixer], loops=1), ids(2, 30)
    with torch.no_grad():
        expected = model(tokens).logits
        to_bfloat16(model)
        logits = model(tokens).logits
        cache = cache_of(model(tokens[:, :27]))
        steps = [model(tokens[:, t : t + 1], cache=cache).logits for t in range(27, 30)]
    assert logits.dtype == torch.bfloat16
    error = (logits.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.median() < 0.03
    difference = (torch.cat(steps, 1) - logits[:, 27:]).float()
    assert difference.norm() < 0.02 * logits[:, 27:].float().norm()


def test_config_round_trip_and_defaults(tmp_path):
    config = tiny_config(
        rope_interleaved=True, loop_residual="none", window_size=7, gdn={"norm_eps": 0.25}
    )
    config.save_pretrained(tmp_path)
    again = LT2Config.from_pretrained(tmp_path)
    for name in vars(config):
        if not name.startswith("_") and name != "transformers_version":
            assert getattr(again, name) == getattr(config, name), name
    paper = LT2Config()
    assert [i for i, mixer in enumerate(paper.mixers) if mixer == "full"] == [4, 9, 14, 19]
    assert (paper.head_dim, paper.num_key_value_heads, paper.hidden_size) == (128, 16, 2048)
    assert paper.mixer_settings == {"gdn": asdict(ModelConfig().mixer_settings("gdn"))}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixers": ["gdn", "mamba"]}, "mixers: unknown \\['mamba'\\]"),
        ({"mixer_settings": {"mamba": {}}}, "mixer_settings: unknown \\['mamba'\\]"),
        ({"mixers": ["gdn", "kda"], "mixer_settings": {}}, "nothing about \\['gdn', 'kda'\\]"),
        ({"window_size": 0}, "window_size must be at least 1"),
        ({"loops": 0}, "loops must be at least 1"),
        ({"loop_residual": "scalar"}, "loop_residual must be"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"head_dim": 7}, "head_dim must be even"),
    ],
)
def test_impossible_configs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**changes)
    with pytest.raises(ValueError, match="mixers names 3 layers, num_hidden_layers is 4"):
        LT2Config(num_hidden_layers=4, mixers=PATTERN)
    assert tiny_config().hidden_size == WIDTH


def test_incomplete_and_impossible_settings_are_refused():
    for name in LINEAR:
        settings = settings_of(name)
        del settings["num_heads"]
        config = tiny_config(mixers=[name], mixer_settings={name: settings})
        with pytest.raises(ValueError, match=f"mixer_settings\\['{name}'\\] lacks 'num_heads'"):
            LT2ForCausalLM(config)
    config = tiny_config(mixers=["mamba2"], mamba2={"groups": 3})
    with pytest.raises(ValueError, match="mixer_settings\\['mamba2'\\]: groups 3 does not divide"):
        LT2ForCausalLM(config)
