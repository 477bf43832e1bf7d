"""The numbers of docs/mixers.md are those of the code."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_lt2.config.mixers import KDAConfig
from megatron_lt2.config.schema import ModelConfig
from megatron_lt2.mixers.registry import MIXER_NAMES, RECURRENT, get_mixer, recurrent_mixer
from megatron_lt2.model.counting import count_parameters
from megatron_lt2.parallel import platform

platform.install()

PAGE = (Path(__file__).resolve().parents[2] / "docs/mixers.md").read_text("utf-8")
MODEL = ModelConfig(vocab_size=128256)


def _row(name: str) -> list[str]:
    """Cells of the first table's row."""
    line = next(x for x in PAGE.splitlines() if re.match(rf"\| `{name}` \| [\d.]+M", x))
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("name", MIXER_NAMES)
def test_costs_in_the_table(name: str) -> None:
    mixer = get_mixer(name)
    cells = _row(name)
    assert cells[1] == f"{mixer.parameters(MODEL) / 1e6:.2f}M"
    flops = 2 * mixer.matrix_parameters(MODEL) + mixer.token_flops(MODEL, 4096)
    assert cells[2] == f"{flops / 1e6:.1f}"
    if name in RECURRENT:
        recurrent = recurrent_mixer(name)(MODEL.mixer_settings(name))
        layout = recurrent.layout
        assert cells[3] == f"{layout.head_k_dim}/{layout.head_v_dim}"
        assert cells[4] == f"{recurrent.state_numbers() * 4 / 2**20:.2f} MiB"


@pytest.mark.parametrize(
    "pattern, layers, billions",
    [("gdn", 21, 1.520), ("kda", 24, 1.523), ("deltanet", 24, 1.497), ("mamba2", 21, 1.525)]
    + [("retnet", 18, 1.490), ("full", 22, 1.485), ("window", 22, 1.485), ("hgrn2", 24, 1.496)],
)
def test_matched_depths(pattern: str, layers: int, billions: float) -> None:
    model = replace(MODEL, pattern=pattern, num_layers=layers)
    assert f"{count_parameters(model) / 1e9:.3f}" == f"{billions:.3f}"
    assert f"{billions:.3f}" in PAGE


def test_kda_with_the_papers_match() -> None:
    model = replace(MODEL, pattern="kda", kda=KDAConfig(head_v_dim=192))
    assert f"{count_parameters(model) / 1e9:.3f}B" in PAGE


def test_every_own_weight_is_named_as_fp32() -> None:
    for name in RECURRENT:
        for weight in recurrent_mixer(name)(MODEL.mixer_settings(name)).layout.weights:
            assert f"`{weight}`" in PAGE, weight
