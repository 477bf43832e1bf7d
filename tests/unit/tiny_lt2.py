"""A tiny LT2 model with random parameters, and the checkpoint that training would leave of it.

Nothing keeps its initial value: with zero gates and zero rho nearly any mistake goes unseen.
"""

import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lt2.config.load import to_yaml
from megatron_lt2.config.schema import ModelConfig, RunConfig
from megatron_lt2.hf.cache_lt2 import LT2Cache
from megatron_lt2.hf.configuration_lt2 import LT2Config
from megatron_lt2.hf.modeling_lt2 import CACHE_NAME, LT2ForCausalLM

VOCAB, WIDTH, FFN, HEAD_DIM = 61, 32, 44, 10
HEADS, KV_HEADS, GDN_HEADS, GDN_K, GDN_V, TAPS, LOOPS = 4, 2, 3, 7, 9, 4, 3
WINDOW = 5
PATTERN = ["gdn", "full", "gdn"]
LINEAR = ["gdn", "kda", "deltanet", "mamba2", "retnet", "gla", "linear", "mlstm", "hgrn2"]
SPARSE = ["nsa", "dsa"]
ALL = [*LINEAR[:5], "window", "nsa", *LINEAR[5:], "dsa", "full"]
"""Every mixer once."""

SETTINGS: dict[str, dict[str, Any]] = {
    "gdn": {"num_heads": GDN_HEADS, "head_k_dim": GDN_K, "head_v_dim": GDN_V, "conv_size": TAPS},
    "kda": {"num_heads": 2, "head_k_dim": 6, "head_v_dim": 5, "rank": 3},
    "deltanet": {"num_heads": 3, "head_k_dim": 5, "head_v_dim": 7, "output_gate": True},
    "mamba2": {"num_heads": 4, "head_k_dim": 6, "head_v_dim": 5, "groups": 2},
    "retnet": {"num_heads": 3, "head_k_dim": 6, "head_v_dim": 8},
    "gla": {"num_heads": 2, "head_k_dim": 5, "head_v_dim": 6, "rank": 3, "gate_normalizer": 4.0},
    "linear": {"num_heads": 2, "head_k_dim": 6, "head_v_dim": 7, "normalize": True},
    "mlstm": {"num_heads": 3, "head_k_dim": 5, "head_v_dim": 4},
    "hgrn2": {"num_heads": 3, "head_k_dim": 6, "head_v_dim": 5, "lower_bound": 0.3},
    "nsa": {
        **{"num_heads": 6, "num_kv_heads": 2, "head_dim": 6},
        **{"block_size": 3, "selected_blocks": 4, "window": 4},
    },
    "dsa": {
        **{"num_heads": 3, "latent_dim": 7, "rope_dim": 4, "top_k": 5},
        **{"index_heads": 2, "index_dim": 5, "index_rope_dim": 2},
    },
}
"""Odd sizes for every linear and sparse mixer; settings that are not named keep their defaults."""


def set_mixers(model: ModelConfig) -> None:
    """Give the linear and sparse mixers of a run config the sizes of `SETTINGS`."""
    for name, values in SETTINGS.items():
        section = getattr(model, name)
        for key, value in values.items():
            assert hasattr(section, key)
            setattr(section, key, value)


def settings_of(name: str, **changes: Any) -> dict[str, Any]:
    """Entry `name` of LT2Config.mixer_settings, with changes."""
    model = ModelConfig(hidden_size=WIDTH, num_heads=HEADS)
    set_mixers(model)
    resolved = asdict(model.mixer_settings(name))
    assert changes.keys() <= resolved.keys()
    return resolved | changes


