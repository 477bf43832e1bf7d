"""The export command: from a checkpoint folder to a Hugging Face folder that stands on its own."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tiny_lt2 import (
    ALL,
    LINEAR,
    LOOPS,
    PATTERN,
    VOCAB,
    own_names,
    tiny_model,
    tiny_run_config,
    training_tensors,
    write_checkpoint,
)
from tiny_text import write_word_tokenizer
from transformers.dynamic_module_utils import get_imports, get_relative_imports

from checkpoints_tools.convert import main
from checkpoints_tools.hf_folder import new_folder
from checkpoints_tools.model_code import copy_model_code, flatten_imports
from checkpoints_tools.plain_checkpoint import PlainCheckpoint
from checkpoints_tools.safetensors_files import Spec
from checkpoints_tools.safetensors_writer import SafetensorsWriter
from megatron_lt2.data.tokenizer import load_tokenizer
from megatron_lt2.hf.modeling_lt2 import LT2ForCausalLM

ROOT = Path(__file__).resolve().parents[2]
WORDS = {f"w{i}": i for i in range(VOCAB - 1)}
IDS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 9, 7]]

CODE = {
    "cache_lt2.py",
    "configuration_lt2.py",
    "exits_lt2.py",
    "kernels_backend.py",
    "kernels_conv.py",
    "kernels_conv_triton.py",
    "kernels_gdn.py",
    "kernels_guards.py",
    "kernels_norms.py",
    "layers_lt2.py",
    "linear_lt2.py",
    "masks_lt2.py",
    "modeling_lt2.py",
    "ops_chunks.py",
    "ops_conv.py",
    "ops_documents.py",
    "ops_dsa.py",
    "ops_gathered.py",
    "ops_gdn.py",
    "ops_nsa.py",
    "ops_norms.py",
    "ops_reach.py",
    "ops_rope.py",
    "ops_sparse_layout.py",
    "pretrained_lt2.py",
    "recurrent_base.py",
    "recurrent_gdn.py",
    "recurrent_initial.py",
    "recurrent_names.py",
    "sparse_lt2.py",
    "sparse_slots_lt2.py",
}


def make_run(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    tied: bool = True,
    mixers: Sequence[str] = PATTERN,
) -> Path:
    """A finished run: tokenizer, metrics and one checkpoint of the tiny model."""
    folder.mkdir(parents=True)
    tokenizer = load_tokenizer(
        write_word_tokenizer(folder / "words.json", WORDS, eos="<|endoftext|>")
    )
    tokenizer.save(folder / "tokenizer")
    records = [
        {"kind": "train", "step": 20, "loss": 3.5},
        {"kind": "eval", "step": 30, "loss": 3.25, "split": "valid"},
        {"kind": "train", "step": 30, "loss": 3.125},
        {"kind": "train", "step": 40, "loss": 1.0},
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines + '{"kind": "train", "st')
    model = tiny_model(tie_word_embeddings=tied, mixers=list(mixers))
    own = {name.rsplit(".", 1)[-1] for name in own_names(model)}
    tensors = {
        name: x if name.rsplit(".", 1)[-1] in own else x.to(dtype)
        for name, x in training_tensors(model).items()
    }
    changes = {"pattern": list(mixers), "num_layers": len(mixers), "tie_embeddings": tied}
    write_checkpoint(folder, tensors, tiny_run_config(**changes))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("export") / "run")


@pytest.fixture(scope="module")
def exported(run):
    output = run.parent / "hf"
    assert main(["export", "--checkpoint", str(run / "checkpoints"), "--output", str(output)]) == 0
    return output


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def export(capsys, *arguments: object) -> tuple[int, str]:
    """Exit code and the one line on stderr."""
    code = main(["export", *map(str, arguments)])
    return code, capsys.readouterr().err


def test_files_of_an_export(exported):
    assert files(exported) == CODE | {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    for name in CODE:
        text = (exported / name).read_text()
        assert "from .." not in text
        assert "import megatron_lt2" not in text and "from megatron_lt2" not in text
    assert files(exported.parent) == {"run", "hf"}


@pytest.mark.parametrize("mixers", [["full"], ["window", "linear"], ALL], ids=str)
def test_the_modeling_file_imports_every_other_file_itself(tmp_path, mixers):
    written = set(copy_model_code(tmp_path, mixers))
    assert files(tmp_path) == written
    text = (tmp_path / "modeling_lt2.py").read_text()
    imported = set(re.findall(r"^from \.(\w+) import", text, re.MULTILINE))
    assert {f"{name}.py" for name in imported} == written - {"modeling_lt2.py"}
    files_of_mixers = {f"recurrent_{name}.py" for name in LINEAR}
    assert (
        written & files_of_mixers == {f"recurrent_{name}.py" for name in mixers} & files_of_mixers
    )


def test_the_configuration_file_imports_only_what_imports_nothing(tmp_path):
    """It is loaded by itself, and transformers 5.6 copies its own imports and no further ones."""
    copy_model_code(tmp_path, ALL)
    assert get_relative_imports(tmp_path / "configuration_lt2.py") == ["recurrent_names"]
    assert get_relative_imports(tmp_path / "recurrent_names.py") == []


def test_exported_code_needs_torch_and_transformers_only(tmp_path):
    copy_model_code(tmp_path, ALL)
    needed = {name for path in tmp_path.iterdir() for name in get_imports(path)}
    assert needed - set(sys.stdlib_module_names) == {"torch", "transformers", "packaging"}


def test_imports_are_made_flat():
    text = (
        "from typing import Any\n"
        "from ..ops import conv, norms as n\n"
        "from ..ops.gdn import (\n    step,\n)\n"
        "if Any:\n"
        "    from .base import Layout as L\n"
        "    from . import names\n"
        "x = 'from .base import y'\n"
    )
    flat, imported = flatten_imports(text, "recurrent")
    assert flat == (
        "from typing import Any\n"
        "from . import ops_conv as conv, ops_norms as n\n"
        "from .ops_gdn import (\n    step,\n)\n"
        "if Any:\n"
        "    from .recurrent_base import Layout as L\n"
        "    from . import recurrent_names as names\n"
        "x = 'from .base import y'\n"
    )
    assert sorted(imported) == [
        ("ops", "conv"),
        ("ops", "gdn"),
        ("ops", "norms"),
        ("recurrent", "base"),
        ("recurrent", "names"),
    ]


def test_config_and_generation_config(exported):
    config = json.loads((exported / "config.json").read_text())
    assert config["model_type"] == "lt2"
    assert config["architectures"] == ["LT2ForCausalLM"]
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_lt2.LT2ForCausalLM"
    assert config["dtype"] == "float32"
    assert (config["loops"], config["mixers"], config["vocab_size"]) == (LOOPS, PATTERN, VOCAB)
    generation = json.loads((exported / "generation_config.json").read_text())
    eos = VOCAB - 1
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (eos, eos)
    tokenizer = json.loads((exported / "tokenizer_config.json").read_text())
    assert tokenizer["padding_side"] == "left"
    assert tokenizer["pad_token"] == "<|endoftext|>"


def test_the_card_states_the_training_facts(exported):
    card = (exported / "README.md").read_text()
    parameters = sum(p.numel() for p in tiny_model().parameters())
    for fact in (
        "| steps | 30 of 1000 |",
        "| tokens | 12,345 |",
        "| last training loss | 3.1250 nat/token (step 30) |",
        "| last validation loss | 3.2500 nat/token (step 30) |",
        f"| parameters | {parameters:,} (float32) |",
        "| mixers | 1 full, 2 gdn |",
        "| attention | 4 heads of 10, 2 key/value heads, output gate on, rotary base 10000 |",
        "| gdn | 3 heads, 7 key and 9 value channels a head, ",
        "| data | corpus |",
        f"{LOOPS * len(PATTERN)} in all",
    ):
        assert fact in card, fact
    assert "/somewhere" not in card


def test_the_package_reads_back_the_same_weights(exported):
    model, loaded = tiny_model(), LT2ForCausalLM.from_pretrained(exported)
    expected = model.state_dict()
    assert all(torch.equal(x, expected[name]) for name, x in loaded.state_dict().items())


FRESH = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, output, ids = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
try:
    import megatron_lt2
    sys.exit("megatron_lt2 can be imported here")
except ImportError:
    pass
model, report = AutoModelForCausalLM.from_pretrained(
    folder, trust_remote_code=True, output_loading_info=True
)
assert not any(report[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
ids = torch.tensor(ids)
with torch.no_grad():
    out = model(ids)
cache = out["cache"] if "cache" in out else out["past_key_values"]
greedy = [
    model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, use_cache=use_cache)
    for use_cache in (True, False)
]
batch = tokenizer(["w3 w4 w5", "w7"], return_tensors="pt", padding=True)
torch.save({
    "logits": out.logits,
    "greedy": greedy,
    "batch": dict(batch),
    "slots": len(cache),
    "module": type(model).__module__,
}, output)
model.save_pretrained(sys.argv[4])
"""


