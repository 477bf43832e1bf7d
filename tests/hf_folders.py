"""Tiny Hugging Face folders of every family, with random weights that all matter."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.ouro_reference import OuroShape, random_ouro

VOCAB, WIDTH, FFN, LAYERS = 61, 24, 40, 3


def write_folder(
    folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], shards: int = 1
) -> Path:
    """Weights in `shards` files, with an index for several, and config.json."""
    folder.mkdir(parents=True)
    names = list(tensors)
    size = -(-len(names) // shards)
    weight_map = {}
    for number in range(shards):
        part = {name: tensors[name].contiguous() for name in names[number * size :][:size]}
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        file = file if shards > 1 else "model.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        total = sum(t.numel() * t.element_size() for t in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    # Spacing of its own: an export must give the very bytes back.
    (folder / "config.json").write_text(json.dumps(config, indent=3) + "\n\n")
    return folder


def random_tensors(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Random values; norms around one."""
    generator = torch.Generator().manual_seed(7)
    out = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        centred = 1 + 0.3 * noise if "norm" in name else noise * shape[-1] ** -0.5
        out[name] = centred.to(dtype)
    return out


def llama_folder(
    folder: Path,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 6,
    tied: bool = True,
    vocab: int = VOCAB,
    layers: int = LAYERS,
    ffn: int = FFN,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    **changes: Any,
) -> Path:
    """A Llama with names written down here, not taken from any table."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, WIDTH)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {
            at + "self_attn.q_proj.weight": (heads * head_dim, WIDTH),
            at + "self_attn.k_proj.weight": (kv_heads * head_dim, WIDTH),
            at + "self_attn.v_proj.weight": (kv_heads * head_dim, WIDTH),
            at + "self_attn.o_proj.weight": (WIDTH, heads * head_dim),
            at + "mlp.gate_proj.weight": (ffn, WIDTH),
            at + "mlp.up_proj.weight": (ffn, WIDTH),
            at + "mlp.down_proj.weight": (WIDTH, ffn),
            at + "input_layernorm.weight": (WIDTH,),
            at + "post_attention_layernorm.weight": (WIDTH,),
        }
    shapes["model.norm.weight"] = (WIDTH,)
    if not tied:
        shapes["lm_head.weight"] = (vocab, WIDTH)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": WIDTH,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 96,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "rope_scaling": None,
        "tie_word_embeddings": tied,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return write_folder(folder, random_tensors(shapes, dtype), {**config, **changes}, shards)


OURO = OuroShape(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=FFN,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=6,
    total_ut_steps=3,
    rope_theta=1e4,
)


def ouro_config(shape: OuroShape, dtype: str = "float32") -> dict[str, Any]:
    """config.json as the published ones are."""
    return {
        "architectures": ["OuroForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_ouro.OuroForCausalLM"},
        "model_type": "ouro",
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "early_exit_threshold": shape.early_exit_threshold,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "layer_types": ["full_attention"] * shape.num_hidden_layers,
        "max_position_embeddings": 96,
        "max_window_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_key_value_heads": shape.num_key_value_heads,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "torch_dtype": dtype,
        "total_ut_steps": shape.total_ut_steps,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocab_size,
    }


def ouro_folder(
    folder: Path, shape: OuroShape = OURO, dtype: torch.dtype = torch.float32, shards: int = 1
) -> Path:
    """An Ouro with the weights of the reference."""
    model = random_ouro(shape, dtype=torch.float32)
    tensors = {name: tensor.detach().to(dtype) for name, tensor in model.state_dict().items()}
    if shape.tie_word_embeddings:
        del tensors["lm_head.weight"]
    config = ouro_config(shape, str(dtype).removeprefix("torch."))
    write_folder(folder, tensors, config, shards)
    (folder / "modeling_ouro.py").write_text("# the model's own code\n")
    return folder


def folder_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, by safetensors' own reader."""
    from safetensors.torch import load_file

    out: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        out |= load_file(path)
    return out


def assert_same_bytes(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """The same names, dtypes, shapes and bits."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        again = other[name]
        assert (tensor.dtype, tensor.shape) == (again.dtype, again.shape), name
        same = tensor.reshape(-1).view(torch.uint8), again.reshape(-1).view(torch.uint8)
        assert torch.equal(*same), name
