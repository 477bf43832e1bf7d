"""Which recurrence kernel an exported model calls, and how."""

import inspect

import pytest
import torch
from tiny_lt2 import LOOPS, VOCAB, cache_of, tiny_model

from megatron_lt2.hf import recurrence_lt2
from megatron_lt2.ops.gdn import chunk_gated_delta_rule

IDS = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def stand_ins(monkeypatch):
    """FLA's two kernels replaced by the plain recurrence behind FLA's own signatures."""
    pytest.importorskip("triton")
    fla = pytest.importorskip("fla.ops.gated_delta_rule")
    calls = []

    def stand_in(name):
        signature = inspect.signature(getattr(fla, name))

        def kernel(*args, **kwargs):
            given = signature.bind(*args, **kwargs).arguments
            assert given["output_final_state"] and given["use_qk_l2norm_in_kernel"]
            calls.append((name, given["q"].shape[1]))
            inputs = (given[key] for key in ("q", "k", "v", "g", "beta"))
            return chunk_gated_delta_rule(*inputs, initial_state=given["initial_state"])

        return kernel

    kernels = tuple(
        stand_in(name) for name in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
    )
    monkeypatch.setattr(recurrence_lt2, "_kernels_for", lambda q, v: kernels)
    return calls


def test_prompts_take_the_chunk_kernel_and_tokens_the_recurrent_one(stand_ins):
    model = tiny_model()
    tokens = model.generate(IDS, max_new_tokens=3, do_sample=False)
    layers = LOOPS * 2
    chunk, step = "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"
    assert stand_ins == [(chunk, 9)] * layers + [(step, 1)] * layers * 2
    assert tokens.shape == (2, 12)


def test_the_calls_mean_what_the_plain_recurrence_means(stand_ins, monkeypatch):
    model = tiny_model()
    options = {"max_new_tokens": 12, "do_sample": False}
    by_stand_ins = model.generate(IDS, **options)
    assert stand_ins
    monkeypatch.undo()
    assert torch.equal(model.generate(IDS, **options), by_stand_ins)


def test_one_token_with_gradients_takes_the_chunk_kernel(stand_ins):
    model = tiny_model()
    model(IDS[:, :1]).logits.sum().backward()
    assert {name for name, _ in stand_ins} == {"chunk_gated_delta_rule"}


def test_cpu_and_32_bit_tensors_stay_on_the_plain_recurrence():
    q = torch.zeros(1, 1, 1, 4)
    assert recurrence_lt2._kernels_for(q, q) is None
    assert recurrence_lt2._kernels_for(q.bfloat16(), q.bfloat16()) is None


@pytest.mark.gpu
def test_bf16_on_a_gpu_is_close_to_fp32_and_decodes_as_it_reads():
    pytest.importorskip("fla")
    reference = tiny_model(gdn_head_k_dim=16, gdn_head_v_dim=32, head_dim=16)
    model = tiny_model(gdn_head_k_dim=16, gdn_head_v_dim=32, head_dim=16).cuda()
    for name, parameter in model.named_parameters():
        if not name.endswith(("A_log", "dt_bias", "loop_residual")):
            parameter.data = parameter.data.bfloat16()
    v = torch.zeros(1, 1, 1, 16, device="cuda", dtype=torch.bfloat16)
    assert recurrence_lt2._kernels_for(v, v) is not None
    ids = torch.randint(0, VOCAB, (2, 75), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(ids).logits
        whole = model(ids.cuda()).logits.float().cpu()
        cache = cache_of(model(ids[:, :70].cuda()))
        steps = [model(ids[:, t : t + 1].cuda(), cache=cache).logits for t in range(70, 75)]
    decoded = torch.cat(steps, 1).float().cpu()
    assert (whole - expected).norm() / expected.norm() < 0.05
    assert (decoded - whole[:, 70:]).norm() / whole[:, 70:].norm() < 0.05
