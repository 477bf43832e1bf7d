"""Settings of a distillation: what a file may say, what each stage becomes, and the recipes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.load import to_yaml
from megatron_lt2.config.schema import AttentionConfig, ModelConfig, RopeConfig, RunConfig
from megatron_lt2.distill.__main__ import main
from megatron_lt2.distill.load import load_settings
from megatron_lt2.distill.plan import PATTERN, even_layers, plan_stages

CONFIGS = Path(__file__).resolve().parents[2] / "launchers" / "configs"
NO_GATE = AttentionConfig(output_gate=False)
LLAMA = {"pattern": "full", "loops": 1, "loop_residual": "none", "attention": NO_GATE}
SMOLLM2 = {"vocab_size": 49152, "norm_eps": 1e-5, **LLAMA}
TEACHERS = {
    "linearize_smollm2_135m_gdn": ModelConfig(
        num_layers=30, hidden_size=576, num_heads=9, num_kv_heads=3, ffn_hidden_size=1536,
        rope=RopeConfig(theta=1e5), **SMOLLM2,
    ),
    "linearize_smollm2_360m_gdn": ModelConfig(
        num_layers=32, hidden_size=960, num_heads=15, num_kv_heads=5, ffn_hidden_size=2560,
        rope=RopeConfig(theta=1e5), **SMOLLM2,
    ),
    "linearize_smollm2_1b7_gdn": ModelConfig(
        num_layers=24, hidden_size=2048, num_heads=32, num_kv_heads=32, ffn_hidden_size=8192,
        rope=RopeConfig(theta=1.3e5), **SMOLLM2,
    ),
    "distill_ouro_1b4_hybrid": ModelConfig(
        num_layers=24, hidden_size=2048, num_heads=16, ffn_hidden_size=5632, vocab_size=49152,
        norm_mode="sandwich", inter_loop_norm=True, exit_gate=True, tie_embeddings=False,
        rope=RopeConfig(theta=1e6), **{**LLAMA, "loops": 4},
    ),
}  # fmt: skip


def write_teacher(folder: Path, model: ModelConfig) -> Path:
    """What a dry run reads of a teacher: its architecture."""
    iteration = folder / "checkpoints" / "iter_0000000"
    iteration.mkdir(parents=True)
    config = RunConfig(model=model)
    (iteration / "run_config.yaml").write_text(to_yaml(config))
    size = (iteration / "run_config.yaml").stat().st_size
    manifest = {"step": 0, "tokens": 0, "files": {"run_config.yaml": size}}
    (iteration / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    model = ModelConfig(num_layers=8, hidden_size=32, num_heads=4, num_kv_heads=2, vocab_size=61)
    for name, value in LLAMA.items():
        setattr(model, name, value)
    return write_teacher(tmp_path / "teacher", model)


def _file(folder: Path, teacher: Path, stages: list[dict], **more) -> Path:
    path = folder / "distill.yaml"
    values = {"teacher": str(teacher), "run_dir": str(folder / "run"), "stages": stages, **more}
    path.write_text(yaml.safe_dump(values))
    return path


REFUSED = {
    "no stages": ({"stages": []}, "stages is empty"),
    "kind": ({"stages": [{"kind": "mixers"}]}, "stages.0.kind cannot take 'mixers'; give 'mixer'"),
    "key": ({"stages": [{"kind": "mixer", "los": {}}]}, "stages.0.los (did you mean loss?)"),
    "nothing": (
        {"stages": [{"kind": "logits", "loss": {"kl": 0.0}}]},
        "stages.0.loss: ce 0 and kl 0 leave nothing to minimise",
    ),
    "support": (
        {"stages": [{"kind": "logits", "loss": {"top_k": 8, "over": "support"}}]},
        "stages.0.loss.over 'support' leaves all but 8 tokens",
    ),
    "two lengths": (
        {"stages": [{"kind": "mixer", "tokens": "1e6", "training": {"steps": 3}}]},
        "stages.0: tokens and training.steps both say its length",
    ),
    "chat": ({"stages": [{"kind": "sft"}]}, "stages.0.chat.train is empty"),
    "type": (
        {"stages": [{"kind": "mixer", "training": {"steps": "x"}}]},
        "training.steps cannot take",
    ),
    "pipeline": (
        {"stages": [{"kind": "mixer"}], "parallel": {"pipeline": 2}},
        "parallel.pipeline 2 is not served",
    ),
    "model": (
        {"stages": [{"kind": "mixer"}], "student": {"model": {"norm_mode": "sandwich"}}},
        "student.model.norm_mode 'sandwich' is not the teacher's 'pre'",
    ),
    "loops": (
        {"stages": [{"kind": "mixer"}], "student": {"loops": 3}},
        "student.loops 3: the teacher has 8 layers and 1 loops",
    ),
    "top_k": (
        {"stages": [{"kind": "logits", "loss": {"top_k": 62}}]},
        "loss.top_k 62 is more than the vocabulary 61",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str, teacher: Path, tmp_path: Path) -> None:
    changes, message = REFUSED[name]
    path = _file(tmp_path, teacher, **changes)
    with pytest.raises(ConfigError) as caught:
        plan_stages(load_settings(str(path)))
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_refusal_names_its_stage(
    teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = [{"kind": "mixer"}, {"kind": "logits", "optimizer": {"warmup_steps": 2000}}]
    path = _file(tmp_path, teacher, stages)
    assert main(["--config", str(path), "--dry-run"]) == 2
    said = "error: stages.1 (logits): optimizer.warmup_steps 2000 leaves nothing"
    assert capsys.readouterr().err.startswith(said)


def test_a_missing_teacher_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _file(tmp_path, tmp_path / "nowhere", [{"kind": "mixer"}])
    assert main(["--config", str(path), "--dry-run"]) == 2
    assert capsys.readouterr().err.startswith(f"error: teacher {tmp_path / 'nowhere'}: no complete")


def test_stages_override_what_stands_at_the_top(teacher: Path, tmp_path: Path) -> None:
    stages = [
        {"kind": "mixer", "tokens": "1e4", "optimizer": {"lr": 0.01}},
        {"kind": "logits", "parallel": {"tensor": 2}},
    ]
    top = {"data": {"sequence_length": 64}, "training": {"global_batch_size": 8, "steps": 7}}
    path = _file(tmp_path, teacher, stages, **top)
    first, second = plan_stages(
        load_settings(str(path), ["--stages.1.loss.kl=2", "--data.path", "p"])
    )
    assert (first.config.training.steps, second.config.training.steps) == (20, 7)
    assert first.config.optimizer.lr == 0.01 and second.config.optimizer.lr == 3e-4
    assert second.config.parallel.tensor == 2 and second.settings.loss.kl == 2
    assert first.config.data.path == "p" and second.before == first.folder
    assert first.config.model.gdn.head_k_dim == first.config.model.gdn.head_v_dim == 8
    assert first.config.model.num_kv_heads == 2 and first.config.model.rope == RopeConfig()


def test_a_selection_decides_about_the_stages_behind_it(teacher: Path, tmp_path: Path) -> None:
    stages = [{"kind": "mixer"}, {"kind": "select"}, {"kind": "logits"}]
    settings = load_settings(str(_file(tmp_path, teacher, stages)))
    known = plan_stages(settings)
    assert [stage.settings.kind for stage in known] == ["mixer", "select"]
    assert even_layers(known[1]) == [3, 7]
    assumed = plan_stages(settings, assume=True)[2].mixers
    assert assumed == ["gdn"] * 3 + ["full"] + ["gdn"] * 3 + ["full"]
    known[1].folder.mkdir(parents=True)
    pattern = ["full"] * 2 + ["gdn"] * 6
    (known[1].folder / PATTERN).write_text(yaml.safe_dump({"pattern": pattern}))
    assert plan_stages(settings)[2].mixers == pattern


@pytest.mark.parametrize("name", TEACHERS)
def test_recipes_pass_the_dry_run_and_the_planner(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the true shapes; a selection is assumed."""
    from megatron_lt2.plan import main as plan

    teacher = write_teacher(tmp_path / "teacher", TEACHERS[name])
    argv = ["--config", str(CONFIGS / f"{name}.yaml"), "--teacher", str(teacher)]
    ranks = "1" if "135m" in name or "360m" in name else "8"
    assert main([*argv, "--dry-run", "--world-size", ranks]) == 0
    out = capsys.readouterr().out
    settings = load_settings(argv[1], argv[2:])
    stages = plan_stages(settings, assume=True)
    assert out.count("\nstage ") + 1 == len(stages) == len(settings.stages)
    assert settings.run_dir == f"runs/{name}"
    kept = stages[-1].mixers.count("full")
    assert kept == round(TEACHERS[name].num_layers / 4)
    resolved = tmp_path / "stage.yaml"
    stages[-1].config.data.path = "corpus"
    resolved.write_text(to_yaml(stages[-1].config))
    assert plan(["--config", str(resolved), "--gpus", ranks]) == 0


