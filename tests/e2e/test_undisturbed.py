"""A whole run from the command line, on one rank and on two: exit code, files, learning."""

import pytest
import yaml

from megatron_lt2.config.load import load_saved, to_yaml
from megatron_lt2.training.checkpoint_files import newest_complete, read_manifest
from tests.e2e.runs import STEPS, TINY, checkpoint_names, curve, records, train

TRAIN_FIELDS = {
    *("step", "time", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "tflops", "mfu"),
    *("memory_gb", "data_wait_s", "step_s"),
}
TOKENS_PER_STEP = TINY["training"]["global_batch_size"] * TINY["data"]["sequence_length"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_whole_run(undisturbed, data, ranks):
    run, ended = undisturbed(ranks)
    ended.expect(0)
    assert "Traceback" not in ended.err
    assert f"step {STEPS}/{STEPS} (100%)" in ended.out

    reports = records(run, "train")
    assert [report["step"] for report in reports] == list(range(1, STEPS + 1))
    for report in reports:
        assert report.keys() >= TRAIN_FIELDS
        assert report["mfu"] is None, "a CPU has no named peak"
        assert report["tokens"] == report["step"] * TOKENS_PER_STEP
        assert report["step_s"] > 0 and report["memory_gb"] > 0.01
    evaluations = records(run, "eval")
    assert [(e["step"], e["split"]) for e in evaluations] == [(6, "validation"), (12, "validation")]
    assert [c["step"] for c in records(run, "checkpoint")] == [4, 8, 12]
    assert records(run, "start")[-1]["ranks"] == ranks
    (end,) = records(run, "end")
    assert (end["step"], end["exit_code"]) == (STEPS, 0)

    assert reports[-1]["loss"] < reports[0]["loss"] - 2
    assert evaluations[1]["loss"] < evaluations[0]["loss"] - 0.5

    saved = load_saved(run / "config.yaml")
    assert to_yaml(saved) == (run / "config.yaml").read_text()
    assert (saved.run_dir, saved.model.vocab_size) == (str(run), 300)
    assert saved.optimizer.schedule == "wsd"
    assert "megatron_lt2.train" in (run / "cmd.txt").read_text()
    assert "torch" in (run / "env.txt").read_text()
    assert list((run / "tensorboard").iterdir())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copy = run / "tokenizer" / name
        assert copy.read_bytes() == (data / "tokenizer" / name).read_bytes()


@pytest.mark.parametrize("ranks", [1, 2])
def test_its_checkpoints(undisturbed, ranks):
    run, _ = undisturbed(ranks)
    assert checkpoint_names(run) == ["iter_0000008", "iter_0000012", "latest"]
    newest = newest_complete(run / "checkpoints")
    assert (run / "checkpoints" / "latest").read_text() == newest.name + "\n" == "iter_0000012\n"
    manifest = read_manifest(newest)
    assert (manifest["step"], manifest["tokens"]) == (STEPS, STEPS * TOKENS_PER_STEP)
    files = {p.name for p in newest.iterdir()} - {"manifest.json"}
    assert set(manifest["files"]) == files >= {"run_config.yaml", ".metadata"}
    in_checkpoint = yaml.safe_load((newest / "run_config.yaml").read_text())
    assert in_checkpoint == yaml.safe_load((run / "config.yaml").read_text())


def test_two_ranks_see_the_batches_of_one(undisturbed):
    one, two = (curve(undisturbed(ranks)[0]) for ranks in (1, 2))
    # Later steps amplify the rounding of another order of sums.
    for step in (1, 2, 3):
        assert one[step] == pytest.approx(two[step], rel=1e-4)


def test_a_finished_run_started_again_trains_no_step(undisturbed, config):
    run, _ = undisturbed(1)
    before = records(run, "train")
    ended = train(run, *config).expect(0)
    assert f"resuming at step {STEPS}" in ended.out
    assert records(run, "train") == before
    assert checkpoint_names(run) == ["iter_0000008", "iter_0000012", "latest"]
