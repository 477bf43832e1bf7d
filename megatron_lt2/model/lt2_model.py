"""LT2Model: megatron-core's GPTModel around a looped block.

GPTModel brings the (vocabulary-parallel) embedding, rotary frequencies, output head and tied
weights; it always builds a plain TransformerBlock, so it is given an empty one, which is then
replaced. The head also gives the loss, without the logits of all tokens (parallel/vocab_loss.py).

On a pipeline a rank's model holds the layers of its stage once; the schedule reaches them through
one view a loop (parallel/loop_pipeline.py).
"""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_lt2.config.schema import ModelConfig
from megatron_lt2.model.exits import PendingExits, exit_loss
from megatron_lt2.model.looped_block import LoopedTransformerBlock
from megatron_lt2.model.specs import block_spec
from megatron_lt2.parallel.vocab_loss import VocabularyHead


class LT2Model(GPTModel):
    """A looped linear-time transformer (LT2, arXiv 2605.20670).

    Args:
        config: megatron-core's transformer config, see core_config.py.
        model: the architecture; vocab_size must be set.
        padded_vocab_size: rows of the embedding; those from vocab_size on never get probability.
        max_sequence_length: longest sequence, in tokens.
        kernels: "fla" or "torch".
        pre_process, post_process: whether this is the first or the last pipeline stage.
        stage_layers: physical layers of each pipeline stage; default: all on the only one.
    """

    def __init__(
        self,
        config: TransformerConfig,
        model: ModelConfig,
        *,
        padded_vocab_size: int,
        max_sequence_length: int,
        kernels: str = "torch",
        pre_process: bool = True,
        post_process: bool = True,
        stage_layers: list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        assert model.vocab_size is not None, (
            "the vocabulary size is resolved before the model is built"
        )
        super().__init__(
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules(layer_specs=[], layer_norm=None),
            vocab_size=padded_vocab_size,
            max_sequence_length=max_sequence_length,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=model.tie_embeddings,
            position_embedding_type="rope",
            rotary_base=model.rope.theta,
            **kwargs,
        )
        self.real_vocab_size = model.vocab_size
        if post_process:
            embedding = self._tied_weight() if pre_process else None
            VocabularyHead.adopt(self.output_layer, model.vocab_size, kernels, embedding)
        layers = stage_layers or [model.num_layers]
        stage = self.pg_collection.pp.rank() if len(layers) > 1 else 0
        first = sum(layers[:stage])
        self.decoder = LoopedTransformerBlock(
            config,
            block_spec(model, kernels, range(first, first + layers[stage])),
            loops=model.loops,
            loop_residual=model.loop_residual == "per_channel",
            inter_loop_norm=model.inter_loop_norm,
            exit_gate=model.exit_gate,
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=self.pg_collection,
        )
        self.exit_entropy = model.exit_entropy if model.loss == "exits" else None
        self.pending = PendingExits(model.loops)
        if self.exit_entropy is None and self.decoder.exit_gate is not None:
            # Nothing of this loss reaches it, and a gradient that never comes would be waited for.
            self.decoder.exit_gate.requires_grad_(False)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        loops: int | None = None,
        stage_loop: int | None = None,
        received: Tensor | None = None,
        parts: bool = False,
    ) -> Tensor:
        """Loss of every token, or logits without labels.

        Args:
            input_ids: [b, s] tokens; packed documents lie in one row (b = 1).
            position_ids: [b, s] positions, restarting at 0 in each packed document.
            attention_mask: unused; the mixers are causal by construction.
            labels: [b, s] next tokens.
            packed_seq_params: document boundaries of a packed row.
            loops: passes through the layers, default T.
            stage_loop: on a pipeline, the loop of which this stage does its part.
            received: what the stage before sent; None where the embedding begins.
            parts: also return what a loss is made of.

        Returns:
            [b, s] fp32 losses with labels; with `parts` [1, b, s], or [1 + 2 T, b, s] for the loss
            "exits", see `exit_loss`. Without labels the last loop's logits [b, s, padded
            vocabulary / tensor-parallel ranks]. On a pipeline, before the end of the last loop:
            what the next stage takes.
        """
        hidden = received
        if self.pre_process and not stage_loop:
            hidden = self.embedding(input_ids=input_ids, position_ids=position_ids)
        exits = self.exit_entropy is not None and labels is not None
        losses: list[Tensor] = []
        gate_logits: list[Tensor] = []

        def at_loop_end(loop: int, normed: Tensor, h: Tensor) -> Tensor:
            assert labels is not None
            loss, gate_logit = self._exit(normed, labels)
            if stage_loop is not None:
                return self.pending.defer(loop, h, loss, gate_logit)
            losses.append(loss)
            gate_logits.append(gate_logit)
            return h

        watch = at_loop_end if exits and self.post_process else None
        hidden = self.decoder(
            hidden,
            rotary_pos_emb=self._rotary(position_ids, packed_seq_params),
            packed_seq_params=packed_seq_params,
            loops=loops,
            stage_loop=stage_loop,
            watch=watch,
        )
        if stage_loop is not None and not (
            self.post_process and stage_loop == self.decoder.loops - 1
        ):
            return hidden
        if labels is None:
            return self._logits(hidden).transpose(0, 1).contiguous()
        final = self._token_losses(hidden, labels)
        if self.exit_entropy is None:
            return final[None] if parts else final
        if stage_loop is not None:
            losses, gate_logits = self.pending.collect()
        losses.append(final)
        found = exit_loss(losses, gate_logits, self.exit_entropy)
        return found if parts else found[0]

    def begin_step(self, step: int) -> None:
        """Told before the step that follows `step` done ones; for losses that change on the way."""

    @property
    def part_names(self) -> list[str]:
        """Names of what the loss is made of, in the order of `forward` with `parts`."""
        if self.exit_entropy is None:
            return []
        loops = range(1, self.decoder.loops + 1)
        return [f"{part}_{t}" for part in ("loss_loop", "exit_share") for t in loops]

    def _logits(self, hidden: Tensor) -> Tensor:
        """[s, b, d] to logits [s, b, this rank's rows of the vocabulary]."""
        logits, _ = self.output_layer(hidden, weight=self._tied_weight())
        self._silence_padding(logits)
        return logits

    def _token_losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Cross entropies [b, s]; the logits of all tokens never exist at once."""
        losses: Tensor = self.output_layer(hidden, weight=self._tied_weight(), labels=labels)
        return losses

    def _tied_weight(self) -> Tensor | None:
        """The head's weight where it is the embedding's; None: its own."""
        if not self.share_embeddings_and_output_weights:
            return None
        weight: Tensor = self.shared_embedding_or_output_weight()
        return weight

    def _exit(self, normed: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Cross entropies and the gate's logits [b, s] of a loop before the last."""
        gate = self.decoder.exit_gate
        assert gate is not None, "config/checks.py refuses this loss without a gate"
        return self._token_losses(normed, labels), gate(normed)

    def _rotary(self, position_ids: Tensor, packing: PackedSeqParams | None) -> Tensor:
        """Rotary angles [s, 1, 1, head_dim]; looked up by position where documents are packed or a
        rank holds a part of the row."""
        total = position_ids.shape[1] * self.pg_collection.cp.size()
        # Called "packed" to get all of them: else megatron-core takes two pieces a context rank, in
        # an order that is not ours.
        angles = self.rotary_pos_emb(total, packed_seq=True)
        return angles if packing is None else angles[position_ids[0]]

    def _silence_padding(self, logits: Tensor) -> None:
        """Padding rows of the vocabulary get no probability: any padding gives the same loss."""
        local = logits.shape[-1]
        first = self.pg_collection.tp.rank() * local
        real = max(0, min(local, self.real_vocab_size - first))
        if real < local:
            logits[..., real:] = torch.finfo(logits.dtype).min
