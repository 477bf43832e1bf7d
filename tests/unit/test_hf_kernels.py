"""Which kernels an exported model calls."""

import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_lt2 import ALL, LINEAR, VOCAB, cache_of, tiny_config, tiny_model, to_bfloat16

from megatron_lt2.hf import linear_lt2
from megatron_lt2.hf.linear_lt2 import choose_backend, describe_mixer

IDS = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))


def gdn_layout(**sizes: int) -> Any:
    sizes = {"head_k_dim": 8, "head_v_dim": 6} | sizes
    config = tiny_config(mixers=["gdn"], gdn=sizes)
    return describe_mixer(config, "gdn", 0).layout


def on_a_gpu(dtype: torch.dtype) -> Any:
    """As much of a CUDA tensor as the choice looks at."""
    return SimpleNamespace(is_cuda=True, dtype=dtype)


def test_fla_serves_16_bits_on_a_gpu_and_nothing_else(monkeypatch):
    monkeypatch.setattr(linear_lt2, "_fla_works", lambda: True)
    layout = gdn_layout()
    assert choose_backend(on_a_gpu(torch.bfloat16), layout) == "fla"
    assert choose_backend(on_a_gpu(torch.float16), layout) == "fla"
    assert choose_backend(on_a_gpu(torch.float32), layout) == "torch"
    assert choose_backend(torch.zeros(1, dtype=torch.bfloat16), layout) == "torch"
    for sizes, backend in (
        ({"head_k_dim": 256}, "fla"),
        ({"head_k_dim": 258}, "torch"),
        ({"head_k_dim": 7}, "torch"),
        ({"head_v_dim": 5}, "torch"),
    ):
        assert choose_backend(on_a_gpu(torch.bfloat16), gdn_layout(**sizes)) == backend, sizes


@pytest.fixture
def fresh_check():
    linear_lt2._fla_works.cache_clear()
    yield
    linear_lt2._fla_works.cache_clear()


def test_a_missing_fla_is_no_news(monkeypatch, fresh_check):
    monkeypatch.setattr(linear_lt2.importlib.util, "find_spec", lambda name: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_backend(on_a_gpu(torch.bfloat16), gdn_layout()) == "torch"


@pytest.mark.parametrize("place", ["check_fla_installed", "import"])
def test_a_broken_fla_is_said_once(monkeypatch, fresh_check, place):
    layout = gdn_layout()

    def fail(*_: Any) -> None:
        raise RuntimeError("Triton does not fit")

    monkeypatch.setattr(linear_lt2.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(linear_lt2, "check_fla_installed", lambda: None)
    if place == "import":
        monkeypatch.setattr(linear_lt2.importlib, "import_module", fail)
    else:
        monkeypatch.setattr(linear_lt2, place, fail)
    with pytest.warns(UserWarning, match="fla cannot be used .Triton does not fit.") as said:
        assert choose_backend(on_a_gpu(torch.bfloat16), layout) == "torch"
        assert choose_backend(on_a_gpu(torch.bfloat16), layout) == "torch"
    assert len(said) == 1


@pytest.mark.parametrize("name", LINEAR)
def test_the_choice_reaches_every_kernel_of_a_mixer(monkeypatch, name):
    model = tiny_model(mixers=[name], loops=1)
    mixer = model.model.layers[0].mixer
    asked: dict[str, str] = {}

    def noted(kernel: str, function: Any) -> Any:
        def call(*args: Any, backend: str, **kwargs: Any) -> Any:
            asked[kernel] = backend
            return function(*args, backend="torch", **kwargs)

        return call

    for kernel in ("causal_conv1d", "gated_rms_norm", "rms_norm"):
        monkeypatch.setattr(linear_lt2, kernel, noted(kernel, getattr(linear_lt2, kernel)))
    mix = mixer.recurrent.mix

    def mix_noted(parts: Any, weights: Any, scan: Any) -> Any:
        asked["recurrence"] = scan.backend
        scan = replace(scan, backend="torch")
        assert scan.keep_state and scan.heads == slice(0, mixer.layout.heads)
        return mix(parts, weights, scan)

    monkeypatch.setattr(mixer.recurrent, "mix", mix_noted)
    monkeypatch.setattr(linear_lt2, "choose_backend", lambda x, layout: "chosen")
    expected = {"recurrence", "gated_rms_norm" if mixer.layout.gate else "rms_norm"}
    expected |= {"causal_conv1d"} if mixer.layout.conv_names else set()
    model(IDS)
    assert asked == dict.fromkeys(expected, "chosen")


@pytest.mark.gpu
@pytest.mark.parametrize("name", LINEAR)
def test_bf16_on_a_gpu_is_close_to_fp32_and_decodes_as_it_reads(name):
    pytest.importorskip("fla")
    sizes = {name: {"head_k_dim": 16, "head_v_dim": 32, "num_heads": 2}}
    reference = tiny_model(mixers=[name], loops=2, **sizes)
    model = tiny_model(mixers=[name], loops=2, **sizes).cuda()
    to_bfloat16(model)
    layout = model.model.layers[0].mixer.layout
    assert choose_backend(torch.zeros(1, device="cuda", dtype=torch.bfloat16), layout) == "fla"
    ids = torch.randint(0, VOCAB, (2, 75), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :20] = 0
    with torch.no_grad():
        expected = reference(ids, attention_mask=mask).logits
        whole = model(ids.cuda(), attention_mask=mask.cuda()).logits.float().cpu()
        cache = cache_of(model(ids[:, :70].cuda(), attention_mask=mask[:, :70].cuda()))
        steps = [model(ids[:, t : t + 1].cuda(), cache=cache).logits for t in range(70, 75)]
    decoded = torch.cat(steps, 1).float().cpu()
    real = mask.bool()
    assert (whole - expected)[real].norm() / expected[real].norm() < 0.05
    assert (decoded - whole[:, 70:]).norm() / whole[:, 70:].norm() < 0.05


@pytest.mark.gpu
def test_all_mixers_generate_on_a_gpu():
    model = tiny_model(mixers=ALL, loops=1).cuda()
    expected = tiny_model(mixers=ALL, loops=1).generate(IDS, max_new_tokens=8, do_sample=False)
    assert torch.equal(
        model.generate(IDS.cuda(), max_new_tokens=8, do_sample=False).cpu(), expected
    )
