"""The bar that every conversion shows on a terminal."""

from typing import Any


def progress_bar(total: int, *, shown: bool) -> Any:
    """A tqdm bar over tensors; silent where stderr is no terminal."""
    from tqdm import tqdm

    return tqdm(total=total, unit="tensor", disable=None if shown else True)