def test_every_recipe_is_tried() -> None:
    found = {p.stem for p in CONFIGS.glob("*.yaml") if p.stem.startswith(("distill", "linearize"))}
    assert found == set(TEACHERS)


def test_the_script_shows_its_stages_and_writes_nothing(tmp_path: Path) -> None:
    teacher = write_teacher(tmp_path / "teacher", TEACHERS["distill_ouro_1b4_hybrid"])
    here = tmp_path / "here"
    here.mkdir()
    shown = subprocess.run(
        ["bash", str(CONFIGS.parent / "distill_ouro.sh"), "--stages.0.tokens", "2e8"],
        cwd=here,
        env={
            **os.environ,
            **{"LT2_VENV": sys.prefix, "CUDA_VISIBLE_DEVICES": "", "LT2_DRY_RUN": "1"},
            **{"LT2_NPROC": "8", "TEACHER": str(teacher), "DATA_PATH": "corpus"},
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert "stage 0 mixer (mixer) -> runs/distill_ouro_1b4_hybrid/stages/00-mixer" in shown.stdout
    command = "-m megatron_lt2.tools.spawn --nproc 8 -- -m megatron_lt2.distill --config"
    assert command in shown.stdout and "--data.path corpus" in shown.stdout
    assert list(here.iterdir()) == []
