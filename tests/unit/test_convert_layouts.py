"""Imports under every layout: loaded as TP x PP, saved, exported: the same bytes and logits."""

import multiprocessing
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_convert_round_trip import convert, lt2_folder

from checkpoints_tools.plain_checkpoint import find_checkpoint
from megatron_lt2.config.checks import check_config
from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.load import load_saved
from megatron_lt2.config.schema import ParallelConfig
from tests.hf_folders import OURO, assert_same_bytes, folder_tensors, llama_folder, ouro_folder
from tests.ouro_reference import random_ouro
from tests.ranks import run_ranks

IDS = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32, 38, 46]])


def _load_and_save(rank, world, config):
    """Start from the weights, compute logits where that takes no pipeline, save.

    Returns this rank's share of the logits.
    """
    from megatron_lt2.parallel.start import start_ranks
    from megatron_lt2.training.checkpoint import Checkpointer
    from megatron_lt2.training.metrics import RunLog
    from megatron_lt2.training.setup import build_parts

    multiprocessing.current_process()._config["daemon"] = False
    start_ranks(config.parallel, 1)
    parts = build_parts(config)
    log = RunLog(config.run_dir, 1, tensorboard=False, active=rank == 0)
    checkpoints = Checkpointer(config, parts, log)
    assert checkpoints.load_newest() == 0
    logits = None
    if config.parallel.pipeline == 1:
        parts.model.eval()
        with torch.no_grad():
            logits = parts.model(IDS, torch.arange(IDS.shape[1]).expand_as(IDS)).float().numpy()
    checkpoints.save(1, background=False)
    checkpoints.close()
    return logits


def config_for(run, folder, tensor, pipeline):
    config = load_saved(find_checkpoint(run) / "run_config.yaml")
    config.run_dir, config.checkpoint.init_from = str(folder), str(run)
    config.parallel = ParallelConfig(tensor=tensor, pipeline=pipeline, distributed_optimizer=False)
    config.precision.dtype = "fp32"
    config.training.global_batch_size = pipeline
    return config


def through(tmp_path, folder, tensor, pipeline):
    """Import `folder`, load and save it under a layout, export; returns the logits, if any."""
    run, trained, again = tmp_path / "run", tmp_path / "trained", tmp_path / "again"
    assert convert("import", "--source", folder, "--output", run) == 0
    config = config_for(run, trained, tensor, pipeline)
    check_config(config, tensor * pipeline, need_data=False)
    shares = run_ranks(tensor * pipeline, _load_and_save, config)
    assert convert("export", "--checkpoint", trained, "--output", again) == 0
    assert_same_bytes(folder_tensors(folder), folder_tensors(again))
    assert (folder / "config.json").read_bytes() == (again / "config.json").read_bytes()
    if pipeline == 1:
        return torch.from_numpy(np.concatenate(shares, axis=-1))[..., :61]
    return None


def llama_logits(folder):
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return model(IDS).logits


SLOW = pytest.mark.slow
GRID = [
    pytest.param(tensor, pipeline, marks=[] if (tensor, pipeline) == (1, 2) else [SLOW])
    for tensor in (1, 2, 4)
    for pipeline in (1, 2, 4)
]


