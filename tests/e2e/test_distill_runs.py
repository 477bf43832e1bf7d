"""Whole distillations of tiny teachers: stages, selection, interruptions, export."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml

from checkpoints_tools.convert import main as convert
from checkpoints_tools.plain_checkpoint import PlainCheckpoint
from tests.e2e.runs import records
from tests.hf_folders import OURO, llama_folder, ouro_folder
from tests.ranks import run_ranks

VOCAB = 304
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def teachers(data, tmp_path_factory):
    """Folder with the imported teachers llama/, ouro/ and ouro_chat/ (other weights), conversations
    and a tokenizer with a chat template."""
    folder = tmp_path_factory.mktemp("teachers")
    tokenizer = folder / "tokenizer"
    shutil.copytree(data / "tokenizer", tokenizer)
    (tokenizer / "chat_template.jinja").write_text(TEMPLATE)
    shape = replace(OURO, vocab_size=VOCAB)
    llama_folder(folder / "hf_llama", vocab=VOCAB)
    ouro_folder(folder / "hf_ouro", shape)
    ouro_folder(folder / "hf_ouro_chat", shape)
    for name in ("llama", "ouro", "ouro_chat"):
        source, run = folder / f"hf_{name}", folder / name
        argv = ["import", "--source", source, "--output", run, "--tokenizer", tokenizer]
        assert convert([str(a) for a in argv]) == 0
    lines = []
    for i in range(40):
        turns = [("user", f"What is {i}?"), ("assistant", f"The value is {i}.")] * (1 + i % 2)
        messages = [{"role": role, "content": text} for role, text in turns]
        lines.append(json.dumps({"messages": messages}))
    (folder / "chat.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def _settings(teachers, data, run, stages, teacher="llama"):
    """A distillation as a file; returns its path."""
    values = {
        "teacher": str(teachers / teacher),
        "run_dir": str(run),
        "student": {"pattern": "gdn"},
        "data": {
            **{"path": str(data / "corpus"), "tokenizer": str(teachers / "tokenizer")},
            **{"sequence_length": 32, "split": "80,20,0", "num_workers": 0},
        },
        "training": {
            **{"global_batch_size": 4, "micro_batch_size": 2, "seed": 3},
            **{"eval_interval": 0, "eval_batches": 1},
        },
        "logging": {"interval": 1, "tensorboard": False},
        "checkpoint": {"interval": 0, "async_save": False},
        "stages": stages,
    }
    path = run.parent / f"{run.name}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def _distil(rank, world, argv, dies_after=None):
    """The exit code of the command on this rank; `dies_after` so many scores of a selection."""
    import sys

    from megatron_lt2.distill import selection
    from megatron_lt2.distill.__main__ import main

    os.environ["LT2_FORCE_CPU"] = "1"
    sys.argv[1:] = argv
    write, written = selection.write_score, []

    def write_and_die(*given):
        if dies_after is not None and len(written) == dies_after:
            os._exit(9)
        written.append(given)
        write(*given)

    from megatron_lt2.distill import scorer

    with mock.patch.object(scorer, "write_score", write_and_die):
        return main(argv)


def distil(path, *more, ranks=1, dies_after=None):
    """Exit codes of the ranks."""
    argv = ["--config", str(path), *map(str, more)]
    return run_ranks(ranks, _distil, argv, dies_after)


def _same_checkpoints(one, other):
    """The newest checkpoints of two stages are equal bit for bit."""
    ours, theirs = (PlainCheckpoint(sorted(s.glob("checkpoints/iter_*"))[-1]) for s in (one, other))
    assert set(ours) == set(theirs)
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), f"{one.name}: {name}"


LLAMA_STAGES = [
    {
        **{"kind": "mixer", "training": {"steps": 40}, "optimizer": {"lr": 1e-2}},
        "loss": {"measure": "relative"},
    },
    {"kind": "select", "select": {"keep": 0.34, "batches": 1}},
    {
        **{"kind": "logits", "training": {"steps": 6}, "optimizer": {"lr": 1e-3}},
        **{"loss": {"ce": 0.1, "temperature": 2.0}, "rates": {"*self_attention*": 5e-3}},
    },
]


def test_a_hybrid_from_a_llama(teachers, data, tmp_path):
    """Every layer's alignment improves; a kill during the selection costs one score."""
    run = tmp_path / "run"
    path = _settings(teachers, data, run, LLAMA_STAGES)
    with pytest.raises(AssertionError, match="exit code 9"):
        distil(path, dies_after=2)
    stages = run / "stages"
    curve = records(stages / "00-mixer", "train")
    for layer in range(3):
        losses = [record[f"align_layer_{layer}"] for record in curve]
        first, last = sum(losses[:5]), sum(losses[-5:])
        assert last < 0.9 * first, (layer, first, last)
    scores = stages / "01-select" / "scores"
    kept = {p.name: p.read_bytes() for p in scores.iterdir()}
    assert len(kept) == 2
    assert distil(path) == [0]
    assert {name: (scores / name).read_bytes() for name in kept} == kept
    result = yaml.safe_load((stages / "01-select" / "pattern.yaml").read_text())
    found = json.loads((stages / "01-select" / "scores.json").read_text())["scores"]
    best = min((n for n in found if n != "none"), key=lambda n: found[n])
    assert result["layers"] == [int(best)] and found[best] < found["none"]
    assert result["pattern"].count("full") == 1
    assert (stages / "01-select" / "scores.png").stat().st_size > 1000
    assert len(records(stages / "00-mixer", "end")) == 1, "a finished stage is not done again"
    end = records(stages / "02-logits", "train")
    assert end[-1]["kl"] < end[0]["kl"]
    start = records(stages / "02-logits", "start")[0]["message"]
    assert start == "starting from the weights of stage 00-mixer, step 40"


