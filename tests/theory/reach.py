"""How far a changed token reaches in a looped model of window attention, by perturbation.

One layer looks w - 1 tokens back, so N layers in T loops can carry a change T * N * (w - 1) tokens
on. How much arrives is another matter: each layer adds to its input, so most of a change stays
where it is.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_lt2.config.schema import RunConfig, WindowConfig
from tests.theory.models import random_model
from tests.tiny_run import tiny_config


def window_config(window: int, layers: int, loops: int, width: int = 32) -> RunConfig:
    """A model of `layers` window layers."""
    config = tiny_config()
    config.model = replace(
        config.model,
        pattern="window",
        num_layers=layers,
        loops=loops,
        hidden_size=width,
        ffn_hidden_size=3 * width // 2,
        window=WindowConfig(size=window),
    )
    config.data.isolate_documents = False
    return config


def farthest(window: int, layers: int, loops: int) -> int:
    """T * N * (w - 1)."""
    return loops * layers * (window - 1)


def drop_residual(model: Any) -> None:
    """Let every layer's attention replace its input, instead of adding to it."""
    for layer in model.decoder.layers:
        layer.self_attn_bda = lambda training, fused: lambda out, residual, p: out[0]


def final_states(model: Any, tokens: Tensor, passes: int | None = None) -> Tensor:
    """Hidden states after the last loop and the final norm [b, s, d]."""
    kept: list[Tensor] = []
    hook = model.decoder.register_forward_hook(lambda module, given, out: kept.append(out))
    positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
    with torch.no_grad():
        model(tokens, positions, loops=passes)
    hook.remove()
    return kept[0].transpose(0, 1)


def changes(
    window: int,
    layers: int,
    loops: int,
    *,
    place: int,
    length: int,
    passes: int | None = None,
    rows: int = 1,
    width: int = 32,
    initial: bool = False,
    residual: bool = True,
) -> dict[str, Any]:
    """Change the token at `place` of `rows` random rows, and see which states change.

    Args:
        passes: loops to run; default `loops`.
        initial: keep the initial weights that training starts from.
        residual: False: attention replaces its input.

    Returns:
        "same" [rows, length]: the state is equal bit for bit; "size" [length]: norm of the change,
        root mean square over the rows.
    """
    config = window_config(window, layers, loops, width)
    model = random_model(config, initial=initial)
    if not residual:
        drop_residual(model)
    generator = torch.Generator().manual_seed(3)
    vocabulary = config.model.vocab_size
    tokens = torch.randint(1, vocabulary, (rows, length), generator=generator)
    other = tokens.clone()
    other[:, place] = other[:, place] % (vocabulary - 1) + 1
    before, after = (final_states(model, x, passes) for x in (tokens, other))
    return {
        "same": (before == after).all(-1).numpy(),
        "size": (after - before).square().sum(-1).mean(0).sqrt().numpy(),
    }


def distance_holding(size: Any, share: float, place: int) -> int:
    """Tokens after `place` within which `share` of the change that left it lies, by squares."""
    energy = size[place + 1 :] ** 2
    held = energy.cumsum() / energy.sum()
    return int((held < share).sum()) + 1