def tiny_config(**changes: Any) -> LT2Config:
    """Odd sizes, grouped keys, three loops of gdn, full, gdn; changes of a linear mixer's settings
    are given under its name."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": FFN,
        "mixers": PATTERN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "loops": LOOPS,
        "window_size": WINDOW,
        "max_position_embeddings": 96,
    }
    inner = {name: changes.pop(name, {}) for name in (*LINEAR, *SPARSE)}
    values |= changes
    used = sorted(set(values["mixers"]) & inner.keys())
    values.setdefault("mixer_settings", {name: settings_of(name, **inner[name]) for name in used})
    return LT2Config(num_hidden_layers=len(values["mixers"]), **values)


def own_names(model: LT2ForCausalLM) -> set[str]:
    """Names of the parameters that are fp32 in models of any dtype."""
    names = {"model.loop_residual"} & set(model.state_dict())
    for i, layer in enumerate(model.model.layers):
        layout = getattr(layer.mixer, "layout", None)
        names |= {f"model.layers.{i}.mixer.{name}" for name in (layout.weights if layout else ())}
    return names


def to_bfloat16(model: LT2ForCausalLM) -> None:
    """Cast what a bf16 export casts, in place."""
    own = own_names(model)
    for name, parameter in model.named_parameters():
        if name not in own:
            parameter.data = parameter.data.bfloat16()


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Random values for every parameter, large enough for each of them to matter."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith(("norm.weight", "norm_2.weight")):
            noise = 1 + 0.3 * noise
        elif name.endswith("A_log"):
            noise = noise - 1
        elif name.endswith(("dt_bias", "input_bias")):
            noise = noise - 2
        elif name.endswith(("decay_bias", "forget_bias")):
            noise = noise + 1
        elif name.endswith("loop_residual"):
            noise = 0.3 * noise
        elif name.endswith(("conv1d.weight", "conv1d.bias", "_up.bias")):
            noise = 0.5 * noise
        else:
            noise = noise * parameter.shape[-1] ** -0.5
        parameter.data.copy_(noise)


def tiny_model(seed: int = 0, **changes: Any) -> LT2ForCausalLM:
    """A randomised model in evaluation mode."""
    model = LT2ForCausalLM(tiny_config(**changes)).eval()
    randomise(model, seed)
    return model


def tiny_run_config(**changes: Any) -> RunConfig:
    """The run config that says the same as `tiny_config()`; changes are fields of `model`."""
    config = RunConfig()
    model = config.model
    model.num_layers, model.hidden_size, model.ffn_hidden_size = len(PATTERN), WIDTH, FFN
    model.num_heads, model.num_kv_heads, model.head_dim = HEADS, KV_HEADS, HEAD_DIM
    model.vocab_size, model.pattern, model.loops = VOCAB, list(PATTERN), LOOPS
    model.window.size = WINDOW
    set_mixers(model)
    config.data.sequence_length = 96
    config.data.path = ["/somewhere/private/corpus"]
    for name, value in changes.items():
        assert hasattr(model, name)
        setattr(model, name, value)
    return config


def cache_of(output: Any) -> LT2Cache:
    """The cache in a model's or `generate`'s output, under this transformers version's name."""
    return getattr(output, CACHE_NAME)


