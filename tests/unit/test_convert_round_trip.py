"""Hugging Face -> training -> Hugging Face and back: the same bytes, for every family."""

import json
from dataclasses import replace

import pytest
import torch
from tiny_lt2 import (
    ALL,
    PATTERN,
    tiny_model,
    to_bfloat16,
    training_tensors,
)
from tiny_text import write_word_tokenizer

from checkpoints_tools.convert import main
from checkpoints_tools.hf_configs import AUTO_MAP
from checkpoints_tools.importing import open_hf
from checkpoints_tools.mappings.base import VOCAB_MULTIPLE
from checkpoints_tools.mappings.registry import FAMILIES, family_of_run
from checkpoints_tools.plain_checkpoint import PlainCheckpoint, find_checkpoint
from megatron_lt2.config.load import load_saved
from megatron_lt2.data.tokenizer import load_tokenizer
from tests.hf_folders import (
    OURO,
    assert_same_bytes,
    folder_tensors,
    llama_folder,
    ouro_config,
    ouro_folder,
    write_folder,
)
from tests.ouro_reference import OURO_1_4B, OURO_2_6B, OuroReference

LLAMAS = {
    "tied, 4:2": {},
    "untied, 4:1": {"kv_heads": 1, "tied": False},
    "8:2, a vocabulary that nothing divides": {"heads": 8, "head_dim": 4, "vocab": 67},
    "multi-query 6:1": {"heads": 6, "kv_heads": 1, "vocab": 16},
    "9:3, bf16, shards": {"heads": 9, "kv_heads": 3, "dtype": torch.bfloat16, "shards": 3},
    "a key head a head, fp16": {"kv_heads": 4, "dtype": torch.float16, "tied": False},
}


def convert(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def round_trip(folder, tmp_path):
    """Import, export; returns the run and the new folder."""
    run, again = tmp_path / "run", tmp_path / "again"
    assert convert("import", "--source", folder, "--output", run) == 0
    assert convert("export", "--checkpoint", run, "--output", again) == 0
    assert_same_bytes(folder_tensors(folder), folder_tensors(again))
    assert (folder / "config.json").read_bytes() == (again / "config.json").read_bytes()
    return run, again


def add_tokenizer(folder, vocab):
    words = {f"w{i}": i for i in range(vocab - 1)}
    path = write_word_tokenizer(folder.parent / "words.json", words, eos="<|endoftext|>")
    load_tokenizer(path).save(folder)


@pytest.mark.parametrize("case", LLAMAS, ids=str)
def test_llama(tmp_path, case):
    folder = llama_folder(tmp_path / "hf", **LLAMAS[case])
    run, again = round_trip(folder, tmp_path)
    tensors = PlainCheckpoint(find_checkpoint(run))
    rows = tensors["embedding.word_embeddings.weight"]
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    assert rows.shape[0] % VOCAB_MULTIPLE == 0 and not rows[vocab:].any()
    # And the other way round: what training wrote comes back as it was.
    second = tmp_path / "second"
    assert convert("import", "--source", again, "--output", second) == 0
    assert_same_bytes(dict(PlainCheckpoint(find_checkpoint(second))), dict(tensors))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ouro(tmp_path, tied, dtype):
    shape = replace(OURO, tie_word_embeddings=tied, num_key_value_heads=2 if tied else 4)
    folder = ouro_folder(tmp_path / "hf", shape, dtype)
    _, again = round_trip(folder, tmp_path)
    assert (again / "modeling_ouro.py").read_bytes() == (folder / "modeling_ouro.py").read_bytes()


@pytest.mark.parametrize("shape, count", [(OURO_1_4B, 269), (OURO_2_6B, 533)], ids=["1.4B", "2.6B"])
def test_ouro_at_its_true_size_has_exactly_these_tensors(shape, count):
    config = FAMILIES["ouro"].run_config(ouro_config(shape))
    with torch.device("meta"):
        expected = {k: tuple(v.shape) for k, v in OuroReference(shape).state_dict().items()}
    table = {}
    for mapping in FAMILIES["ouro"].table(config.model):
        table |= dict(zip(mapping.targets, mapping.target_shapes(), strict=True))
    assert table == expected
    assert len(table) == count
    total = sum(torch.Size(size).numel() for size in table.values())
    assert total == {269: 1_434_652_673, 533: 2_667_974_657}[count]


def lt2_folder(folder, *, tied=True, mixers=PATTERN, dtype=torch.float32, **changes):
    model = tiny_model(tie_word_embeddings=tied, mixers=list(mixers), **changes)
    if dtype == torch.bfloat16:
        to_bfloat16(model)
    tensors = {k: v.detach() for k, v in model.state_dict().items()}
    if tied:
        del tensors["lm_head.weight"]
    config = model.config.to_diff_dict() | {"auto_map": AUTO_MAP}
    config["dtype"] = str(dtype).removeprefix("torch.")
    return write_folder(folder, tensors, config), model


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied": False, "dtype": torch.bfloat16},
        {"mixers": ALL},
        {"mixers": ["full", "window"], "attention_output_gate": False, "num_key_value_heads": 1},
        {"mixers": ["gdn"], "loop_residual": "none", "loops": 1},
    ],
    ids=["hybrid", "untied bf16", "every mixer", "no gate, one key head", "no rho"],
)
def test_lt2(tmp_path, changes):
    folder, model = lt2_folder(tmp_path / "hf", **changes)
    run, _ = round_trip(folder, tmp_path)
    # The fused tensors are those that were laid out row by row, without our own tables.
    made, expected = PlainCheckpoint(find_checkpoint(run)), training_tensors(model, padding_rows=0)
    assert set(made) == set(expected)
    for name, tensor in expected.items():
        rows = tensor.shape[0]
        assert torch.equal(made[name][:rows], tensor), name