def in_a_fresh_process(folder: Path, tmp_path: Path) -> dict:
    """Load and run an export where only torch and transformers can be imported, offline."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "PYTHON"))}
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    for name in ("megatron_lt2", "checkpoints_tools", "megatron", "fla"):
        (blocked / f"{name}.py").write_text(f"raise ImportError('{name} is not installed')\n")
    environment = keep | {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "home"),
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
        "PYTHONPATH": str(blocked),
        "OMP_NUM_THREADS": "1",
    }
    result, again = tmp_path / "result.pt", tmp_path / "saved-again"
    command = [sys.executable, "-c", FRESH, str(folder), str(result), json.dumps(IDS), str(again)]
    done = subprocess.run(
        command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return torch.load(result, weights_only=True) | {"again": again}


def test_a_process_without_our_package_gets_the_same_logits(exported, tmp_path):
    # A copy under another name: nothing may depend on where an export lies.
    folder = shutil.copytree(exported, tmp_path / "my.model-v1")
    result = in_a_fresh_process(folder, tmp_path)
    model = tiny_model()
    with torch.no_grad():
        expected = model(torch.tensor(IDS)).logits
    torch.testing.assert_close(result["logits"], expected, rtol=0, atol=1e-6)
    assert torch.equal(*result["greedy"])
    own = model.generate(torch.tensor(IDS), max_new_tokens=12, do_sample=False)
    assert torch.equal(result["greedy"][0], own)
    assert result["batch"]["input_ids"].tolist() == [[3, 4, 5], [VOCAB - 1, VOCAB - 1, 7]]
    assert result["batch"]["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert result["slots"] == LOOPS * len(PATTERN)
    assert result["module"].startswith("transformers_modules.")
    assert files(result["again"]) >= CODE | {"config.json", "model.safetensors"}


def test_every_mixer_in_a_process_without_our_package(tmp_path):
    run = make_run(tmp_path / "run", mixers=ALL)
    folder = tmp_path / "hf"
    assert main(["export", "--checkpoint", str(run), "--output", str(folder)]) == 0
    result = in_a_fresh_process(folder, tmp_path)
    model = tiny_model(mixers=ALL)
    with torch.no_grad():
        expected = model(torch.tensor(IDS)).logits
    torch.testing.assert_close(result["logits"], expected, rtol=0, atol=1e-5)
    assert torch.equal(*result["greedy"])
    code = {name for name in files(folder) if name.endswith(".py")}
    assert files(result["again"]) >= code > CODE
    card = (folder / "README.md").read_text()
    assert all(f"\n| {name} | " in card for name in ALL if name != "full")


def test_bf16_export_keeps_fp32_parameters(run, tmp_path, capsys):
    output = tmp_path / "hf"
    code, _ = export(capsys, "--checkpoint", run, "--output", output, "--dtype", "bfloat16")
    assert code == 0
    loaded = LT2ForCausalLM.from_pretrained(output).state_dict()
    own = own_names(tiny_model())
    for name, tensor in tiny_model().state_dict().items():
        fp32 = name in own
        assert loaded[name].dtype == (torch.float32 if fp32 else torch.bfloat16), name
        assert torch.equal(loaded[name], tensor.to(loaded[name].dtype)), name


def test_as_saved_keeps_bf16_and_float32_widens_it(tmp_path, capsys):
    run = make_run(tmp_path / "run", dtype=torch.bfloat16, tied=False)
    for arguments, dtype in (([], torch.bfloat16), (["--dtype", "float32"], torch.float32)):
        output = tmp_path / str(dtype)
        step = run / "checkpoints" / "iter_0000030"
        assert export(capsys, "--checkpoint", step, "--output", output, *arguments)[0] == 0
        loaded = LT2ForCausalLM.from_pretrained(output)
        assert loaded.dtype == dtype
        head = tiny_model(tie_word_embeddings=False).lm_head.weight
        assert torch.equal(loaded.lm_head.weight, head.bfloat16().to(dtype))


def test_large_models_are_sharded_with_an_index(tmp_path):
    model = tiny_model()
    names = [n for n in model.state_dict() if n != "lm_head.weight"]
    specs = {name: Spec("float32", tuple(model.state_dict()[name].shape)) for name in names}
    writer = SafetensorsWriter(tmp_path, specs, max_bytes=12_000)
    for name in names:
        writer.add(name, model.state_dict()[name].clone())
    writer.close()
    model.config.save_pretrained(tmp_path)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    assert all(path.stat().st_size < 12_000 + 5_000 for path in shards)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == sorted(names)
    assert index["metadata"]["total_size"] == sum(4 * model.state_dict()[n].numel() for n in names)
    loaded = LT2ForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(x, loaded.state_dict()[n]) for n, x in model.state_dict().items())


def test_the_newest_complete_checkpoint_is_taken(run, tmp_path, capsys):
    copied = shutil.copytree(run, tmp_path / "run")
    newer = shutil.copytree(
        copied / "checkpoints/iter_0000030", copied / "checkpoints/iter_0000040"
    )
    (newer / "run_config.yaml").write_text("")
    older = shutil.copytree(newer, copied / "checkpoints/iter_0000020")
    (older / "manifest.json").unlink()
    code, errors = export(capsys, "--checkpoint", copied, "--output", tmp_path / "hf")
    assert code == 0
    assert "passed over" in errors and "iter_0000040" in errors and "iter_0000020" in errors
    assert "step 30" in (tmp_path / "hf/README.md").read_text()
    code, errors = export(capsys, "--checkpoint", newer, "--output", tmp_path / "other")
    assert code == 2 and "not a whole checkpoint" in errors and errors.count("\n") == 1
    assert not (tmp_path / "other").exists()


def _broken(name: str, run: Path) -> list[str]:
    """Break a copy of a run in one way; returns further arguments."""
    step = run / "checkpoints" / "iter_0000030"
    if name == "no tokenizer":
        shutil.rmtree(run / "tokenizer")
    elif name == "no checkpoint":
        shutil.rmtree(step)
    elif name == "no folder":
        shutil.rmtree(run)
    elif name == "foreign tokenizer":
        path = write_word_tokenizer(
            run / "large.json", {f"v{i}": i for i in range(VOCAB)}, eos="<|endoftext|>"
        )
        return ["--tokenizer", str(path)]
    elif name == "missing tensor":
        tensors = training_tensors(tiny_model())
        del tensors["decoder.final_layernorm.weight"]
        shutil.rmtree(step)
        write_checkpoint(run, tensors, tiny_run_config())
    elif name == "other width":
        config = tiny_run_config(ffn_hidden_size=48)
        shutil.rmtree(step)
        write_checkpoint(run, training_tensors(tiny_model()), config)
    elif name == "damaged contents":
        damaged = b"x" * (step / ".metadata").stat().st_size
        (step / ".metadata").write_bytes(damaged)
    return []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no tokenizer", "the run keeps no tokenizer; name one with --tokenizer"),
        ("no checkpoint", "no complete checkpoint in this folder"),
        ("no folder", "no such folder"),
        ("foreign tokenizer", "has ids up to 61, the model knows 61 only"),
        ("missing tensor", "missing: decoder.final_layernorm.weight"),
        ("other width", "linear_fc1.weight has shape (88, 32), expected (96, 32)"),
        ("damaged contents", ".metadata: cannot be read"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing_behind(run, tmp_path, capsys, name, message):
    copied = shutil.copytree(run, tmp_path / "run")
    extra = _broken(name, copied)
    code, errors = export(
        capsys, "--checkpoint", copied / "checkpoints", "--output", tmp_path / "hf", *extra
    )
    assert code == 2
    assert message in errors and errors.startswith("error: ") and errors.count("\n") == 1
    assert files(tmp_path) <= {"run"}


def test_an_existing_folder_is_replaced_only_when_asked_and_only_an_export(run, tmp_path, capsys):
    output = tmp_path / "hf"
    arguments = ("--checkpoint", run, "--output", output)
    assert export(capsys, *arguments)[0] == 0
    (output / "note.txt").write_text("mine")
    code, errors = export(capsys, *arguments)
    assert code == 2 and "already exists" in errors and (output / "note.txt").exists()
    assert export(capsys, *arguments, "--overwrite")[0] == 0
    assert not (output / "note.txt").exists() and files(tmp_path) == {"hf"}

    (output / "config.json").write_text('{"model_type": "llama"}')
    code, errors = export(capsys, *arguments, "--overwrite")
    assert code == 2 and "no exported LT2 model" in errors
    output.joinpath("config.json").unlink()
    assert export(capsys, *arguments, "--overwrite")[0] == 2
    assert (output / "model.safetensors").exists()
    file = tmp_path / "file"
    file.write_text("")
    code, errors = export(capsys, "--checkpoint", run, "--output", file)
    assert code == 2 and "is a file" in errors


def test_a_failing_block_leaves_the_old_folder(tmp_path):
    target = tmp_path / "hf"
    target.mkdir()
    (target / "config.json").write_text('{"model_type": "lt2"}')
    with pytest.raises(RuntimeError), new_folder(target, overwrite=True) as folder:
        (folder / "half").write_text("")
        raise RuntimeError
    assert files(tmp_path) == {"hf"} and files(target) == {"config.json"}


def test_another_tokenizer_file_is_warned_about(run, tmp_path, capsys):
    path = write_word_tokenizer(
        tmp_path / "other.json", {f"v{i}": i for i in range(VOCAB - 1)}, eos="<|endoftext|>"
    )
    code, errors = export(
        capsys, "--checkpoint", run, "--output", tmp_path / "hf", "--tokenizer", path
    )
    assert code == 0 and "is not the tokenizer that the run was trained with" in errors


def test_reading_lists_tensors_only(run):
    tensors = PlainCheckpoint(run / "checkpoints/iter_0000030")
    assert not any("shard" in name for name in tensors)
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    assert torch.equal(tensors[name], training_tensors(tiny_model())[name])
    assert len(tensors) == len(list(tensors))


def test_by_path_help_and_export_need_no_working_folder(run, tmp_path):
    script = str(ROOT / "checkpoints_tools" / "convert.py")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    for flags in ([], ["-P"]):
        done = subprocess.run(
            [sys.executable, *flags, script, "export", "--checkpoint", "absent", "--output", "hf"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 2
        assert done.stderr == "error: absent: no such folder\n"
    loaded = [
        sys.executable,
        "-X",
        "importtime",
        script,
        "export",
        "--help",
    ]
    done = subprocess.run(loaded, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "--tokenizer" in done.stdout
    assert "torch" not in done.stderr and "transformers" not in done.stderr
