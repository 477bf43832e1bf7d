"""The guards around FLA's kernels, and the choice of a backend."""

import subprocess
import sys

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from megatron_lt2.kernels import backend
from megatron_lt2.kernels.conv import causal_conv1d
from megatron_lt2.kernels.gdn import gated_delta_rule
from megatron_lt2.kernels.norms import gated_rms_norm
from megatron_lt2.ops import conv, gdn, norms


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    """Pretend that these versions and this GPU are here."""

    def pretend(fla: str | None, triton: str | None, hopper: bool = False) -> None:
        versions = {"fla-core": fla, "flash-linear-attention": fla, "triton": triton}

        def installed(distribution: str) -> Version | None:
            version = versions[distribution]
            return None if version is None else Version(version)

        monkeypatch.setattr(backend, "_installed", installed)
        monkeypatch.setattr(backend, "is_hopper", lambda: hopper)
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    return pretend


@pytest.fixture
def interpreting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the guards of single calls pass the CPU, so that the others can be reached."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def test_good_stack_is_used_on_a_gpu(install) -> None:
    install("0.6.0", "3.8.0", hopper=True)
    assert backend.resolve_backend("auto", "cuda") == "fla"
    assert backend.resolve_backend("fla", "cuda") == "fla"
    assert backend.resolve_backend("torch", "cuda") == "torch"


def test_cpu_takes_torch_without_looking_for_fla(install) -> None:
    install(None, None)
    assert backend.resolve_backend("auto", "cpu") == "torch"
    assert backend.resolve_backend("torch", "cpu") == "torch"
    with pytest.raises(ValueError, match="CUDA GPU.*precision.kernels=torch"):
        backend.resolve_backend("fla", "cpu")


@pytest.mark.parametrize("choice", ["auto", "fla"])
@pytest.mark.parametrize(
    ("fla", "triton", "message"),
    [
        (None, "3.8.0", "need flash-linear-attention: pip install"),
        ("0.5.1", "3.8.0", "0.5.1 has wrong gradients, at least 0.5.2"),
        ("0.6.0", None, "need Triton: pip install"),
        ("0.6.0", "3.4.0", "Hopper.*at least 3.7.1"),
        ("0.6.0", "3.6.0", "Hopper.*at least 3.7.1"),
        ("0.6.0", "3.7.0", "Hopper.*at least 3.7.1"),
    ],
)
def test_bad_stack_says_what_to_install(install, choice, fla, triton, message) -> None:
    install(fla, triton, hopper=True)
    with pytest.raises(RuntimeError, match=message) as error:
        backend.resolve_backend(choice, "cuda")
    text = str(error.value)
    assert "pip install" in text and "precision.kernels=torch" in text and "\n" not in text


def test_triton_trap_is_hopper_only_and_ends_with_the_fix(install) -> None:
    install("0.6.0", "3.6.0", hopper=False)
    assert backend.resolve_backend("auto", "cuda") == "fla"
    install("0.5.2", "3.7.1", hopper=True)
    assert backend.resolve_backend("auto", "cuda") == "fla"
    install("0.5.2", "3.3.1", hopper=True)
    assert backend.resolve_backend("auto", "cuda") == "fla"


def test_unknown_choices_are_refused() -> None:
    with pytest.raises(ValueError, match="not 'triton'"):
        backend.resolve_backend("triton", "cuda")
    with pytest.raises(ValueError, match="not 'auto'"):
        backend.use_fla("auto")


def test_interpreted_kernels_may_run_on_the_cpu(install) -> None:
    install("0.6.0", "3.8.0")
    assert backend.resolve_backend("auto", "cpu") == "torch"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        assert backend.resolve_backend("fla", "cpu") == "fla"


def test_versions_are_read_from_the_installation() -> None:
    assert backend._installed("torch") is not None
    assert backend._installed("no-such-distribution") is None


def gdn_inputs(heads: int = 2, key: int = 4, value: int = 6, batch: int = 1) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, 5, heads, *shape, generator=random)

    q, k, v = normal(key), normal(key), normal(value)
    return {"q": q, "k": k, "v": v, "g": -normal().square(), "beta": normal().sigmoid()}


