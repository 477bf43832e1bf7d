"""Whatever is wrong with a source is an error that names it, and nothing is written."""

import json
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints_tools.convert import main
from checkpoints_tools.hf_folder import new_folder
from checkpoints_tools.plain_checkpoint import find_checkpoint
from tests.hf_folders import llama_folder, ouro_folder

INDEX = "model.safetensors.index.json"


def convert(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def edit_json(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_tensors(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def rename(tensors):
    tensors["model.layers.1.mlp.up_project.weight"] = tensors.pop(
        "model.layers.1.mlp.up_proj.weight"
    )


def cut_header(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 10**9) + data[8:])


def float8(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data.replace(b'"F32"', b'"F8_"', 1))


TENSORS = {
    "missing": (lambda t: t.pop("model.norm.weight"), "missing: model.norm.weight"),
    "renamed": (rename, "model.layers.1.mlp.up_proj.weight"),
    "extra": (lambda t: t.update(extra=torch.ones(2)), "unknown: extra"),
    "mis-shaped": (
        lambda t: t.update({"model.layers.2.self_attn.k_proj.weight": torch.ones(12, 23)}),
        "model.layers.2.self_attn.k_proj.weight has shape (12, 23), expected (12, 24)",
    ),
    "transposed": (
        lambda t: t.update({"model.layers.0.mlp.down_proj.weight": torch.ones(40, 24)}),
        "model.layers.0.mlp.down_proj.weight",
    ),
    "two dtypes in one fused tensor": (
        lambda t: t.update({k: v.half() for k, v in t.items() if "0.self_attn.v_proj" in k}),
        "model.layers.0.self_attn.v_proj.weight is float16",
    ),
    "head of a tied model": (
        lambda t: t.update({"lm_head.weight": torch.ones(61, 24)}),
        "unknown: lm_head.weight",
    ),
}

FIELDS = {
    "unknown field": ({"logit_softcap": 30.0}, "logit_softcap"),
    "scaled rotary": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling"),
    "biases": ({"attention_bias": True}, "attention_bias"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "unknown family": ({"model_type": "mamba"}, "mamba"),
    "untied, but no head": ({"tie_word_embeddings": False}, "missing: lm_head.weight"),
    "wrong heads": ({"num_key_value_heads": 4}, "k_proj"),
    "wrong layers": ({"num_hidden_layers": 4}, "missing: model.layers.3."),
}

FILES = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors"),
    "cut": (
        lambda f: (f / "model.safetensors").write_bytes(
            (f / "model.safetensors").read_bytes()[:-100]
        ),
        "cut short",
    ),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "no whole safetensors file"),
    "header longer than the file": (cut_header, "no whole safetensors file"),
    "unknown dtype": (float8, "F8_"),
    "no config": (lambda f: (f / "config.json").unlink(), "neither a config.json"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "not a readable config.json"),
    "no folder": (shutil.rmtree, "no such folder"),
}

SHARDS = {
    "missing shard": (
        lambda f: (f / "model-00002-of-00003.safetensors").unlink(),
        "model-00002-of-00003.safetensors",
    ),
    "index names a tensor that no file has": (
        lambda f: edit_json(
            f / INDEX, lambda v: v["weight_map"].update(ghost="model-00001-of-00003.safetensors")
        ),
        "ghost",
    ),
    "index puts a tensor elsewhere": (
        lambda f: edit_json(
            f / INDEX,
            lambda v: v["weight_map"].update(
                {"model.norm.weight": "model-00001-of-00003.safetensors"}
            ),
        ),
        "model.norm.weight",
    ),
    "index leaves a tensor out": (
        lambda f: edit_json(f / INDEX, lambda v: v["weight_map"].pop("model.norm.weight")),
        "does not name model.norm.weight",
    ),
    "index has another size": (
        lambda f: edit_json(f / INDEX, lambda v: v["metadata"].update(total_size=5)),
        "total_size is 5",
    ),
    "a tensor twice": (
        lambda f: edit_tensors(
            f / "model-00001-of-00003.safetensors",
            lambda t: t.update({"model.norm.weight": torch.ones(24)}),
        ),
        "model.norm.weight is in",
    ),
    "no index": (lambda f: (f / INDEX).unlink(), f"no {INDEX}"),
    "index leads elsewhere": (
        lambda f: edit_json(
            f / INDEX, lambda v: v["weight_map"].update(x="../model-00001-of-00003.safetensors")
        ),
        "names the file",
    ),
}


def refused(capsys, tmp_path, folder, message):
    before = {path.name for path in tmp_path.iterdir()}
    code = convert("import", "--source", folder, "--output", tmp_path / "run")
    error = capsys.readouterr().err
    assert code == 2 and message in error, error
    assert error.startswith("error: ") and error.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == before


@pytest.fixture(autouse=True)
def tokenizer_warning_off(monkeypatch):
    """These folders have no tokenizer, which is said on stderr."""
    monkeypatch.setattr("checkpoints_tools.importing._tokenizer", lambda *a: None)


@pytest.mark.parametrize("case", TENSORS, ids=str)
def test_tensors(tmp_path, capsys, case):
    change, message = TENSORS[case]
    folder = llama_folder(tmp_path / "hf")
    edit_tensors(folder / "model.safetensors", change)
    refused(capsys, tmp_path, folder, message)


@pytest.mark.parametrize("case", FIELDS, ids=str)
def test_config_fields(tmp_path, capsys, case):
    changes, message = FIELDS[case]
    refused(capsys, tmp_path, llama_folder(tmp_path / "hf", **changes), message)


@pytest.mark.parametrize("case", FILES, ids=str)
def test_files(tmp_path, capsys, case):
    change, message = FILES[case]
    folder = llama_folder(tmp_path / "hf")
    change(folder)
    refused(capsys, tmp_path, folder, message)


@pytest.mark.parametrize("case", SHARDS, ids=str)
def test_shards(tmp_path, capsys, case):
    change, message = SHARDS[case]
    folder = llama_folder(tmp_path / "hf", shards=3)
    change(folder)
    refused(capsys, tmp_path, folder, message)


def test_a_field_that_is_missing(tmp_path, capsys):
    folder = llama_folder(tmp_path / "hf")
    edit_json(folder / "config.json", lambda v: v.pop("intermediate_size"))
    refused(capsys, tmp_path, folder, "intermediate_size is missing")


def test_sliding_layers_of_an_ouro(tmp_path, capsys):
    folder = ouro_folder(tmp_path / "hf")
    edit_json(
        folder / "config.json", lambda v: v["layer_types"].__setitem__(0, "sliding_attention")
    )
    refused(capsys, tmp_path, folder, "layer_types")


def damage(checkpoint, case):
    data = next(checkpoint.glob("*.distcp"))
    if case == "cut":
        data.write_bytes(data.read_bytes()[:-50])
    elif case == "missing":
        data.unlink()
    else:
        data.write_bytes(bytes(data.stat().st_size))


@pytest.mark.parametrize("case", ["cut", "missing", "overwritten"])
def test_a_damaged_checkpoint_is_not_exported(tmp_path, capsys, case):
    run = tmp_path / "run"
    convert("import", "--source", llama_folder(tmp_path / "hf"), "--output", run)
    capsys.readouterr()
    checkpoint = find_checkpoint(run)
    damage(checkpoint, case)
    for command in ("export", "reshard"):
        code = convert(command, "--checkpoint", checkpoint, "--output", tmp_path / "out")
        error = capsys.readouterr().err
        assert code == 2 and error.startswith("error: ") and error.count("\n") == 1, error
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "run"}


