"""Every refusal of the config checks names the setting, its value and what to do."""

import functools

import pytest

from megatron_lt2.config.checks import check_config, data_parallel_size
from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.schema import ParallelConfig, RunConfig
from megatron_lt2.mixers.registry import RECURRENT, recurrent_mixer
from megatron_lt2.parallel import platform
from megatron_lt2.recurrent.base import RecurrentMixer
from megatron_lt2.training.fp8_device import check_fp8_device
from tests.tiny_run import tiny_config

# Head counts come from the mixers, which import megatron-core.
platform.install()

TRANSFORMER = "megatron.transformer"
POSITIVE = "it must be greater than 0"
NOT_NEGATIVE = "it must be 0 or more"


def _with(changes):
    config = tiny_config()
    for setting, value in changes.items():
        *path, name = setting.split(".")
        setattr(functools.reduce(getattr, path, config), name, value)
    return config


def test_the_tiny_and_the_default_config_pass():
    check_config(tiny_config(), 2)
    check_config(RunConfig(), 8, need_data=False)


def test_an_ouro_passes():
    ouro = {
        **{"model.pattern": "full", "model.norm_mode": "sandwich", "model.inter_loop_norm": True},
        **{"model.exit_gate": True, "model.loss": "exits", "model.exit_entropy": 0.0},
    }
    check_config(_with(ouro), 1)
    check_config(_with({**ouro, "model.loss": "final", "model.loops": 1}), 1)
    with pytest.raises(ConfigError, match="model.exit_entropy is -0.1; it must be 0 or more"):
        check_config(_with({**ouro, "model.exit_entropy": -0.1}), 1)


@pytest.mark.parametrize(
    "setting",
    [
        "model.num_layers",
        "model.hidden_size",
        "model.num_heads",
        "model.loops",
        "model.gdn.conv_size",
        "model.kda.rank",
        "model.deltanet.head_v_dim",
        "model.mamba2.groups",
        "model.retnet.rope_theta",
        "model.gla.gate_normalizer",
        "model.linear.norm_eps",
        "model.mlstm.gate_cap",
        "model.hgrn2.num_heads",
        "model.window.size",
        "data.sequence_length",
        "training.steps",
        "training.global_batch_size",
        "training.micro_batch_size",
        "parallel.tensor",
        "parallel.pipeline",
        "parallel.context",
        "logging.interval",
        "optimizer.lr",
    ],
)
@pytest.mark.parametrize("value", [0, -2])
def test_must_be_positive(setting, value):
    with pytest.raises(ConfigError) as caught:
        check_config(_with({setting: value}), 1)
    assert str(caught.value) == f"{setting} is {value}; {POSITIVE}"


@pytest.mark.parametrize(
    "setting",
    [
        "training.eval_interval",
        "training.eval_batches",
        "checkpoint.interval",
        "checkpoint.keep",
        "optimizer.warmup_steps",
        "optimizer.clip_grad",
        "data.num_workers",
    ],
)
def test_must_not_be_negative(setting):
    check_config(_with({setting: 0}), 1)
    with pytest.raises(ConfigError) as caught:
        check_config(_with({setting: -1}), 1)
    assert str(caught.value) == f"{setting} is -1; {NOT_NEGATIVE}"


