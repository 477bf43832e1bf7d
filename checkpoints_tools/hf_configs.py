"""An export's config.json, generation_config.json, and what its tokenizer pads with."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints_tools.mappings.family import Family
from megatron_lt2.config.schema import RunConfig

if TYPE_CHECKING:
    from megatron_lt2.data.tokenizer import Tokenizer

AUTO_MAP = {
    "AutoConfig": "configuration_lt2.LT2Config",
    "AutoModel": "modeling_lt2.LT2Model",
    "AutoModelForCausalLM": "modeling_lt2.LT2ForCausalLM",
}


def keep_config(folder: Path, kept: dict[str, Any], dtype: str) -> None:
    """The config.json that came with the model, byte for byte unless the weights' dtype differs."""
    names = [name for name in ("dtype", "torch_dtype") if name in kept]
    if all(kept[name] in (dtype, None) for name in names) and names:
        return
    changed: dict[str, Any] = {**kept, **dict.fromkeys(names or ["dtype"], dtype)}
    text = json.dumps(changed, indent=2, ensure_ascii=False) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def special_ids(folder: Path, tokenizer: "Tokenizer") -> dict[str, Any]:
    """EOS, BOS and padding ids; gives the written tokenizer a padding token and left padding.

    Rows of unequal length are padded on the left for generation, with the EOS where the tokenizer
    has no padding token (its attention mask says which positions are real).
    """
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    pad = settings.get("pad_token")
    pad_text = pad.get("content") if isinstance(pad, dict) else pad
    pad_id = tokenizer.backend.token_to_id(pad_text) if pad_text else None
    if pad_id is None:
        settings["pad_token"], pad_id = tokenizer.eos_token, tokenizer.eos_id
    settings["padding_side"] = "left"
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": pad_id,
    }


def write_configs(
    folder: Path, config: RunConfig, family: Family, ids: dict[str, Any], dtype: str
) -> None:
    from transformers import GenerationConfig

    values = family.values(config)
    GenerationConfig(**ids).save_pretrained(folder)
    if family.name == "lt2":
        from megatron_lt2.hf.configuration_lt2 import LT2Config

        LT2Config(
            **values,
            **ids,
            dtype=dtype,
            architectures=[family.architecture],
            auto_map=AUTO_MAP,
        ).save_pretrained(folder)
        return
    written = {
        "architectures": [family.architecture],
        "model_type": family.name,
        **values,
        "hidden_act": "silu",
        "attention_bias": False,
        **ids,
        "dtype": dtype,
        "use_cache": True,
    }
    text = json.dumps(written, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
