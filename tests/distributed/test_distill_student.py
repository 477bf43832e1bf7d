"""A student's first weights: the teacher's, head by head, on one rank and on two."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_lt2.config.schema import AttentionConfig, ParallelConfig, RopeConfig
from megatron_lt2.parallel import platform
from megatron_lt2.recurrent.names import RECURRENT
from tests.ranks import run_ranks
from tests.tiny_run import feed_of, make_random, tiny_config

platform.install()

LLAMA = {
    **{"pattern": "full", "loops": 1, "loop_residual": "none", "num_layers": 4},
    **{"num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "rope": RopeConfig(theta=500.0)},
    "attention": AttentionConfig(output_gate=False),
}
OURO = {
    **LLAMA,
    **{"loops": 3, "num_layers": 2, "num_kv_heads": 4, "norm_mode": "sandwich"},
    **{"inter_loop_norm": True, "exit_gate": True, "tie_embeddings": False},
}


def _config(model, **parallel):
    config = tiny_config(parallel=ParallelConfig(distributed_optimizer=False, **parallel))
    config.model = replace(config.model, **model)
    return config


def _student_config(config, pattern, **changes):
    """As distill/plan.py makes it."""
    from megatron_lt2.config.load import from_values
    from megatron_lt2.distill.plan import _plain, student_model
    from megatron_lt2.distill.settings import DistillSettings, StudentSettings

    settings = DistillSettings(teacher="", student=StudentSettings(**changes))
    values = student_model(settings, config.model, pattern)
    return replace(config, model=from_values({"model": _plain(values)}, "test").model)


def _model(config):
    from megatron_lt2.model.core_config import padded_vocab_size, transformer_config
    from megatron_lt2.model.lt2_model import LT2Model

    model = LT2Model(
        transformer_config(config, on_gpu=False),
        config.model,
        padded_vocab_size=padded_vocab_size(config),
        max_sequence_length=config.data.sequence_length,
    )
    ignored = SimpleNamespace(reload_model_params=lambda: None)
    make_random(SimpleNamespace(model=model, optimizer=ignored), config, seed=9)
    return model.eval()


def _start(config):
    from megatron_lt2.parallel.start import regroup

    regroup(config.parallel, 1)


@torch.no_grad()
def _logits(model, config):
    batch = next(feed_of(config, range(1)))
    return model(batch.tokens, batch.positions, packed_seq_params=batch.packing).numpy()


def _with_all_layers_full(rank, world, configs):
    from megatron_lt2.distill.student import copy_teacher

    found = []
    for config in configs:
        _start(config)
        teacher = _model(config)
        own = _student_config(config, "full")
        student = _model(own)
        for parameter in student.parameters():
            parameter.data.fill_(0.5)
        copy_teacher(student, teacher, ["full"] * config.model.num_layers)
        found.append((_logits(teacher, config), _logits(student, own)))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_with_all_layers_full_a_student_is_its_teacher(world):
    configs = [_config(LLAMA, tensor=world), _config(OURO, tensor=world)]
    for found in run_ranks(world, _with_all_layers_full, configs):
        for teacher, student in found:
            np.testing.assert_array_equal(teacher, student)
            assert np.abs(teacher).max() > 0.1


def _mixers(rank, world, config, names):
    """By mixer: relative distance of its outputs from the teacher's at the start, and whether its
    maps are the teacher's."""
    from megatron_lt2.distill.calibrate import calibrate
    from megatron_lt2.distill.student import SOURCES, copy_teacher
    from megatron_lt2.distill.taps import looking_at, run_again, stream

    _start(config)
    teacher, found = _model(config), {}
    for name in names:
        own = _student_config(config, name)
        student = _model(own)
        mixers = [name] * own.model.num_layers
        copy_teacher(student, teacher, mixers)
        mixer = student.decoder.layers[1].self_attention
        rows = {}
        sizes = [mixer.layout.rows(s) // mixer.tp_size for s in mixer.layout.sections]
        parts = torch.split(mixer.in_proj.weight.detach(), sizes)
        for section, part in zip(mixer.layout.sections, parts, strict=True):
            if section in SOURCES:
                rows[SOURCES[section]] = part.numpy()
        batches = list(feed_of(own, range(1)))
        calibrate(student, teacher, mixers, lambda batches=batches: batches)
        sums = torch.zeros(2, dtype=torch.double)

        def compare(index, inputs, target, student=student, sums=sums):
            layers = [layer.self_attention for layer in student.decoder.layers]
            y = run_again(layers, index % len(layers), inputs, index // len(layers))
            sums += torch.stack([(y - target).square().sum(), target.square().sum()]).double()

        with torch.no_grad(), looking_at(teacher, "mixer", compare):
            for batch in batches:
                stream(teacher, batch.tokens, batch.positions, batch.packing)
        found[name] = (float(sums[0] / sums[1]), rows)
    fused = teacher.decoder.layers[1].self_attention.linear_qkv.weight.detach().numpy()
    return found, fused


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_linear_mixer_starts_from_the_teachers_attention(world):
    """Grouped queries: two key heads serve four."""
    for rank, (found, fused) in enumerate(
        run_ranks(world, _mixers, _config(LLAMA, tensor=world), list(RECURRENT))
    ):
        groups = fused.reshape(2 // world, 4, 6, -1)  # two queries, a key and a value a group
        expected = {
            "q": groups[:, :2].reshape(-1, fused.shape[-1]),
            "k": np.repeat(groups[:, 2], 2, axis=0).reshape(-1, fused.shape[-1]),
            "v": np.repeat(groups[:, 3], 2, axis=0).reshape(-1, fused.shape[-1]),
        }
        for name, (distance, rows) in found.items():
            assert rows.keys() == ({"q", "v"} if name == "hgrn2" else {"q", "k", "v"}), name
            for part, values in rows.items():
                np.testing.assert_array_equal(values, expected[part], err_msg=f"{name} {part}")
            assert distance < 0.995, f"{name} starts {distance:.3f} away, rank {rank}"


def _groups(rank, world, config):
    from megatron_lt2.distill.student import copy_teacher

    _start(config)
    teacher = _model(config)
    own = _student_config(config, "full", loops=2)
    found = {}
    for grouping in ("first", "mean"):
        student = _model(own)
        copy_teacher(student, teacher, ["full", "full"], grouping)
        weights = [layer.mlp.linear_fc2.weight.detach() for layer in student.decoder.layers]
        found[grouping] = [w.numpy() for w in weights]
    theirs = [layer.mlp.linear_fc2.weight.detach().numpy() for layer in teacher.decoder.layers]
    return own.model.num_layers, own.model.loops, found, theirs


def test_layers_of_a_teacher_without_loops_are_grouped():
    layers, loops, found, theirs = run_ranks(1, _groups, _config(LLAMA))[0]
    assert (layers, loops) == (2, 2)
    np.testing.assert_array_equal(found["first"], theirs[:2])
    expected = [(theirs[i] + theirs[i + 2]) / 2 for i in (0, 1)]
    np.testing.assert_allclose(found["mean"], expected, rtol=1e-6)


def _refused(rank, world, config):
    from megatron_lt2.config.errors import ConfigError
    from megatron_lt2.distill.student import copy_teacher

    _start(config)
    teacher = _model(config)
    student = _model(_student_config(config, "gdn", model={"gdn": {"head_v_dim": 8}}))
    with pytest.raises(ConfigError) as caught:
        copy_teacher(student, teacher, ["gdn"] * 4)
    return str(caught.value)


def test_sizes_that_do_not_match_are_refused_with_the_numbers():
    said = run_ranks(1, _refused, _config(LLAMA))[0]
    assert "4 heads of 6 key and 8 value channels, the teacher's attention 4 of 6" in said