def training_tensors(model: LT2ForCausalLM, padding_rows: int = 3) -> dict[str, Tensor]:
    """The model's tensors under training's names, fused and padded as training keeps them.

    Written from the layout's description, row by row, and not by undoing the exporter's own code.
    """
    config, hf = model.config, {k: v.detach() for k, v in model.state_dict().items()}
    padding = torch.full((padding_rows, config.hidden_size), 7.0)
    out = {
        "embedding.word_embeddings.weight": torch.cat([hf["model.embed_tokens.weight"], padding]),
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
    }
    if config.loop_residual == "per_channel":
        out["decoder.loop_residual"] = hf["model.loop_residual"]
    if not config.tie_word_embeddings:
        out["output_layer.weight"] = torch.cat([hf["lm_head.weight"], padding])
    if config.exit_gate:
        out["decoder.exit_gate.weight"] = hf["model.early_exit_gate.weight"]
        out["decoder.exit_gate.bias"] = hf["model.early_exit_gate.bias"]
    for i, mixer in enumerate(config.mixers):
        layer = {
            k.removeprefix(f"model.layers.{i}."): v
            for k, v in hf.items()
            if k.startswith(f"model.layers.{i}.")
        }
        to = f"decoder.layers.{i}."
        out[to + "input_layernorm.weight"] = layer["input_layernorm.weight"]
        out[to + "pre_mlp_layernorm.weight"] = layer["post_attention_layernorm.weight"]
        out[to + "mlp.linear_fc1.weight"] = torch.cat(
            [layer["mlp.gate_proj.weight"], layer["mlp.up_proj.weight"]]
        )
        out[to + "mlp.linear_fc2.weight"] = layer["mlp.down_proj.weight"]
        if config.norm_mode == "sandwich":
            out[to + "post_mixer_layernorm.weight"] = layer["input_layernorm_2.weight"]
            out[to + "post_mlp_layernorm.weight"] = layer["post_attention_layernorm_2.weight"]
        to += "self_attention."
        if mixer in ("full", "window"):
            out[to + "linear_qkv.weight"] = _fused_qkv(layer, config)
            out[to + "linear_proj.weight"] = layer["mixer.o_proj.weight"]
            continue
        for name, tensor in layer.items():
            if name.startswith("mixer."):
                key, value = _linear_tensor(name.removeprefix("mixer."), tensor)
                out[to + key] = value
    return out


def _linear_tensor(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """Training's name and form of one tensor of a linear mixer."""
    fixed = {"o_proj.weight": "out_proj.weight", "o_norm.weight": "out_norm.weight"}
    if name in fixed:
        return fixed[name], tensor
    head, _, kind = name.rpartition(".")
    if head.startswith("indexer."):
        return head.removesuffix("_proj"), tensor
    section, _, part = head.rpartition("_")
    if part in ("proj", "down"):
        return f"in_proj.weight.{section}", tensor
    if part == "conv1d":
        return f"conv1d.{kind}.{section}", tensor[:, 0, :] if kind == "weight" else tensor
    if part == "up":
        return f"up.{section}.{kind}", tensor
    return name, tensor


def _fused_qkv(layer: dict[str, Tensor], config: LT2Config) -> Tensor:
    dim, rows = config.head_dim, []
    queries = config.num_attention_heads // config.num_key_value_heads
    for group in range(config.num_key_value_heads):
        own = range(group * queries, (group + 1) * queries)
        gates = ["g_proj"] if config.attention_output_gate else []
        for name in ["q_proj", *gates]:
            for head in own:
                rows += list(layer[f"mixer.{name}.weight"][head * dim : (head + 1) * dim])
        for name in ("k_proj", "v_proj"):
            rows += list(layer[f"mixer.{name}.weight"][group * dim : (group + 1) * dim])
    return torch.stack(rows)


def write_checkpoint(
    run: Path,
    tensors: dict[str, Tensor],
    config: RunConfig,
    *,
    step: int = 30,
    tokens: int = 12345,
) -> Path:
    """A complete checkpoint folder of a run, with the training state that an export must ignore."""
    from torch.distributed.checkpoint import save

    folder = run / "checkpoints" / f"iter_{step:07d}"
    folder.mkdir(parents=True)
    extra = {
        "optimizer.state.exp_avg.decoder.final_layernorm.weight": torch.ones(WIDTH),
        "chained_0.optimizer.state.exp_avg_sq.output_layer.weight": torch.ones(2),
        "decoder.layers.1.mlp.linear_fc1._extra_state/shard_0_3": b"opaque",
        "rng/shard_0_1": b"opaque",
        "common_state/shard_0_1": {"step": step},
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*save in a single process")
        save({**tensors, **extra}, checkpoint_id=folder, no_dist=True)
    (folder / "run_config.yaml").write_text(to_yaml(config))
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    manifest = {"step": step, "tokens": tokens, "files": sizes}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder
