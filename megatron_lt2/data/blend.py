"""Several streams of sequences mixed by weight."""

import numpy as np
import torch
from torch.utils.data import Dataset


class Blend(Dataset[dict[str, torch.Tensor]]):
    """Sequence n comes from the data set that is furthest behind its share.

    So every beginning of the list has the shares as exactly as whole sequences allow, and a longer
    list begins like a shorter one.

    Args:
        datasets: any number of sequences can be asked of each.
        weights: the share of each, greater than 0.
        count: sequences in all.
    """

    def __init__(self, datasets: list[Dataset], weights: list[float], count: int) -> None:
        from megatron.core.datasets import helpers

        self.datasets = datasets
        self.which = np.zeros(count, np.int16)
        self.index = np.zeros(count, np.int64)
        shares = np.asarray(weights, np.float64) / sum(weights)
        helpers.build_blending_indices(self.which, self.index, shares, len(datasets), count, False)

    def __len__(self) -> int:
        return len(self.which)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.datasets[self.which[index]][int(self.index[index])]