def call_gdn(x: dict[str, Tensor], **options):
    return gated_delta_rule(x["q"], x["k"], x["v"], x["g"], x["beta"], **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: {**x, "k": x["k"][:, :, :1]}, "same batch, length and heads"),
        (lambda x: {**x, "v": torch.cat([x["v"], x["v"]], 2)}, "same batch, length and heads"),
        (lambda x: {**x, "g": x["g"][..., :1]}, "one number a token and head"),
        (lambda x: gdn_inputs(key=5), "even numbers"),
        (lambda x: gdn_inputs(value=7), "even numbers"),
        (lambda x: gdn_inputs(key=258), "up to 256 key channels"),
        (lambda x: {**x, "v": x["v"].bfloat16()}, "one of bf16, fp16, fp32"),
        (lambda x: {name: y.double() for name, y in x.items()}, "one of bf16, fp16, fp32"),
    ],
)
def test_gdn_guards(interpreting, change, message) -> None:
    with pytest.raises(ValueError, match=message):
        call_gdn(change(gdn_inputs()), backend="fla")


def test_packed_batches_are_refused(interpreting) -> None:
    borders = torch.tensor([0, 5])
    with pytest.raises(ValueError, match="batch size is 2"):
        call_gdn(gdn_inputs(batch=2), backend="fla", cu_seqlens=borders)
    with pytest.raises(ValueError, match="batch size is 2"):
        causal_conv1d(torch.zeros(2, 5, 3), torch.zeros(3, 4), backend="fla", cu_seqlens=borders)


def test_conv_and_norm_guards(interpreting) -> None:
    x = torch.zeros(1, 5, 3)
    with pytest.raises(ValueError, match="channels"):
        causal_conv1d(x, torch.zeros(4, 4), backend="fla")
    with pytest.raises(ValueError, match="bf16"):
        causal_conv1d(x.double(), torch.zeros(3, 4), backend="fla")
    with pytest.raises(ValueError, match="gate"):
        gated_rms_norm(x, x[:, :1], torch.ones(3), 1e-5, backend="fla")
    with pytest.raises(ValueError, match="weight"):
        gated_rms_norm(x, x, torch.ones(1), 1e-5, backend="fla")
    with pytest.raises(ValueError, match="bf16"):
        gated_rms_norm(x, x.bfloat16(), torch.ones(3), 1e-5, backend="fla")


def test_fla_on_the_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = torch.zeros(1, 5, 3)
    for call in (
        lambda: call_gdn(gdn_inputs(), backend="fla"),
        lambda: causal_conv1d(x, torch.zeros(3, 4), backend="fla"),
        lambda: gated_rms_norm(x, x, torch.ones(3), 1e-5, backend="fla"),
    ):
        with pytest.raises(ValueError, match="CUDA GPU"):
            call()


def test_torch_backend_is_the_plain_operation() -> None:
    x = gdn_inputs()
    state = torch.randn(1, 2, 4, 6, generator=torch.Generator().manual_seed(1))
    expected = gdn.chunk_gated_delta_rule(*x.values(), initial_state=state, scale=0.3)
    o, final = call_gdn(x, backend="torch", initial_state=state, scale=0.3, output_final_state=True)
    assert torch.equal(o, expected[0]) and final is not None and torch.equal(final, expected[1])
    assert call_gdn(x, backend="torch")[1] is None

    signal, taps = x["v"].flatten(2), torch.randn(12, 4)
    y, final = causal_conv1d(
        signal, taps, backend="torch", activation=None, output_final_state=True
    )
    expected = conv.causal_conv1d(signal, taps, activation=None)
    assert torch.equal(y, expected[0]) and final is not None and torch.equal(final, expected[1])
    assert causal_conv1d(signal, taps, backend="torch")[1] is None

    normed = gated_rms_norm(x["q"], x["k"], torch.ones(4), 1e-5, backend="torch")
    assert torch.equal(normed, norms.gated_rms_norm(x["q"], x["k"], torch.ones(4), 1e-5))


def test_import_needs_neither_triton_nor_fla() -> None:
    code = (
        "import sys; sys.modules['triton'] = sys.modules['fla'] = None\n"
        "import megatron_lt2.kernels.backend, megatron_lt2.kernels.gdn\n"
        "import megatron_lt2.kernels.conv, megatron_lt2.kernels.norms\n"
        "assert megatron_lt2.kernels.backend.resolve_backend('auto', 'cpu') == 'torch'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_apex_is_told_from_its_namesake(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    assert backend.detect_apex() is None
    package = tmp_path / "apex"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    sys.path_importer_cache.clear()
    assert backend.detect_apex() == "unrelated"
    (package / "multi_tensor_apply").mkdir()
    assert backend.detect_apex() == "nvidia"
