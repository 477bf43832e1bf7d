"""Which passes through a layer run again: the earliest, as many as `memory.recompute_layers`."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_lt2.parallel import platform

platform.install()

from megatron_lt2.config.checks import check_config  # noqa: E402
from megatron_lt2.config.errors import ConfigError  # noqa: E402
from megatron_lt2.config.schema import ModelConfig  # noqa: E402
from megatron_lt2.model.activations import Share, layer_bytes, residual_bytes  # noqa: E402
from megatron_lt2.model.cost import estimate_memory, recomputed_share  # noqa: E402
from megatron_lt2.model.looped_block import LoopedTransformerBlock  # noqa: E402
from tests.tiny_run import tiny_config  # noqa: E402


def _again(share, loops=3, layers=4):
    """Numbers of the passes that run again."""
    block = SimpleNamespace(
        config=SimpleNamespace(recompute_layers=share), loops=loops, layers=[None] * layers
    )
    return [
        loop * layers + index
        for loop in range(loops)
        for index in range(layers)
        if LoopedTransformerBlock._runs_again(block, loop, index)
    ]


@pytest.mark.parametrize(
    "share, passes", [(0.0, 0), (1 / 12, 1), (0.25, 3), (0.3, 4), (0.5, 6), (0.99, 12), (1.0, 12)]
)
def test_the_earliest_passes_run_again(share, passes):
    assert _again(share) == list(range(passes))


def test_the_planner_counts_the_same_passes():
    for share in (0.0, 0.1, 0.25, 0.5, 0.7, 1.0):
        config = tiny_config()
        config.model.num_layers, config.model.loops = 4, 3
        config.memory.recompute_layers = share
        assert recomputed_share(config) == pytest.approx(len(_again(share)) / 12)


def test_more_recomputation_needs_less_memory():
    config = tiny_config()
    config.model.num_layers, config.data.sequence_length = 6, 4096
    needs = []
    for config.memory.recompute_layers in (0.25, 0.5, 0.75, 1.0):
        for config.memory.recompute_cheap in (False, True):
            needs.append(estimate_memory(config, 1, 2).activations)
    # Cheap parts matter in the layers that are left.
    assert needs == sorted(needs, reverse=True) and needs[0] > needs[1] and needs[-1] == needs[-2]


def test_the_page_about_memory_says_what_is_counted():
    page = Path(__file__).parents[2] / "docs/configuration.md"
    model = ModelConfig(vocab_size=128256)
    stream = residual_bytes(model, Share(tokens=8192))
    for name in ("gdn", "mamba2", "kda", "full"):
        kept = [layer_bytes(name, model, Share(tokens=8192, cheap=x)) for x in (False, True)]
        numbers = " | ".join(f"{each / 1e3:.1f} kB" for each in (*kept, stream))
        assert f"| `{name}` | {numbers} |" in page.read_text("utf-8")


@pytest.mark.parametrize("share", [-0.1, 1.1, 2.0])
def test_a_share_lies_between_0_and_1(share):
    config = tiny_config()
    config.memory.recompute_layers = share
    with pytest.raises(ConfigError, match=r"memory.recompute_layers is .* from 0 to 1"):
        check_config(config, 1)


@pytest.mark.parametrize("pattern", ["dsa", "gdn+dsa"])
def test_dsa_runs_again_as_a_whole_or_not(pattern):
    config = tiny_config()
    config.model.pattern = pattern
    for config.memory.recompute_layers in (0.0, 1.0):
        check_config(config, 1)
    config.memory.recompute_layers = 0.5
    with pytest.raises(ConfigError, match="dsa's loops in two orders; set it to 0 or 1"):
        check_config(config, 1)
    config.model.pattern = "gdn+nsa"
    check_config(config, 1)
