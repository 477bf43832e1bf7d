"""The LT2 table: exact values from tensors laid out independently, and refusals."""

from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from tiny_lt2 import (
    ALL,
    LINEAR,
    SPARSE,
    VOCAB,
    WIDTH,
    own_names,
    settings_of,
    tiny_config,
    tiny_model,
    tiny_run_config,
    training_tensors,
)

from checkpoints_tools.exporting import cast
from checkpoints_tools.mappings.base import convert_all, is_ignored
from checkpoints_tools.mappings.lt2 import (
    export_state_dict,
    fp32_names,
    lt2_config_values,
    lt2_mappings,
)
from megatron_lt2.config.schema import AttentionConfig, ModelConfig
from megatron_lt2.hf.configuration_lt2 import LT2Config
from megatron_lt2.hf.linear_lt2 import describe_mixer

SWITCHES = {"norm_mode": "sandwich", "inter_loop_norm": True, "exit_gate": True}
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
    "all mixers": ({"mixers": ALL}, {"pattern": ALL, "num_layers": len(ALL)}),
    "sandwich norms and a gate": (SWITCHES, SWITCHES),
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


def test_fp32_names_are_those_of_the_model(case):
    model, run = case
    assert fp32_names(run.model) | {"model.loop_residual"} == (
        own_names(model) | {"model.loop_residual"}
    )


@pytest.mark.parametrize("name", LINEAR)
def test_initial_weights_of_1000_seeds_come_through_a_bf16_export(name):
    """Through the table and the cast and back: own weights to the bit, the others as bf16."""
    run = tiny_run_config(pattern=[name], num_layers=1)
    table = [m for m in lt2_mappings(run.model) if ".self_attention." in m.source]
    targets = [target for mapping in table for target in mapping.targets]
    assert len(set(targets)) == len(targets) == len({mapping.source for mapping in table})
    expected = {n for n in tiny_model(mixers=[name]).state_dict() if ".mixer." in n}
    assert set(targets) == expected
    keep, sources = fp32_names(run.model), {m.targets[0]: m for m in table}
    own = describe_mixer(tiny_config(mixers=[name]), name, 0).layout.weights
    for seed in range(1000):
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for mapping in table:
            last = mapping.source.rsplit(".", 1)[-1]
            tensors[mapping.source] = (
                own[last].init(mapping.shape, generator)
                if last in own
                else torch.randn(mapping.shape, generator=generator)
            )
        exported = {
            target: cast(tensor, "float32" if target in keep else "bfloat16")
            for target, tensor in convert_all(tensors, table)
        }
        assert exported.keys() == expected
        for target, tensor in exported.items():
            before = tensors[sources[target].source]
            after = tensor.float().view(sources[target].shape)
            assert torch.isfinite(after).all()
            is_own = target.rsplit(".", 1)[-1] in own
            assert tensor.dtype == (torch.float32 if is_own else torch.bfloat16)
            assert torch.equal(after, before if is_own else before.bfloat16().float()), target


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
        ("decoder.layers.0.self_attention.conv1d.weight.k", (21, 1, 4)),
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


def test_an_unresolved_config_is_refused():
    with pytest.raises(ValueError, match="vocab_size is not set"):
        lt2_config_values(tiny_run_config(vocab_size=None))


def test_every_setting_of_the_model_reaches_the_config():
    """A new field of ModelConfig must be exported, refused, or listed as training_only."""
    training_only = {"init", "loss", "exit_entropy"}
    changes: dict[str, Any] = {
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
        "norm_eps": 0.5,
        "tie_embeddings": False,
        "rope.theta": 3.0,
        "rope.interleaved": True,
        "attention.output_gate": False,
        "window.size": 3,
    }
    names = set()
    for field in fields(ModelConfig):
        inner = getattr(ModelConfig(), field.name)
        if field.name in (*LINEAR, *SPARSE, *training_only):
            continue
        leaves = [f"{field.name}.{f.name}" for f in fields(inner)] if is_dataclass(inner) else []
        names |= set(leaves or [field.name])
    assert names == changes.keys()

    before = lt2_config_values(tiny_run_config())
    for name, value in changes.items():
        run = tiny_run_config()
        *section, leaf = name.split(".")
        setattr(getattr(run.model, section[0]) if section else run.model, leaf, value)
        if name == "num_layers":
            run.model.pattern = ["gdn", "full"]
        assert lt2_config_values(run) != before, name


@pytest.mark.parametrize("name", LINEAR)
def test_every_setting_of_a_linear_mixer_reaches_the_config(name):
    for leaf, old in settings_of(name).items():
        run = tiny_run_config(pattern=[name, "full"], num_layers=2)
        assert lt2_config_values(run)["mixer_settings"] == {name: settings_of(name)}
        new = "another" if isinstance(old, str) else not old if isinstance(old, bool) else 2 * old
        setattr(getattr(run.model, name), leaf, new := new if new != old else 1.0)
        assert lt2_config_values(run)["mixer_settings"][name][leaf] == new


def test_the_tiny_configs_agree():
    assert tiny_config().to_dict() == LT2Config(**lt2_config_values(tiny_run_config())).to_dict()
