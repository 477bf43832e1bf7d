"""The choice of a backend, and the software that FLA's kernels need."""

import subprocess
import sys

import pytest
from packaging.version import Version

from megatron_lt2.kernels import backend


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
        ("0.5.1", "3.8.0", "0.5.1 has wrong gradients, at least 0.6.0"),
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
    install("0.6.0", "3.7.1", hopper=True)
    assert backend.resolve_backend("auto", "cuda") == "fla"
    install("0.6.0", "3.3.1", hopper=True)
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


def test_a_function_of_fla_is_looked_up_once_and_only_in_a_good_stack(install, monkeypatch) -> None:
    asked = []

    def import_module(name: str):
        asked.append(name)
        return {"fla.ops.gla": pytest}[name]

    monkeypatch.setattr(backend.importlib, "import_module", import_module)
    backend.fla_function.cache_clear()
    install("0.5.1", "3.8.0")
    with pytest.raises(RuntimeError, match="wrong gradients"):
        backend.fla_function("fla.ops.gla", "raises")
    assert asked == []
    install("0.6.0", "3.8.0")
    for _ in range(2):
        assert backend.fla_function("fla.ops.gla", "raises") is pytest.raises
    assert asked == ["fla.ops.gla"]
    backend.fla_function.cache_clear()


def test_import_needs_neither_triton_nor_fla() -> None:
    code = (
        "import sys; sys.modules['triton'] = sys.modules['fla'] = None\n"
        "import importlib, pkgutil, megatron_lt2.kernels\n"
        "kernels = megatron_lt2.kernels\n"
        "names = [m.name for m in pkgutil.iter_modules(kernels.__path__)]\n"
        "assert len(names) > 8\n"
        "for name in names: importlib.import_module(f'megatron_lt2.kernels.{name}')\n"
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