# changes, ranks, parts of the message: setting and value, then the fix
REFUSALS = {
    "exit loss": (
        {"model.loss": "exits"},
        1,
        ["model.loss 'exits'", "model.exit_gate, which is false", "set it to true"],
    ),
    "exit loss of one loop": (
        {"model.loss": "exits", "model.exit_gate": True, "model.loops": 1},
        1,
        ["model.loss 'exits'", "model.loops 1", "use 2 loops or more"],
    ),
    "attention heads on ranks": (
        {
            **{"model.pattern": "full", "model.num_heads": 9, "model.num_kv_heads": 3},
            **{"model.head_dim": 8, "parallel.tensor": 2},
        },
        2,
        ["model.num_heads 9", "parallel.tensor 2", "that divides it"],
    ),
    "key heads on ranks": (
        {
            **{"model.pattern": "full", "model.num_heads": 8, "model.num_kv_heads": 1},
            "parallel.tensor": 2,
        },
        2,
        ["model.num_kv_heads 1", "parallel.tensor 2", "that divides it"],
    ),
    "more stages than layers": (
        {"parallel.pipeline": 4},
        4,
        ["parallel.pipeline 4", "model.num_layers 3", "use fewer stages"],
    ),
    "layers of another number of stages": (
        {"parallel.pipeline": 2, "parallel.pipeline_layers": [1, 1, 1]},
        2,
        ["parallel.pipeline_layers [1, 1, 1]", "parallel.pipeline is 2", "make the two agree"],
    ),
    "layers of the stages are too few": (
        {"parallel.pipeline": 2, "parallel.pipeline_layers": [1, 1]},
        2,
        ["parallel.pipeline_layers [1, 1]", "model.num_layers 3", "3 in all"],
    ),
    "a stage without layers": (
        {"parallel.pipeline": 2, "parallel.pipeline_layers": [3, 0]},
        2,
        ["parallel.pipeline_layers [3, 0]", "at least one layer"],
    ),
    "too few micro-batches for the stages": (
        {"parallel.pipeline": 2, "training.global_batch_size": 2},
        4,
        ["training.global_batch_size 2", "1 micro-batches a rank", "a multiple of 4"],
    ),
    "micro-batches that do not fill the stages": (
        {"parallel.pipeline": 3, "training.global_batch_size": 4},
        3,
        ["training.global_batch_size 4", "in groups of 3", "a multiple of 3"],
    ),
    "micro-batch group below the stages": (
        {"parallel.pipeline": 2, TRANSFORMER: {"microbatch_group_size_per_vp_stage": 1}},
        2,
        ["microbatch_group_size_per_vp_stage 1", "parallel.pipeline 2", "at least that"],
    ),
    "uneven context": (
        {"parallel.context": 2, "data.sequence_length": 25},
        2,
        ["data.sequence_length 25", "parallel.context 2", "a multiple of 2"],
    ),
    "context with sequence parallelism": (
        {
            "parallel.context": 2,
            "parallel.tensor": 2,
            "parallel.sequence": True,
            "data.sequence_length": 26,
        },
        4,
        ["data.sequence_length 26", "parallel.context 2", "a multiple of 4"],
    ),
    "context of too few tokens": (
        {"parallel.context": 4, "data.sequence_length": 8},
        4,
        ["parallel.context 4", "2 tokens a rank", "model.gdn.conv_size 4", "use fewer ranks"],
    ),
    "fp8 of fp32 weights": (
        {"precision.fp8": "current", "precision.dtype": "fp32"},
        1,
        ["precision.fp8 current", "precision.dtype is fp32", "set it to auto or bf16"],
    ),
    "fp8 of a narrow layer": (
        {"precision.fp8": "delayed", "model.hidden_size": 40, "model.num_heads": 2},
        1,
        ["precision.fp8 delayed", "residual stream is 40", "multiple of 16", "model.hidden_size"],
    ),
    "fp8 over tensor-parallel ranks": (
        {"precision.fp8": "current", "parallel.tensor": 2},
        2,
        ["precision.fp8 current", "parallel.tensor 2", "precision.fp8 none"],
    ),
    "fp8 of a mixer's rows": (
        {"precision.fp8": "block", "model.gdn.num_heads": 3, "data.sequence_length": 16},
        1,
        ["the projection of model.gdn is", "multiple of 16", "model.gdn.num_heads"],
    ),
    "experts": (
        {TRANSFORMER: {"num_moe_experts": 4}},
        1,
        ["megatron.transformer.num_moe_experts 4", "leave it out"],
    ),
    "width and heads": (
        {"model.hidden_size": 33},
        1,
        ["model.hidden_size 33", "model.num_heads 4", "set model.head_dim"],
    ),
    "key/value heads": (
        {"model.num_kv_heads": 3},
        1,
        ["model.num_heads 4", "model.num_kv_heads 3", "choose a divisor of 4"],
    ),
    "odd head": (
        {"model.head_dim": 7},
        1,
        ["attention head dimension is 7", "set model.head_dim"],
    ),
    "unknown mixer": (
        {"model.pattern": "gdn+mamba"},
        1,
        ["model.pattern 'gdn+mamba'", "'mamba'", "known are full, window, nsa, dsa, gdn"],
    ),
    "length of a list": (
        {"model.pattern": ["gdn", "full"]},
        1,
        ["model.pattern lists 2", "model.num_layers 3", "make the two equal"],
    ),
    "odd keys": ({"model.gdn.head_k_dim": 5}, 1, ["5 key channels", "set model.gdn.head_k_dim"]),
    "odd values": (
        {"model.gdn.head_v_dim": 9},
        1,
        ["9 value channels", "set model.gdn.head_v_dim"],
    ),
    "wide keys": (
        {"model.gdn.head_k_dim": 258},
        1,
        ["258 key channels", "set model.gdn.head_k_dim or use more heads"],
    ),
    "ranks": (
        {"parallel.tensor": 2},
        3,
        ["3 ranks", "parallel.tensor 2", "start a multiple of 2"],
    ),
    "sequence without tensor": (
        {"parallel.sequence": True},
        1,
        ["parallel.sequence true", "parallel.tensor of 2 or more", "set it to false"],
    ),
    "tensor and heads": (
        {"parallel.tensor": 4, "model.pattern": "full"},
        4,
        ["model.num_kv_heads 2", "parallel.tensor 4", "choose a tensor-parallel size"],
    ),
    "tensor and linear heads": (
        {"parallel.tensor": 2, "model.gdn.num_heads": 3},
        2,
        ["model.gdn.num_heads 3", "parallel.tensor 2", "choose a tensor-parallel size"],
    ),
    "tensor and ffn": (
        {"parallel.tensor": 2, "model.ffn_hidden_size": 47},
        2,
        ["model.ffn_hidden_size 47", "parallel.tensor 2", "choose a multiple"],
    ),
    "sequence shards": (
        {"parallel.tensor": 2, "parallel.sequence": True, "data.sequence_length": 25},
        2,
        ["data.sequence_length 25", "parallel.tensor 2", "choose a multiple"],
    ),
    "batch": (
        {"training.global_batch_size": 6, "training.micro_batch_size": 2},
        2,
        [
            "training.global_batch_size 6",
            "training.micro_batch_size 2",
            "2 data-parallel ranks",
            "choose a multiple of 4",
        ],
    ),
    "warm-up": (
        {"optimizer.warmup_steps": 10},
        1,
        ["optimizer.warmup_steps 10", "training.steps 10", "make it smaller"],
    ),
    "decay": (
        {"optimizer.schedule": "wsd", "optimizer.warmup_steps": 4, "optimizer.decay_steps": 7},
        1,
        ["optimizer.decay_steps 7", "training.steps 10", "4 warm-up steps", "make it smaller"],
    ),
    "final rate": (
        {"optimizer.min_lr": 0.5},
        1,
        ["optimizer.min_lr 0.5", "optimizer.lr 0.01", "lower it"],
    ),
    "no data": ({"data.path": []}, 1, ["data.path is empty", "pass --data.path PREFIX"]),
    "number of weights": (
        {"data.weights": [0.5, 0.5]},
        1,
        ["data.weights has 2", "1 prefixes", "give one a prefix"],
    ),
    "zero weight": (
        {"data.path": ["a", "b"], "data.weights": [1.0, 0.0]},
        1,
        ["data.weights [1.0, 0.0]", "greater than 0"],
    ),
    "two shares": ({"data.split": "98,2"}, 1, ["data.split '98,2'", "write it like '98,2,0'"]),
    "no numbers": ({"data.split": "a,b,c"}, 1, ["data.split 'a,b,c'", "write it like '98,2,0'"]),
    "negative share": (
        {"data.split": "98,-2,4"},
        1,
        ["data.split '98,-2,4'", "write it like '98,2,0'"],
    ),
    "no training part": (
        {"data.split": "0,98,2"},
        1,
        ["data.split '0,98,2'", "write it like '98,2,0'"],
    ),
    "no validation part": (
        {"data.split": "98,0,2", "training.eval_batches": 1},
        1,
        ["data.split '98,0,2'", "training.eval_batches 0"],
    ),
}


