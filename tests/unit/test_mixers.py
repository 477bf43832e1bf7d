"""What the mixers refuse, and what they tell about themselves."""

import torch

from megatron_lt2.config.schema import ParallelConfig
from megatron_lt2.parallel import platform
from tests.ranks import run_ranks
from tests.tiny_run import tiny_config

platform.install()

from megatron_lt2.mixers.registry import MIXER_NAMES, RECURRENT, get_mixer  # noqa: E402


def _refusal(rank, world, config):
    from tests.tiny_run import build

    try:
        build(config)
    except ValueError as error:
        return str(error)
    return None


def test_linear_mixers_refuse_heads_that_cannot_be_split():
    config = tiny_config(parallel=ParallelConfig(tensor=2, distributed_optimizer=False))
    config.model.pattern = "gdn"
    config.model.gdn.num_heads = 3
    for refusal in run_ranks(2, _refusal, config):
        # megatron-core appends what it was building.
        assert refusal.startswith(
            "a linear mixer with 3 heads cannot be split over 2 tensor-parallel ranks; "
            "choose a divisor of 3"
        )


def _with_a_cache(rank, world, config):
    from tests.tiny_run import build

    mixer = build(config).model.decoder.layers[0].self_attention
    try:
        mixer(torch.zeros(3, 1, config.model.hidden_size), inference_context=object())
    except ValueError as error:
        return str(error)
    return None


def test_linear_mixers_have_no_inference_cache():
    assert "export the model" in run_ranks(1, _with_a_cache, tiny_config())[0]


def test_every_mixer_names_the_settings_of_its_heads():
    model = tiny_config().model
    assert set(MIXER_NAMES) == {"full", "window", "nsa", "dsa", *RECURRENT}
    assert len(RECURRENT) == 9
    for name in RECURRENT:
        assert get_mixer(name).heads(model)[f"model.{name}.num_heads"] == 4
    assert get_mixer("mamba2").heads(model)["model.mamba2.groups x model.mamba2.head_k_dim"] == 12
    assert get_mixer("full").heads(model) == {"model.num_heads": 4, "model.num_kv_heads": 2}
    assert get_mixer("gdn").heads(model) == {"model.gdn.num_heads": 4}
    assert get_mixer("nsa").heads(model) == {"model.nsa.num_heads": 4, "model.nsa.num_kv_heads": 2}
    shared = {"model.dsa.num_heads": 4, "model.dsa.latent_dim + model.dsa.rope_dim": 16}
    assert get_mixer("dsa").heads(model) == shared
    model.gdn.num_heads = 3
    assert get_mixer("gdn").heads(model) == {"model.gdn.num_heads": 3}


def test_matrices_are_part_of_the_parameters():
    model = tiny_config().model
    for name in MIXER_NAMES:
        mixer = get_mixer(name)
        assert 0 < mixer.matrix_parameters(model) <= mixer.parameters(model)
