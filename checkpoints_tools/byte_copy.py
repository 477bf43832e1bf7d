"""Tensors moved from file to file as bytes.

A tensor that keeps its dtype is only laid out anew by a conversion: its mapping says which runs of
bytes of one file become which runs of the other. They are copied in blocks that stay in the
processor's cache. To bring whole tensors into memory takes as long again: on a virtual machine,
pages of fresh memory are what costs most.
"""

import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Run = tuple[int, int]
"""First byte, and number of bytes."""

BLOCK = 1024**2


def runs_of(view: "Tensor", begin: int = 0) -> list[Run]:
    """Where the elements of a view lie, in their order, as few runs as there are.

    Args:
        view: of a tensor that begins its storage; on the meta device it takes no memory.
        begin: where that tensor begins in its file.
    """
    size, shape, strides = view.element_size(), view.shape, view.stride()
    if not view.numel():
        return []
    length, outer = size, view.dim()
    while outer and (shape[outer - 1] == 1 or strides[outer - 1] * size == length):
        outer -= 1
        length *= shape[outer]
    starts = [begin + int(view.storage_offset()) * size]
    for count, stride in zip(shape[:outer], strides[:outer], strict=True):
        starts = [start + i * stride * size for start in starts for i in range(count)]
    return [(start, length) for start in starts]


def meta(shape: Sequence[int], dtype: str) -> "Tensor":
    """A tensor without data, for a mapping to make views of."""
    import torch

    return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="meta")


class Record:
    """What torch.save made of one tensor: a zip file of `length` bytes from `start` on.

    data: where the tensor's storage begins, in the stream.
    byteorder: "little" or "big".
    """

    def __init__(self, stream: Any, start: int, length: int) -> None:
        import torch
        from torch.distributed.checkpoint.utils import _create_file_view

        view: Any = _create_file_view(stream, start, length)
        reader: Any = torch._C.PyTorchFileReader(view)
        self.data = start + int(reader.get_record_offset("data/0"))
        self.byteorder = reader.get_record("byteorder").decode()


class ByteCopier:
    """Copies runs of bytes; keeps one block of memory for all of them."""

    def __init__(self) -> None:
        self._block = memoryview(mmap.mmap(-1, BLOCK))  # whole pages, which are copied faster

    def copy(self, path: Path, runs: Sequence[Run], target: Any, places: Sequence[Run]) -> None:
        """Write what lies in `runs` of the file `path` to `places` of the open file `target`.

        Both have as many bytes. The position of `target` stays where it is.

        Raises:
            OSError: `path` ends too early or cannot be read, or `target` cannot be written.
        """
        assert sum(n for _, n in runs) == sum(n for _, n in places), f"{path}: {runs} to {places}"
        out = target.fileno()
        with open(path, "rb", buffering=0) as stream:
            for start, place, count in _together(runs, places):
                self._copy_run(path, stream.fileno(), start, out, place, count)

    def _copy_run(
        self, path: Path, source: int, start: int, target: int, place: int, count: int
    ) -> None:
        end = start + count
        while start < end:
            try:
                got = os.preadv(source, [self._block[: end - start]], start)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(path)) from None
            if not got:
                raise OSError(f"{path}: ended {end - start} bytes too early")
            rest, start = self._block[:got], start + got
            while rest:
                written = os.pwrite(target, rest, place)
                rest, place = rest[written:], place + written


def _together(one: Sequence[Run], other: Sequence[Run]) -> Iterator[tuple[int, int, int]]:
    """(begin in one, begin in the other, bytes), cut wherever a run of either ends."""
    left, right = ([run for run in reversed(runs) if run[1]] for runs in (one, other))
    while left:
        (a, m), (b, n) = left.pop(), right.pop()
        count = min(m, n)
        yield a, b, count
        if m > count:
            left.append((a + count, m - count))
        if n > count:
            right.append((b + count, n - count))