# Mixer, its settings, parts of the message; the fix comes last.
PROBLEMS = {
    "gdn steps": ("gdn", {"dt_min": 0.2}, ["model.gdn.dt_min 0.2", "dt_max 0.1", "swap them"]),
    "kda steps": ("kda", {"dt_max": 1e-4}, ["model.kda.dt_min 0.001", "dt_max 0.0001", "swap"]),
    "kda decays": ("kda", {"a_init_min": 20.0}, ["model.kda.a_init_min 20.0", "16.0", "swap them"]),
    "mamba2 steps": ("mamba2", {"dt_min": 0.2}, ["model.mamba2.dt_min 0.2", "0.1", "swap them"]),
    "mamba2 decays": ("mamba2", {"a_init_max": 0.5}, ["a_init_min 1.0", "a_init_max 0.5", "swap"]),
    "mamba2 groups": (
        "mamba2",
        {"groups": 3},
        ["model.mamba2.groups 3", "does not divide 4 heads", "choose a divisor"],
    ),
    "linear signs": (
        "linear",
        {"normalize": True, "feature_map": "silu"},
        ["model.linear.feature_map 'silu'", "normalize", "use elu1, relu, softmax or turn"],
    ),
    "mlstm biases": (
        "mlstm",
        {"forget_bias_min": 9.0},
        ["model.mlstm.forget_bias_min 9.0", "forget_bias_max 6.0", "swap them"],
    ),
    "hgrn2 bound": ("hgrn2", {"lower_bound": 1.0}, ["model.hgrn2.lower_bound 1.0", "choose one"]),
    "hgrn2 negative bound": ("hgrn2", {"lower_bound": -0.1}, ["lower_bound -0.1", "from 0 to"]),
}


