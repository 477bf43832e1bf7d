"""Loops on a pipeline: megatron-core's interleaved schedule over views of one set of layers.

Stage p of P holds its physical layers once. Every loop goes through all stages, so loop t on stage
p is what megatron-core calls model chunk t of stage p, and its ring from the last stage back to the
first carries the state from one loop into the next:

    loop 0:   stage 0 -> stage 1 -> ... -> stage P-1 -.
    loop 1:   stage 0 <-------------------------------'
              stage 0 -> stage 1 -> ...

The chunks are views that own no parameters: one DDP and one optimizer see each weight once, its
gradients add up over the loops, and DDP counts a weight as ready at its last use. With one loop
there is one chunk, and the plain 1F1B schedule serves it.

Forward passes, a micro-batch: T P - 1 sends, T - 1 of them from the last stage to the first; as
many gradients come back. If the loop's input travels along for rho, a message between neighbours is
twice as long, but one to the first stage is not: there the state is the loop's input.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn


class LoopChunk(nn.Module):
    """One loop through this stage, as a model chunk of megatron-core's schedule.

    Args:
        store: the model of this stage, which owns the parameters.
        config: of the schedule, see `schedule_config`.
        loop: which loop.
    """

    _store: nn.Module

    def __init__(self, store: nn.Module, config: Any, loop: int) -> None:
        super().__init__()
        # Not a submodule, or every loop would list the parameters again.
        object.__setattr__(self, "_store", store)
        self.config, self.vp_stage = config, loop
        self.model_type = ModelType.encoder_or_decoder
        self._received: Tensor | None = None

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        """Called by the schedule with what the stage before sent."""
        self._received = tensors[0]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The store's forward for this loop."""
        received, self._received = self._received, None
        out: Tensor = self._store(*args, **kwargs, stage_loop=self.vp_stage, received=received)
        return out


class CarryCommunicator(P2PCommunicator):
    """Messages between stages, twice as long on axis 0 where the loop's input travels along.

    megatron-core's schedule knows one shape for all messages. Those on the ring's closing arc, from
    the last stage to the first and the gradients of them back, keep it.
    """

    def _communicate(self, *, tensor_shape: Any, **message: Any) -> Any:
        recv_prev, recv_next = message["recv_prev"], message["recv_next"]
        assert not (recv_prev and recv_next), "one shape cannot serve two directions"
        closing = recv_prev and self.is_pp_first_stage or recv_next and self.is_pp_last_stage
        if (recv_prev or recv_next) and not closing:
            tensor_shape = (2 * tensor_shape[0], *tensor_shape[1:])
        return super()._communicate(tensor_shape=tensor_shape, **message)


@dataclass(frozen=True)
class LoopPipeline:
    """This stage's part of the schedule.

    config: the schedule's; its functions (finalize_model_grads_func, ...) are set by the trainer.
    chunks: one a loop.
    carries: whether the loop's input travels beside the state.
    """

    config: Any
    chunks: list[LoopChunk]
    carries: bool

    def run(
        self,
        forward_step: Callable[..., Any],
        batches: Iterator[Any],
        *,
        count: int,
        rows: int,
        length: int,
        forward_only: bool,
    ) -> list[Any]:
        """`count` micro-batches, each of `rows` rows of `length` tokens, through all loops.

        Every stage reads every micro-batch. Returns the reports on the last stage, else nothing.
        """
        loops = len(self.chunks)
        group = parallel_state.get_pipeline_model_parallel_group()
        communicator = CarryCommunicator if self.carries else P2PCommunicator
        schedule = get_forward_backward_func(group.size(), loops if loops > 1 else None)
        reports: list[Any] = schedule(
            forward_step_func=forward_step,
            # A loop takes up a micro-batch when its turn comes, so each has its own place.
            data_iterator=list(itertools.tee(batches, loops)),
            model=self.chunks,
            num_microbatches=count,
            seq_length=length,
            micro_batch_size=rows,
            forward_only=forward_only,
            p2p_communicator=communicator(group, self.config),
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        return reports


def build_loop_pipeline(store: nn.Module, config: Any, loops: int, carries: bool) -> LoopPipeline:
    """The views of `store`, the model of this stage, that the schedule runs.

    Args:
        config: megatron-core's config of the store, which builds its layers; left as it is.
    """
    config = schedule_config(config, loops)
    return LoopPipeline(config, [LoopChunk(store, config, t) for t in range(loops)], carries)


def schedule_config(config: Any, loops: int) -> Any:
    """A copy for the schedule, in which a loop is a virtual stage.

    It is a copy because the same setting would make megatron-core cut the layers into `loops`
    parts.
    """
    config = copy.copy(config)
    if loops > 1:
        config.virtual_pipeline_model_parallel_size = loops
        # Batched messages to both neighbours mix up on two stages, where these are one rank.
        config.overlap_p2p_comm, config.batch_p2p_comm = True, False
    return config
