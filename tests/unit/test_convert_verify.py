"""verify, inspect, reshard and Megatron-LM checkpoints: what they say, and what they notice."""

import json
import sys
import types
import warnings

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from test_convert_round_trip import add_tokenizer, convert

from checkpoints_tools.checkpoint_writer import write_tensors
from checkpoints_tools.modelcard import _curve
from checkpoints_tools.plain_checkpoint import PlainCheckpoint, find_checkpoint
from checkpoints_tools.safetensors_files import Spec
from tests.hf_folders import OURO, assert_same_bytes, folder_tensors, llama_folder, ouro_folder
from tests.ouro_reference import random_ouro


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A Hugging Face folder and its import."""
    base = tmp_path_factory.mktemp("pair")
    folder = llama_folder(base / "hf", tied=False)
    add_tokenizer(folder, 61)
    assert convert("import", "--source", folder, "--output", base / "run") == 0
    return folder, base / "run"


@pytest.fixture()
def copy(pair, tmp_path):
    """The folder once more, for changes."""
    import shutil

    return shutil.copytree(pair[0], tmp_path / "copy")


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("against", ["tensors", "own", "hf"])
def test_verify_finds_no_difference(pair, capsys, against):
    folder, run = pair
    assert convert("verify", "--checkpoint", run, "--hf", folder, "--against", against) == 0
    out = capsys.readouterr().out
    assert "tensors: all 30 equal" in out
    assert ("KL a token" in out) == (against != "tensors")
    # The text is one unknown word for this tokenizer, and positions would not matter.
    assert ("random token ids" in out) == (against != "tensors")


def test_verify_names_the_tensor_and_the_layer(pair, copy, capsys):
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3] += 0.5
    save_file(tensors, copy / "model.safetensors")
    assert convert("verify", "--checkpoint", pair[1], "--hf", copy) == 1
    out = capsys.readouterr().out
    assert "tensor model.layers.1.mlp.up_proj.weight: differs by up to 0.5" in out
    assert "layer 1 of loop 0 is the first to depart" in out


@pytest.mark.parametrize(
    "changes, words, layer",
    [
        ({"rope_theta": 50.0}, "rope_theta is 5000.0 in the checkpoint, 50.0", 0),
        ({"rms_norm_eps": 0.5}, "rms_norm_eps is 1e-05 in the checkpoint, 0.5", 0),
    ],
)
def test_verify_finds_a_wrong_setting(pair, copy, capsys, changes, words, layer):
    edit_config(copy, **changes)
    assert convert("verify", "--checkpoint", pair[1], "--hf", copy, "--against", "hf") == 1
    out = capsys.readouterr().out
    assert words in out and "tensors: all 30 equal" in out
    assert f"layer {layer} of loop 0 is the first to depart" in out


def test_verify_without_the_models_own_code(tmp_path, capsys):
    folder = ouro_folder(tmp_path / "hf")
    assert convert("import", "--source", folder, "--output", tmp_path / "run") == 0
    capsys.readouterr()
    command = ("verify", "--checkpoint", tmp_path / "run", "--hf", folder)
    assert convert(*command) == 0
    assert "random token ids" in capsys.readouterr().out
    assert convert(*command, "--against", "hf") == 2
    assert "cannot be loaded" in capsys.readouterr().err


def test_inspect(pair, capsys, tmp_path):
    folder, run = pair
    for path in (folder, run):
        assert convert("inspect", path, "--tensors") == 0
        out = capsys.readouterr().out
        total = sum(t.numel() for t in folder_tensors(folder).values())
        for fact in (
            "family        llama",
            "layers        3 (3 full) x 1 loop(s)",
            "4 heads of 6, 2 key/value heads",
            "61, untied head",
            "rotary base   5000, norm epsilon 1e-05",
            f"parameters    {total:,} in 30 tensors",
            "embedding 1,464",
            "61 ids, fits",
            "float32",
        ):
            assert fact in out, fact
    assert "weights only" in out and "imported from hf (llama)" in out
    assert "decoder.layers.2.self_attention.linear_qkv.weight  float32 [48, 24]" in out
    assert convert("inspect", tmp_path) == 2


def test_reshard_to_bfloat16(pair, tmp_path, capsys):
    folder, run = pair
    target = tmp_path / "small"
    command = ("reshard", "--checkpoint", run, "--output", target)
    assert convert(*command, "--dtype", "bfloat16") == 0
    assert "other ranks need no conversion" in capsys.readouterr().out
    one, other = (PlainCheckpoint(find_checkpoint(r)) for r in (run, target))
    assert_same_bytes({k: v.bfloat16() for k, v in one.items()}, dict(other))
    # It is a run like any other: it exports, with what came along.
    assert convert("export", "--checkpoint", target, "--output", tmp_path / "hf") == 0
    assert json.loads((tmp_path / "hf/config.json").read_text())["torch_dtype"] == "bfloat16"
    assert (tmp_path / "hf/tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert convert(*command) == 2 and "already exists" in capsys.readouterr().err


def test_reshard_copies_a_whole_checkpoint(pair, tmp_path, capsys):
    _, run = pair
    target = tmp_path / "copy"
    command = ("reshard", "--checkpoint", run, "--output", target, "--keep-optimizer")
    assert convert(*command, "--dtype", "float32") == 2
    assert "--keep-optimizer" in capsys.readouterr().err
    assert convert(*command) == 0
    one, other = find_checkpoint(run), find_checkpoint(target)
    for path in one.iterdir():
        if path.name != "manifest.json":
            assert path.read_bytes() == (other / path.name).read_bytes()


def stacked(tensors, layers, fused_norms):
    """A checkpoint's tensors as Megatron-LM names them: a leading axis of layers."""
    out, names = {}, {}
    if fused_norms:
        names = {
            "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
            "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
        }
    for name, tensor in tensors.items():
        if not name.startswith("decoder.layers."):
            out[name] = tensor
        elif name.startswith("decoder.layers.0."):
            rest = name.removeprefix("decoder.layers.0.")
            parts = [tensors[f"decoder.layers.{i}.{rest}"] for i in range(layers)]
            out[f"decoder.layers.{names.get(rest, rest)}"] = torch.stack(parts)
    return out