def _with_mixer(mixer, settings, **changes):
    named = {f"model.{mixer}.{name}": value for name, value in settings.items()}
    return _with({"model.pattern": mixer, **named, **changes})


@pytest.mark.parametrize("name", PROBLEMS)
def test_settings_of_a_mixer_that_contradict_each_other(name):
    mixer, settings, parts = PROBLEMS[name]
    with pytest.raises(ConfigError) as caught:
        check_config(_with_mixer(mixer, settings), 1)
    message = str(caught.value)
    assert message.startswith(f"model.{mixer}.") and "\n" not in message
    for part in parts:
        assert part in message, message
    # A mixer that no layer uses may be set to anything.
    check_config(_with_mixer(mixer, settings, **{"model.pattern": "full"}), 1)


def test_every_mixer_that_can_have_a_problem_is_tested():
    base = RecurrentMixer.problem
    able = {name for name in RECURRENT if recurrent_mixer(name).problem is not base}
    assert able == {mixer for mixer, _, _ in PROBLEMS.values()}


@pytest.mark.parametrize("mixer", RECURRENT)
@pytest.mark.parametrize(
    "setting, value, parts",
    [
        ("head_k_dim", 5, ["gives 5 key channels a head", "set model.{}.head_k_dim"]),
        ("head_v_dim", 7, ["gives 7 value channels a head", "set model.{}.head_v_dim"]),
        ("head_k_dim", 258, ["gives 258 key channels a head", "at most 256"]),
    ],
)
def test_channels_that_the_kernels_do_not_take(mixer, setting, value, parts):
    with pytest.raises(ConfigError) as caught:
        check_config(_with_mixer(mixer, {setting: value}), 1)
    message = str(caught.value)
    for part in (f"model.{mixer} ", *parts):
        assert part.format(mixer) in message
    check_config(_with_mixer(mixer, {setting: 256}), 1)


def test_heads_too_many_for_the_width():
    with pytest.raises(ConfigError, match="model.gla gives 0 key channels a head"):
        check_config(_with_mixer("gla", {"num_heads": 20}), 1)


@pytest.mark.parametrize("mixer", RECURRENT)
def test_tensor_parallelism_must_divide_the_heads_of_every_mixer(mixer):
    two_ranks = {"parallel.tensor": 2}
    settings = {"num_heads": 3, "head_k_dim": 8, "head_v_dim": 8}
    settings |= {"groups": 1} if mixer == "mamba2" else {}
    check_config(_with_mixer(mixer, settings), 2)
    check_config(_with_mixer(mixer, {**settings, "num_heads": 4}, **two_ranks), 2)
    with pytest.raises(ConfigError) as caught:
        check_config(_with_mixer(mixer, settings, **two_ranks), 2)
    assert str(caught.value) == (
        f"model.{mixer}.num_heads 3 is not divisible by parallel.tensor 2; "
        "choose a tensor-parallel size that divides it"
    )


