"""A TransformerBlock that runs its layers T times with the same weights (LT2, arXiv 2605.20670).

    h <- embedding;  for t in 0..T-1:  h <- layers(h) + rho_t * h;  h <- norm(h)

rho is T x d and starts at zero. Recurrent layers start from a zero state in every loop. With
`inter_loop_norm` the norm is applied at the end of every loop, so a loop starts from normed states.
megatron-core owns the layers and quantisation contexts; the order of the passes is ours, and which
of them run again in the backward pass (`memory.recompute_layers`).

On a pipeline every stage holds some of the layers, and each loop goes through all stages:

    stage 0:   x = h_t                  -> layers -> [h, x]
    between:   [h, x]                   -> layers -> [h, x]
    last:      [h, x] -> layers -> h_(t+1) = h + rho_t * x  -> stage 0, or norm and head

Layers are told which loop they run in, for masks that differ between loops: as the attention mask,
which LT2's mixers have no other use for and which recomputation keeps.

The loop's input x travels with the state because rho is needed after the last layer; without rho
only h does. A stage takes and gives what its neighbours send: see `CarryCommunicator`.
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.enums import Fp8Recipe
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from megatron_lt2.mixers.parameters import declare, new_parameter
from megatron_lt2.model.exits import ExitGate
from megatron_lt2.recurrent.initial import constant

Watcher = Callable[[int, Tensor, Tensor], Tensor]
"""Called at the end of a loop with its number, its normed output and what the next loop starts
from, both [s, b, d]; returns the latter."""


LayerWatcher = Callable[[int, int, Tensor], None]
"""Called behind each pass through a layer with the loop, the layer and its output [s, b, d]."""


class LoopedTransformerBlock(TransformerBlock):
    """The physical layers of this rank, run `loops` times.

    Args:
        loops: T.
        loop_residual: whether to add rho_t * (input of loop t); rho lies on the last stage.
        inter_loop_norm: whether the final norm ends every loop.
        exit_gate: whether the last stage has a gate, which is not called here.
        Others as TransformerBlock.

    Attributes:
        carries: whether stages pass on the loop's input beside the state.
        each_layer: sees what comes out of each pass through a layer; None: nobody looks.
    """

    def __init__(
        self,
        *args: Any,
        loops: int,
        loop_residual: bool,
        inter_loop_norm: bool = False,
        exit_gate: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.loops, self.inter_loop_norm = loops, inter_loop_norm
        self.each_layer: LayerWatcher | None = None
        self.exit_gate = None
        if exit_gate and self.post_process:
            self.exit_gate = ExitGate(self.config, self.tp_group)
        self.carries = loop_residual and self.config.pipeline_model_parallel_size > 1
        self.loop_residual = None
        if loop_residual and self.post_process:
            # fp32: rho moves away from zero in steps that bf16 would round away.
            residual: Any = new_parameter(loops, self.config.hidden_size)
            residual.sequence_parallel = self.config.sequence_parallel
            declare(residual, init=constant(0.0), per_channel=True)
            self.loop_residual = residual

    def forward(
        self,
        hidden_states: Tensor | None,
        attention_mask: Tensor | None = None,
        *,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: Any = None,
        loops: int | None = None,
        stage_loop: int | None = None,
        watch: Watcher | None = None,
    ) -> Tensor:
        """[s, b, d] -> [s, b, d] after `loops` passes (default T) and the final norm.

        s is this rank's share under sequence or context parallelism. `loops` may be smaller than T.
        On a pipeline: this stage's part of loop `stage_loop` only, from and to what neighbouring
        stages send: [2s, b, d] with the loop's input if `carries`, but [s, b, d] from the last
        stage to the first; after the last loop the last stage returns the normed [s, b, d].
        `watch` sees the end of every loop but the last.
        """
        assert hidden_states is not None
        inputs = (rotary_pos_emb, packed_seq_params)
        with self._sequence_parallel_rng(), self._outer_quantisation():
            if stage_loop is not None:
                h = self._run_stage(stage_loop, hidden_states, watch, *inputs)
            else:
                h = make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)
                count = loops or self.loops
                for loop in range(count):
                    h = self._add_residual(loop, self._run_layers(h, loop, *inputs), h)
                    h = self._end_loop(h, loop, loop == count - 1, watch)
        return make_viewless_tensor(inp=h, requires_grad=True, keep_graph=True)

    def _run_stage(
        self, loop: int, received: Tensor, watch: Watcher | None, *inputs: Any
    ) -> Tensor:
        """One loop through this stage's layers."""
        h = x = received
        if self.carries and not self.pre_process:
            h, x = received.chunk(2)
        h = self._run_layers(h, loop, *inputs)
        if self.post_process:
            h = self._add_residual(loop, h, x)
            return self._end_loop(h, loop, loop == self.loops - 1, watch)
        return torch.cat([h, x]) if self.carries else h

    def _end_loop(self, h: Tensor, loop: int, last: bool, watch: Watcher | None) -> Tensor:
        """What the next loop starts from or, after the last one, the head."""
        if last or self.inter_loop_norm or watch is not None:
            normed = h if self.final_layernorm is None else self.final_layernorm(h)
            h = normed if last or self.inter_loop_norm else h
            if watch is not None and not last:
                h = watch(loop, normed, h)
        return h

    def _add_residual(self, loop: int, h: Tensor, loop_input: Tensor) -> Tensor:
        if self.loop_residual is None:
            return h
        return h + self.loop_residual[loop].to(h.dtype) * loop_input

    def _run_layers(
        self,
        hidden_states: Tensor,
        loop: int,
        rotary_pos_emb: Tensor | None,
        packed_seq_params: Any,
    ) -> Tensor:
        """One pass through the physical layers of this rank."""
        h = hidden_states
        inputs = {
            "attention_mask": torch.tensor(loop),
            "rotary_pos_emb": rotary_pos_emb,
            "packed_seq_params": packed_seq_params,
        }
        for index, layer in enumerate(self.layers):
            run = functools.partial(self._run_layer, layer, inputs)
            if self.training and self._runs_again(loop, index):
                h = self._checkpointed(run, h)
            else:
                h = run(h)
            if self.each_layer is not None:
                self.each_layer(loop, index, h)
        return h

    def _run_layer(self, layer: Any, inputs: dict[str, Any], h: Tensor) -> Tensor:
        delayed = self.config.fp8 and self.config.fp8_recipe == Fp8Recipe.delayed
        inner = bool(self.config.fp8) and not delayed
        with get_fp8_context(self.config, layer.layer_number - 1) if inner else nullcontext():
            out, _ = layer(hidden_states=h, **inputs)
        return out

    def _checkpointed(self, run: Any, h: Tensor) -> Tensor:
        if not self.config.fp8:
            return tensor_parallel.checkpoint(run, False, h)
        # Transformer Engine's runs again with the scales of the first time.
        from megatron.core.extensions.transformer_engine import te_checkpoint

        tracker = tensor_parallel.random.get_cuda_rng_tracker
        return te_checkpoint(run, False, tracker, self.tp_group, h)

    def _runs_again(self, loop: int, index: int) -> bool:
        """Whether this pass through a layer keeps its input only: the earliest do, which would keep
        the rest longest."""
        share: float = getattr(self.config, "recompute_layers", 0.0)
        return loop * len(self.layers) + index < share * self.loops * len(self.layers)

    def _sequence_parallel_rng(self) -> Any:
        if self.config.sequence_parallel:
            return tensor_parallel.get_cuda_rng_tracker().fork()
        return nullcontext()

    def _outer_quantisation(self) -> Any:
        if self.config.fp8 and self.config.fp8_recipe == Fp8Recipe.delayed:
            return get_fp8_context(self.config)
        return nullcontext()

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """megatron-core's entries for the layers and the norm, and `loop_residual`."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.loop_residual is not None:
            state.update(
                make_sharded_tensors_for_checkpoint(
                    {"loop_residual": self.loop_residual},
                    prefix,
                    tp_group=self.tp_group,
                    dp_cp_group=(metadata or {}).get("dp_cp_group"),
                )
            )
        return state