@pytest.mark.parametrize("tensor, pipeline", GRID)
def test_llama(tmp_path, tensor, pipeline):
    """8:4 heads, a vocabulary that nothing divides; tied where tensor + pipeline is even."""
    folder = llama_folder(
        tmp_path / "hf",
        heads=8,
        kv_heads=4,
        layers=4,
        tied=(tensor + pipeline) % 2 == 0,
    )
    logits = through(tmp_path, folder, tensor, pipeline)
    if logits is not None:
        torch.testing.assert_close(logits, llama_logits(folder), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "changes, tensor",
    [
        pytest.param({"kv_heads": 1}, 1, marks=SLOW),
        pytest.param({"heads": 8, "kv_heads": 2, "head_dim": 4}, 2, marks=SLOW),
        pytest.param({"heads": 12, "kv_heads": 3, "ffn": 42}, 3, marks=SLOW),
    ],
    ids=["4:1 on 1", "8:2 on 2", "12:3 on 3"],
)
def test_grouped_queries(tmp_path, changes, tensor):
    folder = llama_folder(tmp_path / "hf", **changes)
    logits = through(tmp_path, folder, tensor, 1)
    torch.testing.assert_close(logits, llama_logits(folder), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "tensor, pipeline",
    [(2, 1), *(pytest.param(*c, marks=SLOW) for c in [(1, 1), (1, 3), (2, 3), (4, 1)])],
)
def test_ouro(tmp_path, tensor, pipeline):
    folder = ouro_folder(tmp_path / "hf")
    logits = through(tmp_path, folder, tensor, pipeline)
    if logits is not None:
        expected = random_ouro(OURO, dtype=torch.float32)(IDS).logits[-1]
        torch.testing.assert_close(logits, expected.detach(), rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("tensor, pipeline", [(2, 1), (1, 2), (2, 2)])
def test_lt2(tmp_path, tensor, pipeline):
    sizes = {"gdn": {"num_heads": 4, "head_k_dim": 6, "head_v_dim": 10}}
    folder, model = lt2_folder(tmp_path / "hf", mixers=["gdn", "full", "gdn", "full"], **sizes)
    logits = through(tmp_path, folder, tensor, pipeline)
    if logits is not None:
        with torch.no_grad():
            torch.testing.assert_close(logits, model(IDS).logits, rtol=0, atol=1e-4)


def refusal(tmp_path, changes, **model):
    """What starting from an import with a changed config says."""
    folder, run = llama_folder(tmp_path / "hf"), tmp_path / "run"
    assert convert("import", "--source", folder, "--output", run) == 0
    config = config_for(run, tmp_path / "new", 1, 1)
    for name, value in model.items():
        setattr(config.model, name, value)
    changes(config)
    return config


@pytest.mark.parametrize(
    "changes, fields",
    [
        ({"num_layers": 2}, ["model.num_layers 3 (here 2)", "model.pattern"]),
        ({"tie_embeddings": False}, ["model.tie_embeddings True (here False)"]),
        ({"norm_eps": 1e-6}, ["model.norm_eps 1e-05 (here 1e-06)"]),
        ({"loops": 2, "num_heads": 2}, ["model.loops 1 (here 2)", "model.num_heads 4 (here 2)"]),
    ],
    ids=str,
)
def test_another_architecture_is_refused_by_field(tmp_path, changes, fields):
    from megatron_lt2.parallel import platform

    platform.install()
    from megatron_lt2.training.initial_weights import check_architecture, find

    config = refusal(tmp_path, lambda c: None, **changes)
    with pytest.raises(ConfigError) as error:
        check_architecture(find(config.checkpoint.init_from), config.model)
    for field in fields:
        assert field in str(error.value)


def test_rope_theta_and_unused_mixers(tmp_path):
    from megatron_lt2.parallel import platform

    platform.install()
    from megatron_lt2.training.initial_weights import check_architecture, find

    def other_theta(config):
        config.model.rope.theta = 10000.0

    config = refusal(tmp_path, other_theta)
    folder = find(config.checkpoint.init_from)
    with pytest.raises(ConfigError, match=r"model.rope.theta 5000.0 \(here 10000.0\)"):
        check_architecture(folder, config.model)
    config.model.rope = replace(config.model.rope, theta=5000.0)
    config.model.gdn.num_heads, config.model.init.std = 3, 0.5
    config.model.num_kv_heads, config.model.pattern = 2, ["full", "full", "full"]
    check_architecture(folder, config.model)
    with pytest.raises(ConfigError, match="no complete checkpoint there"):
        find(str(tmp_path / "nowhere"))
