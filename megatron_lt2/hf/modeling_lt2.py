"""LT2 models for transformers (arXiv 2605.20670): a stack of layers that runs T times.

h = embed(ids); T times: h = stack(h) + rho_t * h; then the final norm and the head. Models like
Ouro (arXiv 2510.25741) apply that norm at the end of every loop and have an exit gate, see
exits_lt2.py. Positions are the same in every loop and no state crosses from one loop to the next,
so cached generation keeps one cache slot per (loop, layer).

Works with `generate` (use_cache on or off), with batches padded on the left (a row gives the same
numbers as alone), with several tokens after a non-empty cache, and for training (`labels`).

A mixer's own weights (decay rates, gate biases) and rho are fp32 in models of any dtype.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..ops.reach import reach_of_rows
from ..ops.rope import rope_cos_sin
from .cache_lt2 import LT2Cache
from .configuration_lt2 import ATTENTION, SPARSE, LT2Config
from .exits_lt2 import (
    Exits,
    LT2CausalLMOutput,
    LT2ExitGate,
    LT2ModelOutput,
    choose_exits,
    exit_probabilities,
    take_by_threshold,
)
from .layers_lt2 import LT2Block, LT2RMSNorm
from .linear_lt2 import LT2LinearMixer
from .masks_lt2 import Tokens, attention_mask_for, real_positions
from .pretrained_lt2 import LT2PreTrainedModel

# In arguments and outputs: `cache` as of transformers 5.24, `past_key_values` before.
CACHE_NAME = (
    "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
)


class LT2Model(LT2PreTrainedModel):
    """Embedding, the looped stack, and the final norm."""

    def __init__(self, config: LT2Config) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [LT2Block(config, mixer, index) for index, mixer in enumerate(config.mixers)]
        )
        self.loop_residual = (
            nn.Parameter(torch.zeros(config.loops, config.hidden_size, dtype=torch.float32))
            if config.loop_residual == "per_channel"
            else None
        )
        self.norm = LT2RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.early_exit_gate = LT2ExitGate(config.hidden_size, 1) if config.exit_gate else None
        self.loops = config.loops
        self.gradient_checkpointing = False
        own = {
            f"mixer.{name}$"
            for layer in self.layers
            if isinstance(layer.mixer, LT2LinearMixer)
            for name in layer.mixer.layout.weights
        }
        self._keep_in_fp32_modules_strict = {*self._keep_in_fp32_modules_strict, *own}
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: LT2Cache | None = None,
        past_key_values: LT2Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        loops: int | None = None,
        exit_threshold: float | None = None,
        exit_step: int | None = None,
        output_exits: bool | None = None,
        **_: Any,
    ) -> LT2ModelOutput | tuple:
        """Run the looped stack over T new tokens.

        Args:
            input_ids: [B, T]; or give inputs_embeds [B, T, d].
            attention_mask: [B, past + T] or [B, T], 1 for real tokens, 0 for padding before or
                after them.
            position_ids: [B or 1, T]; default: counted from a row's first real token.
            cache: states of the past tokens, updated in place; `past_key_values` is its older name.
            use_cache: make a cache if none is given; default: config.use_cache, and False in
                training.
            output_hidden_states: also return the stream, see below.
            loops: how often to run the stack; default: config.loops. More than that only without
                rho.
            exit_threshold: take for each token the output of the first loop by which it has left
                with this probability (needs an exit gate); default: config.exit_threshold.
            exit_step: take the output of this loop, from 1, and run no later one; default:
                config.exit_step.
            output_exits: also return the output of every loop and the exit probabilities.

        Returns:
            last_hidden_state [B, T, d], the cache, and if asked for loops * layers + 1 hidden
            states: the embedding and the stream after every layer of every loop (rho and a norm
            between loops included at the end of a loop), the last one normalised. See
            `LT2ModelOutput` for output_exits.

        Raises:
            ValueError: inputs that do not fit together or that this model cannot treat exactly.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if self.config.loops != self.loops:
            raise ValueError(
                f"the model was built with {self.loops} loops; config.loops was set to "
                f"{self.config.loops} afterwards; set it before the model is built, or give loops "
                "in the call"
            )
        exits = choose_exits(self.config, loops, exit_threshold, exit_step, output_exits)
        h = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._choose_cache(cache, past_key_values, use_cache, exits.loops)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        batch, new = h.shape[:2]
        past = cache.get_seq_length() if cache is not None else 0
        real_BS = real_positions(attention_mask, cache, batch, past, new, h.device)
        if cache is not None:
            cache.real = real_BS
        if position_ids is None:
            if real_BS is None:
                position_ids = torch.arange(past, past + new, device=h.device)[None]
            else:
                position_ids = (real_BS.long().cumsum(-1) - 1).clamp(min=0)[:, -new:]
        tokens = self._tokens(position_ids, real_BS, past)

        streams, outputs = [h], []
        for loop in range(exits.loops):
            loop_input, last = h, loop == exits.loops - 1
            for index, layer in enumerate(self.layers):
                slot = cache.slot(loop, index) if cache is not None else None
                h = layer(h, tokens, slot, loop)
                if output_hidden_states:
                    streams.append(h)
            if self.loop_residual is not None:
                # More loops than rows are refused above.
                h = h + self.loop_residual[loop].to(h.dtype) * loop_input
            if last or self.config.inter_loop_norm or exits.watches:
                outputs.append(self.norm(h))
                h = outputs[-1] if last or self.config.inter_loop_norm else h
            streams[-1] = h
        result = LT2ModelOutput(
            hidden_states=tuple(streams) if output_hidden_states else None,
            **{CACHE_NAME: cache},
            **self._exit(outputs, exits),
        )
        return result.to_tuple() if _wants_tuple(return_dict, self.config) else result

    def _exit(self, outputs: list[Tensor], exits: Exits) -> dict[str, Any]:
        """The output that counts and, if they are wanted, those of all loops."""
        p = None
        if self.early_exit_gate is not None and exits.watches:
            p = exit_probabilities([self.early_exit_gate(state) for state in outputs])
        chosen = outputs[-1]
        if exits.threshold is not None:
            assert p is not None
            chosen = take_by_threshold(outputs, p, exits.threshold)
        found: dict[str, Any] = {"last_hidden_state": chosen}
        if exits.report:
            found |= {"loop_states": tuple(outputs), "exit_probabilities": p}
        return found

    def _tokens(self, positions: Tensor, real_BS: Tensor | None, past: int) -> Tokens:
        """What the layers need to know about the new tokens, made once for all loops."""
        config, new, device = self.config, positions.shape[-1], positions.device
        rope = reach = None
        if set(config.mixers) & set(ATTENTION):
            rope = rope_cos_sin(positions, config.head_dim, config.rope_theta)
        masks = {
            window: attention_mask_for(real_BS, past, new, device, window)
            for window in config.attention_windows()
        }
        if set(config.mixers) & set(SPARSE):
            reach = reach_of_rows(real_BS, past, new, device)
        real_BT = None
        # Once padding lies in the past only, the linear mixers need not hear of it.
        if real_BS is not None and not bool(real_BS[:, past:].all()):
            real_BT = real_BS[:, past:]
        return Tokens(positions, real_BT, rope, masks, reach)

    def _choose_cache(
        self,
        cache: LT2Cache | None,
        older_name: LT2Cache | None,
        use_cache: bool | None,
        loops: int,
    ) -> LT2Cache | None:
        cache = older_name if cache is None else cache
        if cache is not None and not isinstance(cache, LT2Cache):
            raise ValueError(
                "LT2 needs its own cache with one slot per (loop, layer), "
                f"got {type(cache).__name__}; "
                "leave it out and take the one in the outputs"
            )
        if cache is not None and cache.loops != loops:
            raise ValueError(
                f"the cache is of calls with {cache.loops} loops, this one runs {loops}; give "
                "every call with a cache the same loops and exit_step"
            )
        if self.gradient_checkpointing and self.training:
            return None  # recomputing a layer would update its slot twice
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        return LT2Cache(self.config, loops) if cache is None and use_cache else cache