@pytest.mark.parametrize(
    "mixer, settings, named, rows",
    [
        (
            "mamba2",
            {"head_k_dim": 6, "groups": 1},
            "model.mamba2.groups x model.mamba2.head_k_dim",
            6,
        ),
        ("kda", {"rank": 6}, "model.kda.rank", 6),
        ("gla", {"rank": 10}, "model.gla.rank", 10),
    ],
)
def test_tensor_parallelism_must_divide_what_heads_share(mixer, settings, named, rows):
    four_ranks = {"parallel.tensor": 4, "model.num_kv_heads": 4}
    with pytest.raises(ConfigError) as caught:
        check_config(_with_mixer(mixer, settings, **four_ranks), 4)
    assert str(caught.value) == (
        f"{named} {rows} is not divisible by parallel.tensor 4; choose a tensor-parallel size "
        "that divides it"
    )
    check_config(_with_mixer(mixer, settings, **{"parallel.tensor": 2}), 2)


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_names_setting_value_and_fix(name):
    changes, ranks, parts = REFUSALS[name]
    with pytest.raises(ConfigError) as caught:
        check_config(_with(changes), ranks)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    "changes, ranks",
    [
        ({"model.hidden_size": 33, "model.head_dim": 8, "model.gdn.head_k_dim": 6}, 1),
        ({"model.pattern": "full", "model.gdn.head_k_dim": 5}, 1),
        ({"model.pattern": "mlstm", "model.mlstm.gate_cap": None}, 1),
        ({"model.pattern": "mlstm", "model.mlstm.input_bias": -3.0}, 1),
        ({"model.pattern": "linear", "model.linear.feature_map": "silu"}, 1),
        ({"model.pattern": "mamba2", "model.mamba2.groups": 4, "parallel.tensor": 4}, 4),
        ({"model.pattern": "hgrn2", "model.hgrn2.lower_bound": 0.9}, 1),
        ({"parallel.tensor": 2, "parallel.sequence": True}, 4),
        ({"parallel.pipeline": 2}, 4),
        ({"parallel.pipeline": 2, "parallel.pipeline_layers": [1, 2]}, 2),
        ({"parallel.pipeline": 3, "model.loops": 1}, 3),
        (
            {
                "parallel.pipeline": 2,
                "training.global_batch_size": 5,
                TRANSFORMER: {"microbatch_group_size_per_vp_stage": 3},
            },
            2,
        ),
        ({"parallel.tensor": 2, "model.pattern": "full", "model.gdn.num_heads": 3}, 2),
        ({"optimizer.schedule": "wsd", "optimizer.warmup_steps": 4, "optimizer.decay_steps": 6}, 1),
        ({"data.split": "98,0,2", "training.eval_batches": 0}, 1),
        ({"data.path": ["a", "b"], "data.weights": [1.0, 3.0]}, 1),
        ({TRANSFORMER: {"fp8": None, "deterministic_mode": False}}, 1),
    ],
)
def test_what_looks_similar_but_works_passes(changes, ranks):
    check_config(_with(changes), ranks)


def test_fp8_needs_a_gpu_that_has_it():
    check_fp8_device("none")
    with pytest.raises(ConfigError, match="precision.fp8 current needs a GPU .* no GPU here"):
        check_fp8_device("current")


def test_data_is_only_needed_for_training():
    check_config(_with({"data.path": []}), 1, need_data=False)


def test_stages_share_the_layers_evenly_or_as_told():
    assert ParallelConfig(pipeline=4).stage_layers(10) == [3, 3, 2, 2]
    assert ParallelConfig(pipeline=2).stage_layers(4) == [2, 2]
    assert ParallelConfig(pipeline=2, pipeline_layers=[1, 3]).stage_layers(4) == [1, 3]


def test_data_parallel_size_is_what_tensor_parallelism_leaves():
    assert data_parallel_size(_with({"parallel.tensor": 2}), 6) == 3
    assert data_parallel_size(tiny_config(), 5) == 5


def test_a_model_without_attention_needs_no_attention_heads():
    odd = {"model.hidden_size": 30, "model.num_heads": 4, "model.num_kv_heads": 3}
    heads = {"num_heads": 2, "head_k_dim": 8, "head_v_dim": 8}
    check_config(_with_mixer("gdn", heads, **odd), 1)
    with pytest.raises(ConfigError, match="model.hidden_size 30 is not divisible"):
        check_config(_with_mixer("gdn", heads, **odd, **{"model.pattern": "gdn+full"}), 1)


def test_a_pattern_longer_than_the_model_is_refused_if_a_mixer_gets_lost():
    with pytest.raises(ConfigError, match="so that full gets no layer"):
        check_config(_with({"model.pattern": "8*gdn+full", "model.num_layers": 4}), 1)
    check_config(_with({"model.pattern": "3*gdn+full", "model.num_layers": 6}), 1)


@pytest.mark.parametrize(
    "sizes, said",
    [
        ({"parallel.context": 3}, "model.gdn.num_heads 4 over parallel.context 3 ranks"),
        (
            {"parallel.context": 2, "parallel.tensor": 4},
            "model.gdn.num_heads 4 over parallel.tensor 4 x parallel.context 2 ranks",
        ),
        ({"parallel.context": 4}, None),
        ({"parallel.context": 2, "parallel.tensor": 2}, None),
    ],
)
def test_exchanging_heads_needs_heads_that_the_ranks_divide(sizes, said):
    ways = 1
    for size in sizes.values():
        ways *= size
    given = {"parallel.context_exchange": "heads", "data.sequence_length": 96, **sizes}
    heads = {"num_heads": 4, "head_k_dim": 8, "head_v_dim": 8}
    config = _with_mixer("gdn", heads, **given)
    if said is None:
        check_config(config, ways)
        return
    with pytest.raises(ConfigError, match="parallel.context_exchange 'heads' cannot spread") as no:
        check_config(config, ways)
    assert said in str(no.value) and "use 'state'" in str(no.value)
