"""Writing a checkpoint that training loads, tensor by tensor, in one process without a model.

The files are megatron-core's torch_dist format: torch's distributed checkpoint, a `metadata.json`
that names the format, and an entry `common_state` for what is no tensor. Which ranks will read it
is of no concern: tensors are whole.
"""

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints_tools.safetensors_files import Spec

if TYPE_CHECKING:
    from torch import Tensor

    from checkpoints_tools.streaming_storage import Fill

FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
COMMON = "common_state/shard_0_1"


def write_tensors(
    folder: Path,
    specs: Mapping[str, Spec],
    read: Callable[[str], "Tensor"],
    *,
    common: Mapping[str, Any],
    done: Callable[[], object] = lambda: None,
    fill: "Fill | None" = None,
) -> None:
    """Write the tensors of `specs` into `folder`.

    Args:
        folder: exists; gets torch's files and metadata.json.
        specs: what is written.
        read: gives a tensor when its turn comes.
        common: plain values that belong to no rank, such as the step.
        done: called after each tensor.
        fill: writes a tensor's bytes to a place in an open file; `read` is not called then.

    Raises:
        ValueError: what `read` or `fill` raises, as it was raised.
        OSError: the disk is full or the folder cannot be written.
    """
    import torch
    from torch.distributed.checkpoint import save
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    from checkpoints_tools.streaming_storage import InTurnStorage

    class InTurn(DefaultSavePlanner):
        """Asks for a tensor when it is about to be written."""

        def resolve_data(self, write_item: Any) -> Any:
            name = write_item.index.fqn
            if name not in specs:
                return super().resolve_data(write_item)
            tensor = read(name)
            spec = specs[name]
            made = Spec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            assert made == spec, f"{name} {made}, planned: {spec}"
            done()
            return tensor

    def filled(name: str, stream: Any, place: int) -> None:
        assert fill is not None
        fill(name, stream, place)
        done()

    state: dict[str, Any] = {
        name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
        for name, spec in specs.items()
    }
    state[COMMON] = [dict(common)]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*save in a single process")
            save(
                state,
                storage_writer=InTurnStorage(folder, filled if fill else None),
                planner=InTurn(flatten_state_dict=False),
                no_dist=True,
            )
    except CheckpointException as error:
        causes = [failure[0] for failure in error.failures.values()]
        for cause in causes:
            if isinstance(cause, ValueError | OSError):
                raise cause from None
            if isinstance(cause, RuntimeError):  # torch's writer, on a full disk most often
                raise OSError(f"{folder}: cannot be written ({cause})") from None
        raise
    (folder / "metadata.json").write_text(json.dumps(FORMAT), encoding="utf-8")
