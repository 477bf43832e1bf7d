"""A whole run with sparse attention on a pipeline: the indexer's stages, reports and a resume."""

import pytest

from tests.e2e.runs import STEPS, assert_same_run, records, train

SETTINGS = (
    *("--model.pattern", "dsa+[gdn]+dsa", "--model.dsa.latent_dim", 12, "--model.dsa.rope_dim", 4),
    *("--model.dsa.top_k", 4, "--model.dsa.dense_steps", 6, "--model.dsa.index_heads", 3),
    *("--model.dsa.index_dim", 4, "--model.dsa.index_rope_dim", 2),
    *("--parallel.pipeline", 2, "--logging.interval", 2),
)


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    run = tmp_path_factory.mktemp("sparse") / "whole"
    train(run, *config, *SETTINGS, ranks=2).expect(0)
    return run


def test_the_indexers_report(whole):
    reports = records(whole, "train")
    assert [r["step"] for r in reports] == list(range(2, STEPS + 1, 2))
    for report in reports:
        assert 0 < report["indexer_loss"] < 3
        for name in ("selected_mass_loop_1", "selected_mass_loop_2", "selected_overlap_loop_2"):
            assert 0 < report[name] <= 1
        assert "selected_overlap_loop_1" not in report
    dense, sparse = (
        [r["indexer_loss"] for r in reports if (r["step"] <= 6) == early] for early in (True, False)
    )
    assert len(dense) == len(sparse) == 3 and max(sparse) < min(dense)  # of fewer keys


def test_a_resume_knows_its_stage(whole, config, tmp_path):
    run = tmp_path / "run"
    train(run, *config, *SETTINGS, "--training.stop_step", 4, ranks=2).expect(75)
    train(run, *config, *SETTINGS, ranks=2).expect(0)
    assert_same_run(run, whole)
    ours, theirs = ([r["indexer_loss"] for r in records(x, "train")] for x in (run, whole))
    assert ours == pytest.approx(theirs, rel=1e-6)