def test_an_interrupted_import_leaves_nothing(tmp_path, monkeypatch):
    folder = llama_folder(tmp_path / "hf")
    from checkpoints_tools.byte_copy import ByteCopier

    original, read = ByteCopier.copy, []

    def stop(*args):
        read.append(1)
        if len(read) == 9:
            raise KeyboardInterrupt
        original(*args)

    monkeypatch.setattr(ByteCopier, "copy", stop)
    with pytest.raises(BaseException, match="|KeyboardInterrupt"):
        convert("import", "--source", folder, "--output", tmp_path / "run")
    assert {path.name for path in tmp_path.iterdir()} == {"hf"}


def test_a_full_disk_is_an_error_of_one_line(tmp_path, capsys, monkeypatch):
    folder = llama_folder(tmp_path / "hf")
    run = tmp_path / "run"
    convert("import", "--source", folder, "--output", run)
    capsys.readouterr()

    def full(stream, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("checkpoints_tools.safetensors_writer._write", full)
    assert convert("export", "--checkpoint", run, "--output", tmp_path / "out") == 2
    assert "No space left" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "run"}


def test_nested_folders_are_made_whole(tmp_path):
    with new_folder(tmp_path / "out") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text("x")
    assert (tmp_path / "out/inner/file").read_text() == "x"
