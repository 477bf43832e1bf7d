"""A model with exits, from training to an export: every loop's logits and exit probabilities."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_export_megatron import LENGTH, tokens
from tiny_text import write_word_tokenizer

from checkpoints_tools.convert import main
from megatron_lt2.config.schema import AttentionConfig, ParallelConfig
from megatron_lt2.data.tokenizer import load_tokenizer
from megatron_lt2.hf.modeling_lt2 import LT2ForCausalLM
from megatron_lt2.tools import generate
from tests.ranks import run_ranks
from tests.tiny_run import build, tiny_config

OURO = {
    "pattern": "full",
    "loops": 3,
    "loop_residual": "none",
    "norm_mode": "sandwich",
    "inter_loop_norm": True,
    "exit_gate": True,
    "loss": "exits",
    "tie_embeddings": False,
    "attention": AttentionConfig(output_gate=False),
}
CASES = {
    "ouro, two tensor-parallel ranks": (2, OURO),
    "hybrid with rho": (1, {"exit_gate": True, "loss": "exits", "norm_mode": "sandwich"}),
    "llama": (
        1,
        {
            **{"pattern": "full", "loops": 1, "loop_residual": "none", "num_kv_heads": 1},
            "attention": AttentionConfig(output_gate=False),
        },
    ),
}


def _save(rank, world, config):
    """Save a checkpoint of random weights; this rank's logits of every loop, and probabilities."""
    import multiprocessing

    from megatron_lt2.training.checkpoint import Checkpointer
    from megatron_lt2.training.metrics import RunLog

    # The writer starts a process of its own, which Python forbids to daemons such as these ranks.
    multiprocessing.current_process()._config["daemon"] = False
    parts, loops = build(config), config.model.loops
    ids = tokens(config.model.vocab_size)
    positions = torch.arange(LENGTH).expand_as(ids)
    parts.model.eval()
    with torch.no_grad():
        logits = [parts.model(ids, positions, loops=t).numpy() for t in range(1, loops + 1)]
        made = parts.model(ids, positions, labels=ids, parts=True)
    log = RunLog(config.run_dir, 1, tensorboard=False, active=rank == 0)
    checkpointer = Checkpointer(config, parts, log)
    checkpointer.save(3, background=False)
    checkpointer.close()
    return np.stack(logits), made[1 + loops :].numpy()


def _export(folder, world, changes):
    config = tiny_config(
        run_dir=str(folder / "run"),
        parallel=ParallelConfig(tensor=world, distributed_optimizer=False),
    )
    config.model = replace(config.model, **changes)
    vocab = config.model.vocab_size
    ranks = run_ranks(world, _save, config)
    expected = torch.from_numpy(np.concatenate([logits for logits, _ in ranks], -1))[..., :vocab]
    words = {f"w{i}": i for i in range(vocab - 1)}
    path = write_word_tokenizer(folder / "words.json", words, eos="<|endoftext|>")
    load_tokenizer(path).save(folder / "run" / "tokenizer")
    command = ["export", "--checkpoint", str(folder / "run"), "--output", str(folder / "hf")]
    assert main([*command, "--family", "lt2"]) == 0
    return config, expected, torch.from_numpy(ranks[0][1])


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.slow] * (name == "llama")) for name in CASES]
)
def test_every_loop_of_an_export_equals_training(tmp_path, case):
    config, expected, p = _export(tmp_path, *CASES[case])
    model = LT2ForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        got = model(tokens(config.model.vocab_size), output_exits=True)
    assert got.loop_logits.shape == expected.shape
    assert (got.loop_logits - expected).abs().max() < 1e-4
    ours, theirs = (x.double().log_softmax(-1) for x in (got.loop_logits, expected))
    assert (theirs.exp() * (theirs - ours)).sum(-1).max() < 1e-9
    if config.model.exit_gate:
        assert (got.exit_probabilities.permute(2, 0, 1) - p).abs().max() < 1e-5
        assert p.std() > 0.05


def test_the_command_line_generates_with_exits(tmp_path, capsys):
    _export(tmp_path, *CASES["ouro, two tensor-parallel ranks"])
    capsys.readouterr()

    def run(*options):
        command = ["--model", str(tmp_path / "hf"), "--prompt", "w3 w9", "--temperature", "0"]
        code = generate.main([*command, "--max-new-tokens", "8", *options])
        out, err = capsys.readouterr()
        return code, out.partition(" tokens in")[0] if code == 0 else err

    last = run()
    assert last[0] == 0 and run("--loops", "3") == last and run("--exit-threshold", "1") == last
    first = run("--exit-step", "1")
    assert first == run("--loops", "1") == run("--exit-threshold", "0") != last
    assert run("--loops", "5")[0] == 0
    for options, message in {
        ("--loops", "0"): "--loops 0: this model can run 1 or more",
        ("--exit-step", "4"): "--exit-step 4: choose a loop from 1 to 3",
        ("--exit-threshold", "2"): "--exit-threshold 2.0 is no probability",
        ("--exit-threshold", "0.5", "--exit-step", "1"): "give one",
    }.items():
        code, error = run(*options)
        assert code == 2 and message in error and error.startswith("error: ")


@pytest.mark.parametrize(
    ("exits", "config", "message"),
    [
        ({"loops": 5}, {"loop_residual": "per_channel"}, "this model can run 1 to 4"),
        ({"exit_threshold": 0.5}, {}, "no exit gate; use --exit-step"),
        ({"exit_step": 2}, {"model_type": "llama"}, "--exit-step is for LT2 exports"),
    ],
)
def test_options_that_do_not_fit_the_model(exits, config, message):
    problem = generate.exit_problem(exits, {"model_type": "lt2", "loops": 4, **config})
    assert problem is not None and message in problem
