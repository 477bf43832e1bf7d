"""The LT2 table: exact values from tensors laid out independently, and refusals."""

from dataclasses import fields

import pytest
import torch
from tiny_lt2 import VOCAB, WIDTH, tiny_config, tiny_model, tiny_run_config, training_tensors

from checkpoints_tools.mappings.base import is_ignored
from checkpoints_tools.mappings.lt2 import export_state_dict, lt2_config_values, lt2_mappings
from megatron_lt2.config.schema import AttentionConfig, GDNConfig, ModelConfig, RopeConfig
from megatron_lt2.hf.configuration_lt2 import LT2Config

CASES = {
    "grouped keys, tied": ({}, {}),
    "untied": ({"tie_word_embeddings": False}, {"tie_embeddings": False}),
    "no gate": (
        {"attention_output_gate": False},
        {"attention": AttentionConfig(output_gate=False)},
    ),
    "one key head": ({"num_key_value_heads": 1}, {"num_kv_heads": 1}),
    "a key head a head": ({"num_key_value_heads": 4}, {"num_kv_heads": None}),
    "no rho": ({"loop_residual": "none"}, {"loop_residual": "none"}),
    "pattern": ({"mixers": ["full", "gdn", "full"]}, {"pattern": "full+gdn"}),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request):
    hf_changes, run_changes = request.param
    return tiny_model(**hf_changes), tiny_run_config(**run_changes)


def test_every_tensor_arrives_unchanged(case):
    model, run = case
    expected = model.state_dict()
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    exported = dict(export_state_dict(training_tensors(model), run.model))
    assert exported.keys() == expected.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor, expected[name]), name


def test_the_config_says_the_same(case):
    model, run = case
    ours, theirs = LT2Config(**lt2_config_values(run)), model.config
    assert ours.to_dict() == theirs.to_dict()


def test_functions_are_called_when_their_turn_comes():
    tensors = training_tensors(tiny_model())
    read = []

    def reader(name):
        return lambda: (read.append(name), tensors[name])[1]

    stream = export_state_dict({name: reader(name) for name in tensors}, tiny_run_config().model)
    name, _ = next(stream)
    assert name == "model.embed_tokens.weight"
    assert read == ["embedding.word_embeddings.weight"]
    assert len(list(stream)) == len(tiny_model().state_dict()) - 2
    assert sorted(read) == sorted(tensors)


def test_vocabulary_padding_is_cut_off():
    model = tiny_model(tie_word_embeddings=False)
    run = tiny_run_config(tie_embeddings=False)
    for rows in (0, 3, 67):
        exported = dict(export_state_dict(training_tensors(model, rows), run.model))
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert exported[name].shape == (VOCAB, WIDTH)


def test_missing_and_unknown_tensors_are_listed():
    tensors = training_tensors(tiny_model())
    tensors["decoder.layers.2.self_attention.A_log_renamed"] = tensors.pop(
        "decoder.layers.2.self_attention.A_log"
    )
    del tensors["decoder.layers.1.mlp.linear_fc2.weight"]
    with pytest.raises(ValueError) as error:
        next(export_state_dict(tensors, tiny_run_config().model))
    assert str(error.value).endswith(
        "missing: decoder.layers.1.mlp.linear_fc2.weight, decoder.layers.2.self_attention.A_log; "
        "unknown: decoder.layers.2.self_attention.A_log_renamed"
    )


def test_an_output_layer_in_a_tied_model_is_unknown():
    tensors = training_tensors(tiny_model(tie_word_embeddings=False))
    with pytest.raises(ValueError, match="unknown: output_layer.weight"):
        next(export_state_dict(tensors, tiny_run_config().model))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("decoder.layers.1.self_attention.linear_qkv.weight", (110, 32)),
        ("decoder.layers.0.self_attention.conv1d.weight.key", (21, 1, 4)),
        ("embedding.word_embeddings.weight", (60, 32)),
        ("decoder.loop_residual", (4, 32)),
        ("decoder.layers.0.mlp.linear_fc1.weight", (44, 32)),
    ],
)
def test_wrong_shapes_are_refused_with_the_name(name, shape):
    tensors = {**training_tensors(tiny_model()), name: torch.zeros(shape)}
    with pytest.raises(ValueError, match=name.replace(".", r"\.") + " has shape"):
        list(export_state_dict(tensors, tiny_run_config().model))


def test_training_state_is_ignored_and_weights_are_not():
    for name in (
        "optimizer.state.exp_avg.decoder.final_layernorm.weight",
        "chained_0.optimizer.state.param.output_layer.weight",
        "decoder.layers.0.mlp.linear_fc1._extra_state/shard_0_1",
        "rng_state/shard_0_1",
    ):
        assert is_ignored(name)
    assert not any(is_ignored(mapping.source) for mapping in lt2_mappings(tiny_run_config().model))


@pytest.mark.parametrize(
    ("name", "value"),
    [("norm_mode", "sandwich"), ("inter_loop_norm", True), ("exit_gate", True), ("loss", "exits")],
)
def test_architectures_without_a_modeling_file_are_refused(name, value):
    with pytest.raises(ValueError, match=f"model.{name} is {value!r}"):
        lt2_config_values(tiny_run_config(**{name: value}))
    with pytest.raises(ValueError, match="vocab_size is not set"):
        lt2_config_values(tiny_run_config(vocab_size=None))


def test_every_setting_of_the_model_reaches_the_config():
    """A new field of ModelConfig must be exported, refused, or listed as training_only."""
    training_only = {"init", "gdn.a_init_max", "gdn.dt_min", "gdn.dt_max"}
    changes = {
        "num_layers": 2,
        "hidden_size": 40,
        "num_heads": 8,
        "num_kv_heads": 1,
        "head_dim": 12,
        "ffn_hidden_size": 50,
        "vocab_size": 99,
        "pattern": ["full", "full", "gdn"],
        "loops": 5,
        "loop_residual": "none",
        "norm_mode": "sandwich",
        "inter_loop_norm": True,
        "exit_gate": True,
        "loss": "exits",
        "norm_eps": 0.5,
        "tie_embeddings": False,
        "rope.theta": 3.0,
        "rope.interleaved": True,
        "attention.output_gate": False,
        "gdn.num_heads": 2,
        "gdn.head_k_dim": 5,
        "gdn.expand_v": 3.0,
        "gdn.conv_size": 2,
        "gdn.allow_neg_eigval": True,
        "gdn.norm_eps": 0.25,
    }
    sections = {"rope": RopeConfig, "attention": AttentionConfig, "gdn": GDNConfig}
    names = set()
    for field in fields(ModelConfig):
        inner = sections.get(field.name)
        names |= {f"{field.name}.{f.name}" for f in fields(inner)} if inner else {field.name}
    assert names == changes.keys() | training_only

    before = lt2_config_values(tiny_run_config())
    for name, value in changes.items():
        run = tiny_run_config()
        *section, leaf = name.split(".")
        setattr(getattr(run.model, section[0]) if section else run.model, leaf, value)
        if name == "num_layers":
            run.model.pattern = ["gdn", "full"]
        try:
            assert lt2_config_values(run) != before, name
        except ValueError as error:
            assert f"model.{name} is" in str(error)


def test_the_tiny_configs_agree():
    assert tiny_config().to_dict() == LT2Config(**lt2_config_values(tiny_run_config())).to_dict()