@pytest.mark.parametrize("family", ["llama", "lt2", "ouro"])
def test_a_config_of_our_own_says_the_same(tmp_path, family):
    """Without the config.json that came along, the one that is written gives the same model."""
    make = {
        "llama": lambda: llama_folder(tmp_path / "hf", tied=False),
        "ouro": lambda: ouro_folder(tmp_path / "hf"),
        "lt2": lambda: lt2_folder(tmp_path / "hf")[0],
    }
    folder = make[family]()
    add_tokenizer(folder, 61)
    run, again = tmp_path / "run", tmp_path / "again"
    assert convert("import", "--source", folder, "--output", run) == 0
    for path in (run / "source").iterdir():
        path.unlink()
    (run / "source").rmdir()
    assert convert("export", "--checkpoint", run, "--output", again) == 0
    assert_same_bytes(folder_tensors(folder), folder_tensors(again))
    before, after = open_hf(folder).config, open_hf(again).config
    assert before == after
    assert family_of_run(before).name == family


def test_written_llama_config_is_read_alike_by_transformers(tmp_path):
    from transformers import AutoConfig

    folder = llama_folder(tmp_path / "hf")
    add_tokenizer(folder, 61)
    assert convert("import", "--source", folder, "--output", tmp_path / "run") == 0
    for path in (tmp_path / "run/source").iterdir():
        path.unlink()
    (tmp_path / "run/source").rmdir()
    assert convert("export", "--checkpoint", tmp_path / "run", "--output", tmp_path / "again") == 0
    one, other = (AutoConfig.from_pretrained(f) for f in (folder, tmp_path / "again"))
    for name in ("rope_parameters", "rms_norm_eps", "tie_word_embeddings", "num_key_value_heads"):
        assert getattr(one, name) == getattr(other, name), name
    assert one.rope_parameters["rope_theta"] == 5000.0


def test_dtype_and_shard_size(tmp_path):
    folder = llama_folder(tmp_path / "hf")
    run, again = tmp_path / "run", tmp_path / "again"
    assert convert("import", "--source", folder, "--output", run) == 0
    command = ("export", "--checkpoint", run, "--output", again)
    assert convert(*command, "--dtype", "bfloat16", "--shard-size", "5KB") == 0
    shards = sorted(again.glob("model-*.safetensors"))
    assert len(shards) > 3 and all(path.stat().st_size < 7000 for path in shards)
    expected = {k: v.bfloat16() for k, v in folder_tensors(folder).items()}
    assert_same_bytes(folder_tensors(again), expected)
    config = json.loads((again / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    assert {k: v for k, v in config.items() if k != "torch_dtype"} == {
        k: v
        for k, v in json.loads((folder / "config.json").read_text()).items()
        if k != "torch_dtype"
    }


def test_the_run_of_an_import_says_what_it_is(tmp_path):
    folder = llama_folder(tmp_path / "hf")
    add_tokenizer(folder, 61)
    run = tmp_path / "run"
    assert convert("import", "--source", folder, "--output", run) == 0
    config = load_saved(find_checkpoint(run) / "run_config.yaml")
    assert load_saved(run / "architecture.yaml").model == config.model
    assert (config.model.num_heads, config.model.num_kv_heads, config.model.loops) == (4, 2, 1)
    assert config.data.sequence_length == 96
    assert load_tokenizer(run / "tokenizer").sha256 == load_tokenizer(folder).sha256
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "run", "words.json"}
    assert convert("import", "--source", folder, "--output", run) == 2
    assert convert("import", "--source", folder, "--output", run, "--overwrite") == 0
    (run / "metrics.jsonl").write_text("")  # a run has used it
    assert convert("import", "--source", folder, "--output", run, "--overwrite") == 2


def test_masks_that_change_between_loops_belong_to_no_other_family(tmp_path):
    config = open_hf(ouro_folder(tmp_path / "hf")).config
    assert family_of_run(config).name == "ouro"
    config.model.pattern = "full->window=5->full"
    assert family_of_run(config).name == "lt2"


def test_padding_is_that_of_training():
    from megatron_lt2.parallel import platform

    platform.install()
    from megatron_lt2.model import core_config

    assert core_config.VOCAB_MULTIPLE == VOCAB_MULTIPLE
