"""Rotation inside the attention core, with FLA's kernel interpreted, is megatron-core's (fp32).

The interpreter must be switched on before Triton is first imported, hence a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("fla")
pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

inside = pytest.mark.skipif(not INTERPRETING, reason="runs in a process with TRITON_INTERPRET=1")

if INTERPRETING:
    import tests.interpreter  # noqa: F401
    from megatron_lt2.parallel import platform

    platform.install()
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

    from megatron_lt2.mixers import attention
    from megatron_lt2.mixers.attention import CausalCoreAttention


@pytest.mark.skipif(INTERPRETING, reason="is the process that this test starts")
def test_in_a_process_with_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-rs", str(Path(__file__))]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, timeout=300, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


DIM, LENGTH = 8, 11
POSITIONS = {
    "a row": range(LENGTH),
    "packed documents": [0, 1, 2, 0, 0, 1, 2, 3, 4, 0, 1],
    "a stretch of a row": range(30, 30 + LENGTH),
}


def _angles(positions):
    """[s, 1, 1, d], both halves the same, as megatron-core makes them."""
    steps = 1.0 / 10000.0 ** (torch.arange(0, DIM, 2).float() / DIM)
    half = torch.tensor(list(positions)).float()[:, None] * steps
    return torch.cat([half, half], dim=-1)[:, None, None]


def _config():
    return SimpleNamespace(
        apply_rope_fusion=False,
        rotary_interleaved=False,
        multi_latent_attention=False,
        context_parallel_size=1,
        cp_comm_type=None,
    )


def _plain(query, key, angles):
    packed = query.dim() == 3
    found = []
    for x in (query, key):
        x = x[:, None] if packed else x
        turned = apply_rotary_pos_emb(x, angles, _config(), cp_group=object())
        found.append(turned[:, 0] if packed else turned)
    return found


def _inputs(shape):
    """Queries of four heads and keys of two."""
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(*shape, heads, DIM, generator=generator).requires_grad_() for heads in (4, 2)
    ]


def _with_gradients(rotate, shape, angles):
    inputs = _inputs(shape)
    outputs = rotate(*inputs, angles)
    generator = torch.Generator().manual_seed(6)
    directions = [torch.randn(x.shape, generator=generator) for x in outputs]
    return [*outputs, *torch.autograd.grad(outputs, inputs, directions)]


@inside
@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("shape", [(LENGTH,), (LENGTH, 1), (LENGTH, 3)], ids=str)
def test_rotation(shape, positions):
    angles = _angles(positions)
    ours = _with_gradients(attention._rotated, shape, angles)
    theirs = _with_gradients(_plain, shape, _angles(positions))
    for got, expected in zip(ours, theirs, strict=True):
        assert got.shape == expected.shape
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@inside
def test_a_position_further_is_seen():
    ours = attention._rotated(*_inputs((LENGTH, 1)), _angles(range(1, LENGTH + 1)))
    theirs = _plain(*_inputs((LENGTH, 1)), _angles(range(LENGTH)))
    assert (ours[0] - theirs[0]).abs().max() > 0.1


@inside
def test_tables_are_made_once():
    angles, tables = _angles(range(LENGTH)), []
    for _ in range(2):
        attention._rotated(*_inputs((LENGTH, 1)), angles)
        tables.append(angles.lt2_tables)
    assert tables[0] is tables[1]


def _core(kernels):
    core = CausalCoreAttention.__new__(CausalCoreAttention)
    torch.nn.Module.__init__(core)
    core.config, core.kernels, core.windows = _config(), kernels, (None,)
    core.softmax_scale, core.context_group, core.angles = None, None, None
    return core


@inside
def test_the_core_rotates_by_the_angles_it_was_given():
    angles = _angles(range(LENGTH))
    query, key = _inputs((LENGTH, 2))
    core = _core("fla")
    core.angles = angles
    got = core(query, key, key)
    core.angles = None
    torch.testing.assert_close(got, core(*_plain(query, key, angles), key), rtol=1e-5, atol=1e-5)
    assert (got - core(query, key, key)).abs().max() > 0.1


@inside
def test_who_rotates():
    angles = _angles(range(3))
    assert _core("fla").takes_angles(angles)
    assert not _core("torch").takes_angles(angles)
    assert not _core("fla").takes_angles(None)
    interleaved = _core("fla")
    interleaved.config.rotary_interleaved = True
    assert not interleaved.takes_angles(angles)


@inside
def test_angles_of_an_earlier_pass_are_gone(monkeypatch):
    from megatron.core.transformer.attention import SelfAttention

    layer = attention.FullAttention.__new__(attention.FullAttention)
    torch.nn.Module.__init__(layer)
    layer.core_attention = _core("fla")
    given = []
    monkeypatch.setattr(
        SelfAttention, "forward", lambda self, *a, rotary_pos_emb, **k: given.append(rotary_pos_emb)
    )
    angles = _angles(range(3))
    layer.forward(torch.zeros(3, 1, 4), rotary_pos_emb=angles)
    assert layer.core_attention.angles is angles and given == [None]
    layer.forward(torch.zeros(3, 1, 4), rotary_pos_emb=None)
    assert layer.core_attention.angles is None
