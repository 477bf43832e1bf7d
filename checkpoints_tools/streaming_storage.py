"""torch's checkpoint files, written without keeping what is written.

torch's own FileSystemWriter holds on to every tensor until its file is complete, so a checkpoint
larger than memory cannot pass through it. The files are the same but for the check sums inside,
which torch does not look at and which take longer than the writing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from checkpoints_tools.write_behind import WriteBehind

FILE = "__0_0.distcp"


class InTurnStorage(FileSystemWriter):
    """Writes one file, a tensor at a time; whoever publishes the folder syncs it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=False)
        self.folder = folder

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Ask the planner for each item and write it before the next is asked for."""
        results = []
        with open(self.folder / FILE, "wb", buffering=0) as stream, _without_check_sums():
            behind = WriteBehind(stream)
            try:
                for item in plan.items:
                    start = stream.tell()
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


@contextmanager
def _without_check_sums() -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