def save_in_pieces(folder, tensors):
    """As several ranks would: layers and halves of rows apart."""
    from torch.distributed.checkpoint import save

    folder.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(
            {**tensors, "rng_state/shard_0_1": b"x", "optimizer.state.exp_avg.y": torch.ones(2)},
            checkpoint_id=folder,
            no_dist=True,
        )


@pytest.mark.parametrize("fused_norms", [True, False])
def test_a_checkpoint_of_megatron_lm(pair, tmp_path, capsys, fused_norms):
    folder, run = pair
    ours = dict(PlainCheckpoint(find_checkpoint(run)))
    theirs = stacked(ours, 3, fused_norms)
    assert not any(name.startswith("decoder.layers.0") for name in theirs)
    save_in_pieces(tmp_path / "iter_0000007", theirs)
    command = ("import", "--source", tmp_path / "iter_0000007", "--output", tmp_path / "run")
    assert convert(*command) == 2 and "--model" in capsys.readouterr().err
    model = ("--model", run / "architecture.yaml", "--tokenizer", folder)
    assert convert(*command, *model) == 0
    assert_same_bytes(dict(PlainCheckpoint(find_checkpoint(tmp_path / "run"))), ours)
    assert convert("export", "--checkpoint", tmp_path / "run", "--output", tmp_path / "hf") == 0
    assert_same_bytes(folder_tensors(tmp_path / "hf"), folder_tensors(folder))


def test_a_checkpoint_of_another_megatron_model(pair, tmp_path, capsys):
    _, run = pair
    theirs = stacked(dict(PlainCheckpoint(find_checkpoint(run))), 3, True)
    theirs["decoder.layers.self_attention.linear_qkv.bias"] = torch.zeros(3, 48)
    save_in_pieces(tmp_path / "biased", theirs)
    command = ("--output", tmp_path / "out", "--model", tmp_path / "architecture.yaml")
    (tmp_path / "architecture.yaml").write_text((run / "architecture.yaml").read_text())
    assert convert("import", "--source", tmp_path / "biased", *command) == 2
    error = capsys.readouterr().err
    assert "unknown: decoder.layers.0.self_attention.linear_qkv.bias" in error

    shallow = yaml.safe_load((run / "architecture.yaml").read_text())
    shallow["model"]["num_layers"] = 2
    (tmp_path / "architecture.yaml").write_text(yaml.safe_dump(shallow))
    assert convert("import", "--source", tmp_path / "biased", *command) == 2
    assert "holds 3 layers, model.num_layers is 2" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_layer_of_a_tensor(tmp_path):
    whole = torch.arange(24.0).reshape(6, 4)
    (tmp_path / "c").mkdir()
    specs = {"a": Spec("float32", (6, 4))}
    write_tensors(tmp_path / "c", specs, lambda name: whole, common={"step": 3})
    checkpoint = PlainCheckpoint(tmp_path / "c")
    assert torch.equal(checkpoint["a"], whole)
    assert torch.equal(checkpoint.read("a", layer=4), whole[4])


