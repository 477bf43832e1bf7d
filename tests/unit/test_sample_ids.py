"""Which rank takes which sample: all of them once, whatever the number of ranks."""

import pytest
import torch
from torch.utils.data import Dataset

from megatron_lt2.data.datasets import micro_batches, sample_ids


def _step(step, global_batch, micro_batch, replicas):
    return [
        sample_ids(
            step, global_batch=global_batch, micro_batch=micro_batch, rank=rank, replicas=replicas
        )
        for rank in range(replicas)
    ]


@pytest.mark.parametrize(
    "micro_batch, replicas", [(1, 1), (2, 1), (1, 3), (2, 3), (4, 3), (12, 1), (1, 12), (3, 4)]
)
def test_every_sample_exactly_once(micro_batch, replicas):
    ranks = _step(5, 12, micro_batch, replicas)
    seen = [i for rank in ranks for ids in rank for i in ids]
    assert sorted(seen) == list(range(60, 72))
    for rank in ranks:
        assert len(rank) == 12 // (micro_batch * replicas)
        assert all(len(ids) == micro_batch for ids in rank)


def test_steps_follow_each_other_without_gap():
    steps = [sorted(i for rank in _step(s, 6, 1, 2) for ids in rank for i in ids) for s in range(4)]
    assert [i for step in steps for i in step] == list(range(24))


def test_ranks_take_turns_within_a_step():
    assert _step(1, 8, 2, 2) == [[[8, 9], [12, 13]], [[10, 11], [14, 15]]]


class _Numbers(Dataset):
    def __getitem__(self, index):
        return {"tokens": torch.full((3,), index)}


@pytest.mark.parametrize("replicas", [1, 2])
def test_loader_resumes_where_the_steps_say(replicas):
    def read(steps):
        return [
            batch["tokens"][:, 0].tolist()
            for batch in micro_batches(
                _Numbers(),
                steps,
                global_batch=4,
                micro_batch=2,
                rank=replicas - 1,
                replicas=replicas,
                num_workers=0,
            )
        ]

    whole = read(range(5))
    assert read(range(2)) + read(range(2, 5)) == whole
    assert whole[0] == ([0, 1] if replicas == 1 else [2, 3])


def test_reading_leaves_the_random_state_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    feed = micro_batches(
        _Numbers(), range(2), global_batch=2, micro_batch=1, rank=0, replicas=1, num_workers=0
    )
    assert len(list(feed)) == 4
    assert torch.equal(torch.get_rng_state(), before)
