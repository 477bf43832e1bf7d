"""LT2Model: megatron-core's GPTModel around a looped block.

GPTModel brings the (vocabulary-parallel) embedding, rotary frequencies, output head, tied weights
and the loss; it always builds a plain TransformerBlock, so it is given an empty one, which is then
replaced.
"""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_lt2.config.schema import ModelConfig
from megatron_lt2.model.looped_block import LoopedTransformerBlock
from megatron_lt2.model.specs import block_spec


class LT2Model(GPTModel):
    """A looped linear-time transformer (LT2, arXiv 2605.20670).

    Args:
        config: megatron-core's transformer config, see core_config.py.
        model: the architecture; vocab_size must be set.
        padded_vocab_size: rows of the embedding; those from vocab_size on never get probability.
        max_sequence_length: longest sequence, in tokens.
        kernels: "fla" or "torch".
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
        self.decoder = LoopedTransformerBlock(
            config,
            block_spec(model, kernels),
            loops=model.loops,
            loop_residual=model.loop_residual == "per_channel",
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=self.pg_collection,
        )

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        loops: int | None = None,
    ) -> Tensor:
        """Loss of every token, or logits without labels.

        Args:
            input_ids: [b, s] tokens; packed documents lie in one row (b = 1).
            position_ids: [b, s] positions, restarting at 0 in each packed document.
            attention_mask: unused; the mixers are causal by construction.
            labels: [b, s] next tokens.
            packed_seq_params: document boundaries of a packed row.
            loops: passes through the layers, default T.

        Returns:
            [b, s] fp32 losses with labels; else logits [b, s, padded vocabulary / tensor-parallel
            ranks].
        """
        embedded = None
        if self.pre_process:
            embedded = self.embedding(input_ids=input_ids, position_ids=position_ids)
        hidden = self.decoder(
            embedded,
            rotary_pos_emb=self._rotary(position_ids, packed_seq_params),
            packed_seq_params=packed_seq_params,
            loops=loops,
        )
        if not self.post_process:
            return hidden
        weight = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else None
        )
        logits, _ = self.output_layer(hidden, weight=weight)
        self._silence_padding(logits)
        if labels is None:
            return logits.transpose(0, 1).contiguous()
        return self.compute_language_model_loss(labels, logits)

    def _rotary(self, position_ids: Tensor, packing: PackedSeqParams | None) -> Tensor:
        """Rotary angles [s, 1, 1, head_dim]; looked up by position where documents are packed."""
        angles = self.rotary_pos_emb(position_ids.shape[1])
        return angles if packing is None else angles[position_ids[0]]

    def _silence_padding(self, logits: Tensor) -> None:
        """Padding rows of the vocabulary get no probability: any padding gives the same loss."""
        local = logits.shape[-1]
        first = self.pg_collection.tp.rank() * local
        real = max(0, min(local, self.real_vocab_size - first))
        if real < local:
            logits[..., real:] = torch.finfo(logits.dtype).min