OURO_STAGES = [
    {"kind": "mixer", "training": {"steps": 8}, "optimizer": {"lr": 1e-2}},
    {"kind": "hidden", "training": {"steps": 4}, "optimizer": {"lr": 1e-3}},
    {"kind": "select", "select": {"keep": 0.34, "batches": 1}},
    {
        **{"kind": "logits", "training": {"steps": 6}, "optimizer": {"lr": 1e-3}},
        "loss": {"loops": "progressive", "final_from": 0.5, "top_k": 20},
    },
    {
        **{"kind": "long", "training": {"steps": 4, "micro_batch_size": 1}},
        **{"data": {"sequence_length": 64}, "parallel": {"context": 2}},
        "optimizer": {"lr": 1e-3},
    },
    {
        **{"kind": "sft", "training": {"steps": 4, "eval_batches": 0}, "loss": {"ce": 1.0}},
        **{"data": {"sequence_length": 64}, "optimizer": {"lr": 1e-3}},
    },
]


@pytest.mark.slow
def test_an_ouro_goes_through_all_stages(teachers, data, tmp_path):
    """Two ranks, interrupted in every stage: bit for bit the undisturbed one; and its export."""
    from copy import deepcopy

    stages = deepcopy(OURO_STAGES)
    stages[-1]["chat"] = {"train": str(teachers / "chat.jsonl")}
    stages[-1]["teacher"] = str(teachers / "ouro_chat")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert distil(_settings(teachers, data, whole, stages, "ouro"), ranks=2) == [0, 0]
    path = _settings(teachers, data, broken, stages, "ouro")
    trained = [i for i, stage in enumerate(stages) if stage["kind"] != "select"]
    for number in trained:
        stop = (f"--stages.{number}.training.stop_step", 2)
        assert distil(path, *stop, ranks=2) == [75, 75], number
    assert distil(path, ranks=2) == [0, 0]
    folders = sorted((whole / "stages").iterdir())
    for number in trained:
        _same_checkpoints(broken / "stages" / folders[number].name, folders[number])
    by_loop = records(folders[3], "train")
    assert all(by_loop[0][f"kl_loop_{t}"] > 0 for t in (1, 2, 3))
    assert by_loop[-1]["kl_loop_1"] == 0 and by_loop[-1]["kl_loop_3"] > 0
    _export_generates(folders[-1], tmp_path / "hf")


def _export_generates(run: Path, target: Path) -> None:
    """With and without cache alike."""
    argv = ["export", "--checkpoint", run, "--output", target, "--family", "lt2"]
    assert convert([str(a) for a in argv]) == 0
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, trust_remote_code=True).eval()
    assert model.config.norm_mode == "sandwich" and model.config.exit_gate
    assert set(model.config.mixers) == {"gdn", "full"}
    prompt = torch.tensor([[5, 9, 17, 33]])
    texts = [
        model.generate(prompt, max_new_tokens=24, do_sample=False, use_cache=cache, eos_token_id=-1)
        for cache in (True, False)
    ]
    assert torch.equal(*texts) and texts[0].shape[1] == 28


@pytest.mark.slow
def test_cached_logits_train_as_a_teacher_beside_the_student(teachers, data, tmp_path):
    """Two ranks fill the cache, one of two tensor-parallel ranks uses it too; fp16 is the only
    difference, and logits of other text are refused."""
    stages = [
        {
            **{"kind": "logits", "training": {"steps": 5, "eval_batches": 1}},
            **{"optimizer": {"lr": 1e-3}, "loss": {"ce": 0.1, "top_k": 12, "temperature": 2.0}},
        }
    ]
    live, cached = tmp_path / "live", tmp_path / "cached"
    cache = ("--stages.0.loss.cached", tmp_path / "logits")
    assert distil(_settings(teachers, data, live, stages)) == [0]
    path = _settings(teachers, data, cached, stages)
    assert distil(path, *cache, ranks=2) == [0, 0]
    expected = {r["step"]: r["kl"] for r in records(live / "stages" / "00-logits", "train")}
    found = {r["step"]: r["kl"] for r in records(cached / "stages" / "00-logits", "train")}
    assert found == pytest.approx(expected, rel=2e-3) and len(found) == 5
    kept = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "logits").glob("*.npy")}
    assert {name.split("_")[0] for name in kept} == {"train", "valid"}
    third = ("--run_dir", tmp_path / "third", "--parallel.tensor", 2)
    assert distil(path, *cache, *third, ranks=2) == [0, 0]
    found = {
        r["step"]: r["kl"] for r in records(tmp_path / "third" / "stages" / "00-logits", "train")
    }
    assert found == pytest.approx(expected, rel=2e-3)
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "logits").glob("*.npy")} == kept
    other = ("--run_dir", tmp_path / "fourth", "--training.seed", 4)
    assert distil(path, *cache, *other) == [2]
