"""Bad input ends with exit code 2 and one line that names the file or the setting."""

import shutil

import pytest
import yaml

from megatron_lt2.data.manifest import data_paths, manifest_path
from tests.e2e.runs import STEPS, call, command, records, train
from tests.unit.tiny_text import write_tokenizer


def assert_refused(ended, *fragments):
    """The only error line, which has all fragments."""
    assert set(ended.codes) == {2}, (ended.codes, ended.out, ended.err)
    assert "Traceback" not in ended.out + ended.err
    assert len(ended.error_lines) == 1, ended.err
    (line,) = ended.error_lines
    for fragment in fragments:
        assert str(fragment) in line
    return line


def _changed_config(data, path, **sections):
    values = yaml.safe_load((data / "config.yaml").read_text())
    for name, changes in sections.items():
        values.setdefault(name, {}).update(changes)
    path.write_text(yaml.safe_dump(values))
    return path


def _untouched(run):
    assert not run.exists(), sorted(p.name for p in run.rglob("*"))


# Found before anything is allocated or written: what is wrong, and what the line must say.
SETTINGS = {
    "unknown option": (["--model.lopps", "2"], ["--model.lopps", "model.loops"]),
    "wrong type": (["--model.loops", "two"], ["model.loops", "two"]),
    "not one of the choices": (["--optimizer.schedule", "step"], ["optimizer.schedule", "step"]),
    "no loops": (["--model.loops", "0"], ["model.loops", "0"]),
    "global batch": (["--training.global_batch_size", "7"], ["training.global_batch_size 7"]),
    "head dimension": (["--model.num_heads", "3"], ["model.hidden_size 32", "model.num_heads 3"]),
    "unknown mixer": (["--model.pattern", "gdn+mamba"], ["mamba"]),
    "ranks": (["--parallel.tensor", "2"], ["parallel.tensor 2", "1 ranks"]),
    "warm-up": (["--optimizer.warmup_steps", "12"], ["optimizer.warmup_steps 12"]),
    "split": (["--data.split", "98,2"], ["data.split '98,2'"]),
    "no validation share": (["--data.split", "100,0,0"], ["data.split", "eval_batches"]),
    "pipeline": (["--parallel.pipeline", "2"], ["1 ranks", "parallel.pipeline 2"]),
    "context": (["--parallel.context", "2"], ["1 ranks", "parallel.context 2"]),
    "loss at exits": (["--model.loss", "exits"], ["model.loss 'exits'"]),
    "fp8": (
        ["--megatron.transformer", "{fp8: hybrid}"],
        ["megatron.transformer.fp8", "precision.fp8"],
    ),
    "fp8 without a GPU": (["--precision.fp8", "current"], ["precision.fp8 current", "no GPU here"]),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(config, tmp_path, name):
    arguments, fragments = SETTINGS[name]
    assert_refused(train(tmp_path / "run", *config, *arguments), *fragments)
    _untouched(tmp_path / "run")


def test_unknown_key_in_the_file(data, tmp_path):
    path = _changed_config(data, tmp_path / "run.yaml", model={"lopps": 2})
    assert_refused(
        train(tmp_path / "run", "--config", path), path, "model.lopps", "did you mean loops"
    )
    _untouched(tmp_path / "run")


def test_no_config_file(tmp_path):
    """From the command line as users type it; the others call `main` in a forked process."""
    argv = command("--config", tmp_path / "none.yaml", "--run_dir", tmp_path / "run")
    assert_refused(call(argv), tmp_path / "none.yaml")
    _untouched(tmp_path / "run")


def test_config_file_that_is_no_yaml(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model:\n  loops: [2\n")
    assert_refused(train(tmp_path / "run", "--config", path), f"{path}:3")


def test_no_data_path(config, tmp_path):
    assert_refused(train(tmp_path / "run", *config, "--data.path", "[]"), "data.path")
    _untouched(tmp_path / "run")


def test_data_without_manifest(config, data, tmp_path):
    for path in data_paths(data / "corpus"):
        shutil.copy(path, tmp_path)
    prefix = tmp_path / "corpus"
    assert_refused(train(tmp_path / "run", *config, "--data.path", prefix), manifest_path(prefix))
    _untouched(tmp_path / "run")


def test_data_that_was_cut_short(config, data, tmp_path):
    for path in (*data_paths(data / "corpus"), manifest_path(data / "corpus")):
        shutil.copy(path, tmp_path)
    victim = tmp_path / "corpus.bin"
    victim.write_bytes(victim.read_bytes()[:-2])
    assert_refused(
        train(tmp_path / "run", *config, "--data.path", tmp_path / "corpus"), victim, "bytes"
    )
    _untouched(tmp_path / "run")


def test_data_of_another_tokenizer(config, data, tmp_path):
    other = write_tokenizer(tmp_path / "other", 310)
    ended = train(tmp_path / "run", *config, "--data.tokenizer", other)
    assert_refused(ended, manifest_path(data / "corpus"), other, "another tokenizer")
    _untouched(tmp_path / "run")


def test_no_tokenizer_folder(config, tmp_path):
    ended = train(tmp_path / "run", *config, "--data.tokenizer", tmp_path / "none")
    assert_refused(ended, tmp_path / "none")
    _untouched(tmp_path / "run")


def test_vocabulary_smaller_than_the_tokenizer(config, data, tmp_path):
    ended = train(tmp_path / "run", *config, "--model.vocab_size", "299")
    assert_refused(ended, "model.vocab_size 299", "300", data / "tokenizer")
    _untouched(tmp_path / "run")


@pytest.mark.parametrize(
    "arguments, fragments",
    [
        (["--data.sequence_length", "10000"], ["training split", "10000"]),
        (["--data.split", "99.9,0.1,0"], ["validation split has 0 tokens", "data.split"]),
    ],
    ids=["too few tokens for a sequence", "empty validation split"],
)
def test_too_little_data(config, data, tmp_path, arguments, fragments):
    run = tmp_path / "run"
    assert_refused(train(run, *config, *arguments), data / "corpus", *fragments)
    _untouched(run)


def test_a_corpus_of_a_few_words(config, data, tmp_path):
    ended = train(tmp_path / "run", *config, "--data.path", data / "two")
    assert_refused(ended, data / "two", "tokens", "data.sequence_length 32")
    _untouched(tmp_path / "run")


@pytest.mark.parametrize(
    "section, field, value, fragments",
    [
        (
            *("transformer", "batch_invarant_mode", True),
            ["megatron.transformer.batch_invarant_mode", "did you mean batch_invariant_mode"],
        ),
        ("transformer", "num_layers", 4, ["megatron.transformer.num_layers", "model.num_layers"]),
        (
            *("transformer", "recompute_granularity", "full"),
            ["megatron.transformer.recompute_granularity", "memory.recompute_layers"],
        ),
        ("ddp", "bucket_sizes", 1, ["megatron.ddp.bucket_sizes", "did you mean bucket_size"]),
        (
            *("ddp", "use_distributed_optimizer", True),
            ["megatron.ddp.use_distributed_optimizer", "parallel.distributed_optimizer"],
        ),
        ("optimizer", "adam_bta1", 0.9, ["megatron.optimizer.adam_bta1", "adam_beta1"]),
        ("optimizer", "lr", 0.1, ["megatron.optimizer.lr", "owned by optimizer.lr"]),
        # A field that there is, with a value that megatron-core refuses itself.
        ("transformer", "cuda_graph_impl", "sideways", ["sideways"]),
    ],
)
def test_fields_of_megatron_core(data, tmp_path, section, field, value, fragments):
    path = _changed_config(data, tmp_path / "run.yaml", megatron={section: {field: value}})
    ended = train(tmp_path / "run", "--config", path)
    assert_refused(ended, *fragments)
    _untouched(tmp_path / "run")


@pytest.mark.parametrize(
    "arguments, fragments",
    [
        (["--model.loops", "3"], ["model.loops 2", "3"]),
        (["--model.ffn_hidden_size", "64"], ["model.ffn_hidden_size 48", "64"]),
        (["--model.gdn.conv_size", "3"], ["model.gdn.conv_size 4", "3"]),
        (["--training.global_batch_size", "4"], ["training.global_batch_size 8", "4"]),
    ],
)
def test_resuming_with_another_model(undisturbed, config, arguments, fragments):
    run, _ = undisturbed(1)

    def contents():
        own = (path for path in run.rglob("*") if path.is_file() and path.name != ".lock")
        # Its heartbeat says when it was last alive.
        return {path: path.read_bytes() for path in own if path.name != "heartbeat.json"}

    before = contents()
    assert_refused(train(run, *config, *arguments), "iter_0000012", *fragments)
    assert contents() == before
    assert len(records(run, "train")) == STEPS


def test_heads_that_tensor_parallelism_does_not_divide(config, tmp_path):
    """With two ranks the line still appears once."""
    heads = ["--model.num_heads", "3", "--model.num_kv_heads", "3", "--model.head_dim", "8"]
    ended = train(tmp_path / "run", *config, *heads, "--parallel.tensor", "2", ranks=2)
    assert_refused(ended, "heads 3", "parallel.tensor 2")
    _untouched(tmp_path / "run")


@pytest.mark.parametrize(
    "arguments, fragments",
    [
        (["--data.sequence_length", "10000"], ["training split"]),
        (["--megatron.ddp", "{bucket_sizes: 1}"], ["megatron.ddp.bucket_sizes"]),
    ],
)
def test_two_ranks_say_it_once(config, tmp_path, arguments, fragments):
    """Also what is found late, when the ranks talk to each other; started as users do."""
    argv = command(*config, "--run_dir", tmp_path / "run", *arguments, ranks=2)
    assert_refused(call(argv), *fragments)
    _untouched(tmp_path / "run")


def test_folders_that_were_there_stay(config, tmp_path):
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    (run / "notes.txt").write_text("mine")
    assert_refused(train(run, *config, "--data.sequence_length", "10000"), "training split")
    assert [path.name for path in run.iterdir() if path.name != ".lock"] == ["notes.txt"]
    assert_refused(train(run / "deep" / "er", *config, "--data.sequence_length", "10000"), "split")
    assert not (run / "deep" / "er").exists()
