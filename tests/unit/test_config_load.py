"""Loading a run configuration: which layer wins, and one readable line for every mistake."""

from dataclasses import replace

import pytest

from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.load import (
    build_parser,
    dotted_names,
    fail,
    load_config,
    load_saved,
    to_yaml,
)
from megatron_lt2.config.mixers import GDNConfig
from megatron_lt2.config.schema import OptimizerConfig, RunConfig


@pytest.fixture
def yaml_file(tmp_path):
    def write(text, name="run.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def _message(argv):
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_defaults_are_the_schema():
    assert load_config([]) == RunConfig()


def test_precedence_with_the_same_dotted_names(yaml_file, monkeypatch):
    path = yaml_file("model:\n  loops: 2\n  num_layers: 5\n  num_heads: 8\n  hidden_size: 64\n")
    monkeypatch.setenv("LT2_MODEL__LOOPS", "3")
    monkeypatch.setenv("LT2_MODEL__NUM_LAYERS", "6")
    model = load_config(["--config", path, "--model.loops", "7"]).model
    assert (model.loops, model.num_layers, model.num_heads) == (7, 6, 8)
    assert model.norm_eps == RunConfig().model.norm_eps
    monkeypatch.delenv("LT2_MODEL__NUM_LAYERS")
    assert load_config([f"--config={path}"]).model.num_layers == 5
    assert load_config([]).model.num_layers == RunConfig().model.num_layers


def test_the_config_file_can_come_from_the_environment(yaml_file, monkeypatch):
    monkeypatch.setenv("LT2_CONFIG", yaml_file("model:\n  loops: 2\n"))
    assert load_config([]).model.loops == 2
    other = yaml_file("model:\n  loops: 3\n", "other.yaml")
    assert load_config(["--config", other]).model.loops == 3


def test_a_nested_section_keeps_its_other_defaults(yaml_file, monkeypatch):
    path = yaml_file("model:\n  gdn:\n    conv_size: 3\n")
    monkeypatch.setenv("LT2_MODEL__GDN__HEAD_V_DIM", "9")
    gdn = load_config(["--config", path, "--model.gdn.head_k_dim", "6"]).model.gdn
    assert gdn == GDNConfig(conv_size=3, head_v_dim=9, head_k_dim=6)


def test_empty_file_changes_nothing(yaml_file):
    assert load_config(["--config", yaml_file("# nothing yet\n")]) == RunConfig()


@pytest.mark.parametrize(
    "text, key, nearest",
    [
        ("model:\n  loop: 3\n", "model.loop", "loops"),
        ("model:\n  gdn:\n    conv_sise: 3\n", "model.gdn.conv_sise", "conv_size"),
        ("optimiser:\n  lr: 1\n", "optimiser", "optimizer"),
    ],
)
def test_unknown_key_names_file_key_and_nearest(yaml_file, text, key, nearest):
    path = yaml_file(text)
    assert _message(["--config", path]) == f"{path}: unknown key {key} (did you mean {nearest}?)"


def test_unknown_key_without_a_near_one_lists_what_there_is(yaml_file):
    path = yaml_file("model:\n  zzz: 3\n")
    message = _message(["--config", path])
    assert message.startswith(f"{path}: unknown key model.zzz (known: num_layers, ")


@pytest.mark.parametrize(
    "text, wording",
    [
        ("model:\n", "model is a section, got None"),
        ("model: gdn\n", "model is a section, got 'gdn'"),
        ("- model\n", "a config file holds sections such as 'model:', not a list"),
    ],
)
def test_a_section_must_be_a_section(yaml_file, text, wording):
    path = yaml_file(text)
    assert _message(["--config", path]) == f"{path}: {wording}"


def test_broken_yaml_names_the_line(yaml_file):
    path = yaml_file("model:\n  loops: 2\n  pattern: [gdn\ntraining:\n  steps: 3\n")
    assert _message(["--config", path]).startswith(f"{path}:4: not valid YAML (")


def test_unreadable_files(tmp_path):
    missing = tmp_path / "absent.yaml"
    assert _message(["--config", str(missing)]).startswith(f"{missing}: cannot read")
    binary = tmp_path / "model.bin"
    binary.write_bytes(b"\xff\xfe\x00")
    assert _message(["--config", str(binary)]).startswith(f"{binary}: cannot read")
    assert "--config needs a file name" in _message(["--config"])


@pytest.mark.parametrize(
    "option, nearest",
    [
        ("--model.lops", "--model.loops"),
        ("--training.step", "--training.steps"),
        # What argparse would take for an abbreviation.
        ("--model.num_l", "--model.num_layers"),
    ],
)
def test_unknown_option_names_the_nearest(option, nearest):
    assert _message([option, "3"]) == f"unknown option {option} (did you mean {nearest}?)"


@pytest.mark.parametrize(
    "setting, value",
    [
        ("model.loops", "many"),
        ("model.loss", "nothing"),
        ("training.stop_step", "4.5"),
        ("optimizer.betas", "0.9"),
        ("optimizer.lr", "fast"),
        ("checkpoint.resume", "perhaps"),
    ],
)
def test_wrong_type_names_setting_and_value(yaml_file, monkeypatch, setting, value):
    section, name = setting.split(".")
    path = yaml_file(f"{section}:\n  {name}: {value}\n")
    message = _message(["--config", path])
    assert message.startswith(f"{path}: {setting} cannot take {value!r}; give ")
    message = _message([f"--{setting}", value])
    assert message.startswith(f"{setting} cannot take {value!r}; give ")
    monkeypatch.setenv(f"LT2_{section}__{name}".upper(), value)
    message = _message([])
    assert message.startswith(f"{setting} cannot take {value!r}; give ")


def test_unknown_environment_variable(monkeypatch):
    monkeypatch.setenv("LT2_MODEL__LOPS", "3")
    assert _message([]) == (
        "environment variable LT2_MODEL__LOPS is no setting (did you mean LT2_MODEL__LOOPS?)"
    )


def test_variables_that_are_no_settings_are_left_alone(monkeypatch):
    monkeypatch.setenv("LT2_FORCE_CPU", "1")
    monkeypatch.setenv("OTHER_MODEL__LOPS", "3")
    assert load_config([]) == RunConfig()


def test_data_path_may_be_one_string_or_a_list(monkeypatch):
    assert load_config(["--data.path", "corpus"]).data.prefixes == ["corpus"]
    assert load_config(["--data.path", "[a, b]"]).data.prefixes == ["a", "b"]
    monkeypatch.setenv("LT2_DATA__PATH", "[c, d]")
    assert load_config([]).data.prefixes == ["c", "d"]


def test_pattern_may_be_a_string_or_a_list():
    assert load_config(["--model.pattern", "2*gdn+full"]).model.pattern == "2*gdn+full"
    assert load_config(["--model.pattern", "[gdn, full]"]).model.pattern == ["gdn", "full"]


def test_betas_are_a_tuple_from_every_layer(yaml_file, monkeypatch):
    path = yaml_file("optimizer:\n  betas: [0.8, 0.9]\n")
    assert load_config(["--config", path]).optimizer.betas == (0.8, 0.9)
    assert load_saved(path).optimizer.betas == (0.8, 0.9)
    monkeypatch.setenv("LT2_OPTIMIZER__BETAS", "[0.7, 0.8]")
    assert load_config(["--config", path]).optimizer.betas == (0.7, 0.8)
    argv = ["--config", path, "--optimizer.betas", "[0.6, 0.7]"]
    assert load_config(argv).optimizer.betas == (0.6, 0.7)


def test_saved_config_reads_back_equal(tmp_path, monkeypatch):
    config = replace(
        RunConfig(),
        run_dir="a folder: with punctuation",
        optimizer=OptimizerConfig(lr=3e-4, min_lr=1e-05, betas=(0.8, 0.99), eps=1e-8),
    )
    config.model.pattern = ["gdn"] * config.model.num_layers
    config.model.gdn.head_k_dim = 6
    config.data.path, config.data.weights = ["a", "b"], [0.25, 0.75]
    config.megatron.transformer = {
        "deterministic_mode": False,
        "microbatch_group_size_per_vp_stage": 2,
    }
    config.memory.recompute_layers = 0.25
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    # A saved config is what was run: the shell of the reader changes nothing.
    monkeypatch.setenv("LT2_MODEL__LOOPS", "9")
    assert load_saved(path) == config
    monkeypatch.delenv("LT2_MODEL__LOOPS")
    assert load_config(["--config", str(path)]) == config


def test_load_saved_is_strict(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(RunConfig()).replace("loops:", "lops:"))
    with pytest.raises(ConfigError, match=r"unknown key model\.lops \(did you mean loops\?\)"):
        load_saved(path)
    with pytest.raises(ConfigError, match="cannot read"):
        load_saved(tmp_path / "absent.yaml")


def test_help_shows_every_setting_and_the_text_of_its_field(capsys):
    with pytest.raises(SystemExit) as caught:
        load_config(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for name in dotted_names(RunConfig):
        assert f"--{name}" in shown, name
    words = " ".join(shown.split())
    assert "T: how often the whole stack runs, with the same weights." in words
    # A text of two lines arrives whole.
    assert "W_g zero at the start (Qiu et al. 2025, gate" in words
    assert "LT2_MODEL__LOOPS" in words


def test_parser_offers_exactly_the_settings_of_the_schema():
    defaults = build_parser("test", "").get_defaults()
    for name in dotted_names(RunConfig):
        assert name in defaults, name


def test_fail_prints_one_line_and_gives_the_code_of_a_users_mistake(capsys):
    assert fail(ConfigError("model.loops is 0")) == 2
    assert capsys.readouterr().err == "error: model.loops is 0\n"
