"""A checkpoint that training wrote on several ranks, exported: the logits are the same."""

import multiprocessing
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_text import write_word_tokenizer

from checkpoints_tools.convert import main
from megatron_lt2.config.mixers import (
    DeltaNetConfig,
    DSAConfig,
    HGRN2Config,
    KDAConfig,
    Mamba2Config,
    MLSTMConfig,
    WindowConfig,
)
from megatron_lt2.config.schema import AttentionConfig, ParallelConfig, RopeConfig
from megatron_lt2.data.tokenizer import load_tokenizer
from megatron_lt2.hf.modeling_lt2 import LT2ForCausalLM
from megatron_lt2.recurrent.names import RECURRENT
from tests.ranks import run_ranks
from tests.tiny_run import build, tiny_config

LENGTH = 75  # one chunk of 64 and a piece

ALL = [*RECURRENT, "window", "full"]
# Two ranks need even heads, and the shared channels of a mixer an even number.
EVERY_MIXER = {
    "pattern": ALL,
    "num_layers": len(ALL),
    "num_heads": 4,
    "window": WindowConfig(size=20),
    "kda": KDAConfig(head_v_dim=6, rank=4),
    "deltanet": DeltaNetConfig(output_gate=True),
    "mamba2": Mamba2Config(head_k_dim=6, groups=2),
    "hgrn2": HGRN2Config(lower_bound=0.3),
    "mlstm": MLSTMConfig(head_v_dim=10),
}

CASES = {
    "two tensor-parallel ranks": (2, {}),
    "untied, interleaved rotary, no gate": (
        1,
        {
            "tie_embeddings": False,
            "rope": RopeConfig(interleaved=True, theta=500.0),
            "attention": AttentionConfig(output_gate=False),
        },
    ),
    "every mixer": (1, EVERY_MIXER),
    "every mixer, two ranks": (2, EVERY_MIXER),
    "untied, two ranks": (2, {"tie_embeddings": False}),
    "sparse between ends of full attention, two ranks": (
        2,
        {"pattern": "full+[dsa+nsa]+full", "num_layers": 4},
    ),
    "a mask for each loop": (1, {"pattern": "gdn+full->gdn+window=20"}),
    "grouped dsa": (1, {"pattern": "dsa", "dsa": DSAConfig(kv="grouped", top_k=9, head_dim=6)}),
    "no rho, full attention first": (1, {"loop_residual": "none", "pattern": "full+gdn"}),
}
SLOW = ("every mixer", "grouped dsa", "untied, two ranks", "no rho, full attention first")


def tokens(vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocab_size, (2, LENGTH), generator=generator)


def _save(rank, world, config):
    """Save a checkpoint of random weights; returns this rank's share of the logits."""
    from megatron_lt2.training.checkpoint import Checkpointer
    from megatron_lt2.training.metrics import RunLog

    # The writer starts a process of its own, which Python forbids to daemons such as these ranks.
    multiprocessing.current_process()._config["daemon"] = False
    parts = build(config)
    ids = tokens(config.model.vocab_size)
    positions = torch.arange(LENGTH).expand_as(ids)
    parts.model.eval()
    with torch.no_grad():
        logits = parts.model(ids, positions)
    log = RunLog(config.run_dir, 1, tensorboard=False, active=rank == 0)
    checkpointer = Checkpointer(config, parts, log)
    checkpointer.save(3, background=False)
    checkpointer.close()
    return logits.float().numpy()


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES]
)
def test_exported_logits_equal_training(tmp_path, case):
    world, changes = CASES[case]
    config = tiny_config(
        run_dir=str(tmp_path / "run"),
        parallel=ParallelConfig(tensor=world, distributed_optimizer=False),
    )
    config.model = replace(config.model, **changes)
    vocab = config.model.vocab_size
    shares = run_ranks(world, _save, config)
    expected = torch.from_numpy(np.concatenate(shares, axis=-1))[..., :vocab]

    words = {f"w{i}": i for i in range(vocab - 1)}
    path = write_word_tokenizer(tmp_path / "words.json", words, eos="<|endoftext|>")
    load_tokenizer(path).save(tmp_path / "run" / "tokenizer")
    output = tmp_path / "hf"
    checkpoints = str(tmp_path / "run" / "checkpoints")
    assert main(["export", "--checkpoint", checkpoints, "--output", str(output)]) == 0
    model = LT2ForCausalLM.from_pretrained(output).eval()
    with torch.no_grad():
        logits = model(tokens(vocab)).logits

    assert logits.shape == expected.shape
    assert expected.std() > 0.1
    assert (logits - expected).abs().max() < 1e-4
    ours, theirs = (x.double().log_softmax(-1) for x in (logits, expected))
    divergence = (theirs.exp() * (theirs - ours)).sum(-1)
    assert divergence.max() < 1e-9