@pytest.mark.parametrize("loops", [3, 5])
def test_an_imported_ouro_in_our_own_model_code(tmp_path, loops):
    """Under LT2's names: logits of every loop, exit probabilities and cached generation."""
    from megatron_lt2.hf.modeling_lt2 import LT2ForCausalLM

    folder = ouro_folder(tmp_path / "hf")
    assert convert("import", "--source", folder, "--output", tmp_path / "run") == 0
    target = tmp_path / "lt2"
    command = ("export", "--checkpoint", tmp_path / "run", "--output", target)
    assert convert(*command, "--family", "lt2") == 0
    model, reference = LT2ForCausalLM.from_pretrained(target).eval(), random_ouro(OURO)
    reference = reference.float()
    ids = torch.tensor([[5, 3, 44, 17, 8], [60, 0, 2, 2, 31]])
    with torch.no_grad():
        ours, theirs = model(ids, loops=loops, output_exits=True), reference(ids, loops=loops)
    for mine, other in zip(ours.loop_logits, theirs.logits, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-4)
    torch.testing.assert_close(
        ours.exit_probabilities, theirs.exit_probabilities, rtol=0, atol=1e-5
    )
    if loops != OURO.total_ut_steps:
        return
    for ours_choice, theirs_choice in (
        ({}, {}),
        ({"exit_threshold": 0.5}, {"threshold": 0.5}),
        ({"exit_step": 2}, {"step": 1}),
    ):
        expected = reference.generate(ids, 20, **theirs_choice)
        for use_cache in (True, False):
            found = model.generate(
                ids,
                max_new_tokens=20,
                do_sample=False,
                eos_token_id=None,
                use_cache=use_cache,
                **ours_choice,
            )
            assert torch.equal(found, expected), (ours_choice, use_cache)


def test_push_uploads_what_was_written(pair, tmp_path, capsys, monkeypatch):
    calls = []

    class Api:
        def create_repo(self, *args, **kwargs):
            calls.append(("create", args, kwargs))

        def upload_folder(self, *, repo_id, folder_path):
            calls.append(("upload", repo_id, folder_path))

    hub = types.ModuleType("huggingface_hub")
    hub.HfApi = Api
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    target = tmp_path / "hf"
    command = ("export", "--checkpoint", pair[1], "--output", target, "--push", "me/model")
    assert convert(*command) == 0
    assert calls == [
        ("create", ("me/model",), {"private": True, "exist_ok": True}),
        ("upload", "me/model", str(target)),
    ]
    assert "uploaded to" in capsys.readouterr().out

    def offline(self, *args, **kwargs):
        raise RuntimeError("no network")

    Api.create_repo = offline
    assert convert(*command, "--overwrite") == 2
    assert "is written, not uploaded (no network)" in capsys.readouterr().err


def test_the_card_has_the_curve():
    records = [{"kind": "train", "step": i, "loss": 5 - i / 100} for i in range(10, 310, 10)]
    text = _curve(records, 250)
    rows = [line for line in text.split("\n") if line.startswith("| ") and line[2].isdigit()]
    assert 8 <= len(rows) <= 12 and rows[-1] == "| 250 | 2.5000 |"
    assert _curve(records[:1], 250) == ""


@pytest.mark.parametrize("text", ["0", "ten", "5XB"])
def test_a_size_that_is_none(pair, tmp_path, text, capsys):
    with pytest.raises(SystemExit) as exit_code:
        convert("export", "--checkpoint", pair[1], "--output", tmp_path / "x", "--shard-size", text)
    assert exit_code.value.code == 2 and "is no size" in capsys.readouterr().err
