"""What a model family is to the converter: a table of tensors and what its config.json means.

A config.json is read strictly: a field either says something that a run config says too, or it is
one that changes no number, or it has the only value that the training model computes. Anything else
is refused, because a field that nobody looked at is how a converted model is nearly right.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from checkpoints_tools.mappings.base import TensorMapping
from megatron_lt2.config.schema import ModelConfig, RunConfig

FREE = frozenset(
    (
        *("architectures", "auto_map", "model_type", "_name_or_path", "_model_name_or_path"),
        *(
            "transformers_version",
            "dtype",
            "torch_dtype",
            "use_cache",
            "initializer_range",
            "is_llama_config",
        ),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "transformers.js_config"),
    )
)
"""Fields of any config.json that do not change what the weights compute."""


@dataclass(frozen=True)
class Family:
    """One family of Hugging Face models.

    name: as config.json's model_type says it.
    architecture: class name of the causal model.
    table: the mapping objects of a model; `vocab_size` must be set.
    values: the fields of config.json that say the same as a run config.
        Raises ValueError if the family has no such model.
    read: the run config that says the same as such fields, all of which are given.
    defaults: what fields mean when a config.json leaves them out.
    neutral: fields that must have one of these values.
    free: further fields that change no number.
    fp32: Hugging Face names that are fp32 whatever dtype is asked for.
    """

    name: str
    architecture: str
    table: Callable[[ModelConfig], list[TensorMapping]]
    values: Callable[[RunConfig], dict[str, Any]]
    read: Callable[[Mapping[str, Any]], RunConfig]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    free: frozenset[str] = frozenset()
    fp32: Callable[[ModelConfig], frozenset[str]] = lambda model: frozenset()

    def fits(self, config: RunConfig) -> bool:
        """Whether the family has a model of this architecture."""
        try:
            self.values(config)
        except ValueError:
            return False
        return True

    def run_config(self, given: Mapping[str, Any]) -> RunConfig:
        """The run config of a config.json; only `model` and `data.sequence_length` are set.

        Raises:
            ValueError: a field is missing, unknown, or has a value that the training model lacks.
        """
        fields = _plain_rope(given)
        for name, value in self.defaults.items():
            fields.setdefault(name, value)
        for name, value in fields.items():
            self._check_value(name, value)
        try:
            config = self.read(fields)
        except KeyError as error:
            raise ValueError(f"config.json: the field {error.args[0]} is missing") from None
        known = self.values(config)
        for name, value in fields.items():
            if name in known:
                if not _same(known[name], value):
                    raise ValueError(
                        f"config.json: {name} is {value!r}; the training model can only have "
                        f"{known[name]!r}"
                    )
            elif name not in self.neutral and name not in self.free | FREE:
                raise ValueError(
                    f"config.json: {name} is {value!r}, a field that the conversion of "
                    f"{self.name} models does not know; remove it only if it changes nothing"
                )
        return config

    def _check_value(self, name: str, value: Any) -> None:
        if name in self.neutral and value not in self.neutral[name]:
            allowed = " or ".join(repr(item) for item in self.neutral[name])
            raise ValueError(
                f"config.json: {name} is {value!r}; the training model computes {allowed} only"
            )


def _same(ours: Any, theirs: Any) -> bool:
    return ours == theirs or (ours is None and theirs is None)


def _plain_rope(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with `rope_theta` at the top, where older and newer files have it differently.

    Raises:
        ValueError: the rotary positions are scaled.
    """
    fields = dict(given)
    for name in ("rope_parameters", "rope_scaling"):
        inner = fields.pop(name, None)
        if inner is None:
            continue
        kind = inner.get("rope_type", inner.get("type", "default"))
        rest = sorted(set(inner) - {"rope_type", "type", "rope_theta"})
        if kind != "default" or rest:
            raise ValueError(
                f"config.json: {name} is {inner!r}; the training model has plain rotary positions "
                "only"
            )
        theta = inner.get("rope_theta")
        if theta is not None and fields.setdefault("rope_theta", theta) != theta:
            raise ValueError(
                f"config.json: rope_theta is {fields['rope_theta']!r} and {name} says {theta!r}"
            )
    return fields


PLAIN_DEFAULTS: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
}

PLAIN_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "pretraining_tp": (1,),
    "partial_rotary_factor": (1, None),
    "rope_interleaved": (False,),
    "use_sliding_window": (False, None),
}


def plain_values(config: RunConfig, family: str, **switches: Any) -> dict[str, Any]:
    """config.json of a decoder of plain attention layers with half-split rotary positions.

    Args:
        config: the run.
        family: for the message.
        switches: values that settings of `model` must have.

    Raises:
        ValueError: the model is no such decoder; names the first setting that says so.
    """
    from megatron_lt2.model.pattern import expand_pattern, loop_windows

    model = config.model
    if model.vocab_size is None:
        raise ValueError(
            "model.vocab_size is not set in the saved config, so it is not a resolved one"
        )
    known = _every_mixer()
    mixers = set(expand_pattern(model.pattern, model.num_layers, known))
    # One part a loop: the weights are those of full attention, the masks are not.
    windows = loop_windows(model.pattern, model.num_layers, model.loops, model.window.size, known)
    facts = {
        "model.pattern": (sorted(mixers) if windows is None else model.pattern, ["full"]),
        "model.attention.output_gate": (model.attention.output_gate, False),
        "model.rope.interleaved": (model.rope.interleaved, False),
        "model.loop_residual": (model.loop_residual, "none"),
        **{f"model.{name}": (getattr(model, name), value) for name, value in switches.items()},
    }
    for name, (value, needed) in facts.items():
        if value != needed:
            raise ValueError(f"{name} is {value!r}: {family} models have {needed!r} only")
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.attention_head_dim,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope.theta,
        "max_position_embeddings": config.data.sequence_length,
        "tie_word_embeddings": model.tie_embeddings,
    }


def plain_run_config(fields: Mapping[str, Any], **switches: Any) -> RunConfig:
    """The inverse of `plain_values`."""
    config = RunConfig()
    model = config.model
    model.vocab_size, model.num_layers = fields["vocab_size"], fields["num_hidden_layers"]
    model.hidden_size, model.ffn_hidden_size = fields["hidden_size"], fields["intermediate_size"]
    model.num_heads = fields["num_attention_heads"]
    model.num_kv_heads = fields.get("num_key_value_heads") or model.num_heads
    model.head_dim = fields.get("head_dim") or model.hidden_size // model.num_heads
    model.norm_eps, model.rope.theta = fields["rms_norm_eps"], float(fields["rope_theta"])
    model.tie_embeddings = fields["tie_word_embeddings"]
    model.pattern, model.loops, model.loop_residual = "full", 1, "none"
    model.attention.output_gate = False
    for name, value in switches.items():
        setattr(model, name, value)
    config.data.sequence_length = fields["max_position_embeddings"]
    return config


def _every_mixer() -> tuple[str, ...]:
    from megatron_lt2.config.mixers import SPARSE
    from megatron_lt2.recurrent.names import RECURRENT

    return ("full", "window", *SPARSE, *RECURRENT)
