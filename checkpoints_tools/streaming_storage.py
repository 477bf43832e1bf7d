"""torch's checkpoint files, written without keeping what is written.

torch's own FileSystemWriter holds on to every tensor until its file is complete, so a checkpoint
larger than memory cannot pass through it. The files are the same but for the check sums inside,
which torch does not look at and which take longer than the writing.

A tensor whose bytes lie in another file is written without them, which leaves a hole; then they are
copied there.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from checkpoints_tools.byte_copy import Record
from checkpoints_tools.write_behind import WriteBehind

FILE = "__0_0.distcp"

Fill = Callable[[str, Any, int], None]
"""(tensor's name, open file, place): write the tensor's bytes there."""


class InTurnStorage(FileSystemWriter):
    """Writes one file, a tensor at a time; whoever publishes the folder syncs it.

    Args:
        folder: exists.
        fill: writes the bytes of every tensor; default: the planner has the tensors.
    """

    def __init__(self, folder: Path, fill: Fill | None = None) -> None:
        super().__init__(folder, sync_files=False)
        self.folder, self._fill = folder, fill

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Ask the planner for each item and write it before the next is asked for."""
        results = []
        with open(self.folder / FILE, "w+b", buffering=0) as stream, _without_check_sums():
            behind = WriteBehind(stream)
            try:
                for item in plan.items:
                    start = stream.tell()
                    if self._fill is not None and item.type != WriteItemType.BYTE_IO:
                        self._fill(item.index.fqn, stream, _save_hollow(item, stream))
                    else:
                        data: Any = planner.resolve_data(item)
                        if item.type == WriteItemType.BYTE_IO:
                            stream.write(data.getbuffer())
                        else:
                            torch.save(data, stream)
                    size = stream.tell() - start
                    results.append(WriteResult(item.index, size, _StorageInfo(FILE, start, size)))
                    behind.wrote(size)
            finally:
                behind.finish()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _save_hollow(item: WriteItem, stream: Any) -> int:
    """Write a tensor's record without its bytes; returns their place in the stream."""
    assert item.tensor_data is not None
    start = stream.tell()
    # Never touched, so it takes addresses but no memory.
    tensor = torch.empty(item.tensor_data.size, dtype=item.tensor_data.properties.dtype)
    with torch.serialization.skip_data():
        torch.save(tensor, stream)
    place = Record(stream, start, stream.tell() - start).data
    stream.seek(0, os.SEEK_END)
    return place


@contextmanager
def _without_check_sums() -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