def _wants_tuple(return_dict: bool | None, config: LT2Config) -> bool:
    return not (config.return_dict if return_dict is None else return_dict)


class LT2ForCausalLM(LT2PreTrainedModel, GenerationMixin):
    """LT2Model with the output head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: LT2Config) -> None:
        super().__init__(config)
        self.model = LT2Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: LT2Cache | None = None,
        past_key_values: LT2Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        loops: int | None = None,
        exit_threshold: float | None = None,
        exit_step: int | None = None,
        output_exits: bool | None = None,
        **kwargs: Any,
    ) -> LT2CausalLMOutput | tuple:
        """Logits of the next token; arguments as `LT2Model.forward`.

        Args:
            labels: [B, T] token ids, -100 where no loss is wanted; shifted here.
            logits_to_keep: only the last this many positions (0: all), or the indices wanted.
            output_exits: also return the logits of every loop and the exit probabilities.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            loops=loops,
            exit_threshold=exit_threshold,
            exit_step=exit_step,
            output_exits=output_exits,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        result = LT2CausalLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            exit_probabilities=outputs.exit_probabilities,
            loop_logits=(
                torch.stack([self.lm_head(state[:, keep]) for state in outputs.loop_states])
                if outputs.loop_states is not None
                else None
            ),
            **{CACHE_NAME: getattr(outputs, CACHE_NAME)},
        )
        return result.to_tuple() if _wants_tuple(return_dict, self.config) else result

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Give `generate` an LT2Cache from the start (transformers would make one slot a layer)."""
        if generation_config.cache_implementation is not None:
            raise ValueError(
                "LT2 brings its own cache; leave cache_implementation unset "
                f"(got {generation_config.cache_implementation!r})"
            )
        given = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
        if given is None and generation_config.use_cache is not False:
            asked = (model_kwargs.get(name) for name in ("loops", "exit_threshold", "exit_step"))
            model_kwargs[CACHE_NAME] = LT2Cache(
                self.config, choose_exits(self.config, *asked).loops
            )
