"""The self-test tells right kernels from wrong ones, as a command and in the trainer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lt2 import selftest
from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.mixers import GDNConfig
from megatron_lt2.config.schema import ModelConfig, RunConfig
from megatron_lt2.mixers.registry import RECURRENT
from megatron_lt2.recurrent import gdn as recurrent_gdn

CPU = torch.device("cpu")
SMALL = ["--tokens", "30"]
TINY = ModelConfig(num_layers=2, hidden_size=32, num_heads=4, gdn=GDNConfig(head_k_dim=6))
RIGHT = recurrent_gdn.gated_delta_net


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text("model: {pattern: 2*gdn+retnet, num_layers: 3, hidden_size: 32, num_heads: 4}")
    return str(path)


def _break_gdn(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Make gdn's kernel wrong for fp32, which is the fast run here; the plain one is fp64."""

    def kernel(q, k, v, a, b, **given):  # type: ignore[no-untyped-def]
        if q.dtype == torch.float32:
            if fault == "gradient":
                a = a.detach() + 1.1 * (a - a.detach())
            elif fault == "two gradients":
                a = a.detach() + 1.1 * (a - a.detach())
                b = b * 1
                b.register_hook(lambda gradient: gradient * float("nan"))
            elif fault == "no gradient":
                b = b.detach()
            elif fault == "crash":
                raise RuntimeError("out of shared memory")
        out, state = RIGHT(q, k, v, a, b, **given)
        if q.dtype == torch.float32 and fault == "output":
            out = 1.01 * out
        elif q.dtype == torch.float32 and fault == "nan":
            out = (
                out + torch.where(torch.arange(out.shape[1]) == 7, float("nan"), 0.0)[:, None, None]
            )
        return out, state

    monkeypatch.setattr(recurrent_gdn, "gated_delta_net", kernel)


def _compare(name: str = "gdn", **changes: object) -> selftest.Comparison:
    given = {"device": CPU, "dtype": torch.float32, "backend": "torch", "tokens": 30}
    return selftest.compare(name, TINY, **{**given, "packed": True, **changes})  # type: ignore


@pytest.mark.parametrize("name", selftest.TESTED)
@pytest.mark.parametrize("packed", [True, False])
def test_every_mixer_agrees_with_itself(name: str, packed: bool) -> None:
    result = _compare(name, packed=packed, ranks=2)
    assert result.agrees
    # Rounding, not zero: two runs were compared, and some gradient was off most.
    assert 0 < result.output < 1e-5 and 0 < result.gradient < 1e-4
    assert selftest.refusal([result]) is None


@pytest.mark.parametrize("fault", ["loss", "selection"])
def test_a_wrong_sparse_kernel_is_named(
    fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_lt2.kernels import dsa

    name = "indexer_loss" if fault == "loss" else "select_keys"
    right = getattr(dsa, name)

    def wrong(*given: Any, **options: Any) -> torch.Tensor:
        found = right(*given, **options)
        if fault == "loss":
            return 1.03 * found if given[1].q.dtype == torch.float32 else found
        first = given[0]
        return (found - 1).clamp(min=-1) if first.dtype == torch.float32 else found

    monkeypatch.setattr(dsa, name, wrong)
    assert selftest.main([*SMALL, "--mixers", "window,dsa"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: the kernels of dsa do not compute") and err.count("\n") == 1
    assert "gradient of index_" in err if fault == "loss" else "output off by" in err


def test_what_a_kernel_does_not_take_is_skipped_with_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {pattern: nsa+dsa, num_layers: 2, nsa: {num_kv_heads: 2}}")
    monkeypatch.setattr(selftest, "resolve_backend", lambda *_: "fla")
    monkeypatch.setattr(selftest, "compare", lambda name, *_, **__: 1 / 0)
    assert selftest.main(["--config", str(path), "--dtype", "fp16"]) == 0
    out = capsys.readouterr().out
    assert "nsa skipped: 16 query heads over 2 key heads are 8 a key head" in out
    assert "dsa skipped: torch.float16" in out


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert selftest.main([*SMALL, "--mixers", "gdn,retnet"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("CPU, kernels torch, torch.float32, 30 tokens\n")
    table = out.split("\n\n")[1].splitlines()
    assert table[0].startswith("| mixer | output | worst gradient | of | allowed |")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]
    assert [row[0] for row in rows] == ["gdn", "retnet"]
    assert all(len(row) == table[0].count("|") - 1 and row[5] == "ok" for row in rows)
    assert err == ""


@pytest.mark.parametrize(
    "fault, named",
    [
        ("gradient", ("output off by 0.0%", "gradient of decay by 10.0%")),
        ("no gradient", ("gradient of beta by inf%",)),
        ("two gradients", ("gradient of beta by nan%",)),
        ("output", ("output off by 1.0%",)),
        ("nan", ("output off by nan%",)),
    ],
)
def test_a_wrong_kernel_is_named(
    fault: str,
    named: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _break_gdn(monkeypatch, fault)
    assert selftest.main([*SMALL, "--mixers", "gdn,retnet"]) == 1
    out, err = capsys.readouterr()
    assert err.startswith("error: the kernels of gdn do not compute what the plain recurrence says")
    assert err.count("\n") == 1
    for part in named:
        assert part in err
    table = out.split("\n\n")[1].splitlines()
    assert ["FAILED" in line for line in table[2:]] == [True, False]
    assert "| ok |" in table[3]


def test_a_kernel_that_cannot_run_leaves_the_others_their_turn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _break_gdn(monkeypatch, "crash")
    assert selftest.main([*SMALL, "--mixers", "gdn,retnet"]) == 1
    out, err = capsys.readouterr()
    assert err == "error: gdn cannot run: RuntimeError: out of shared memory\n"
    assert "| retnet |" in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--mixers", "gdn,mamba"], "--mixers: unknown 'mamba'; known are gdn, kda"),
        (["--mixers", "full"], "--mixers: unknown 'full'"),
        (["--mixers", ""], "--mixers: unknown ''"),
        (["--tokens", "3"], "--tokens 3 is too short"),
        (["--config", "no_such.yaml"], "no_such.yaml"),
    ],
)
def test_what_the_command_line_gets_wrong(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert selftest.main(arguments) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and message in err and err.count("\n") == 1
    assert out == ""


def test_mixers_and_shapes_of_a_config(
    config_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = {}

    def spy(name: str, model: ModelConfig, **given: object) -> selftest.Comparison:
        seen[name] = model.hidden_size, model.num_heads, given["tokens"], given["packed"]
        return selftest.Comparison(name, 0.0, 0.0, "q", 1.0, 0.0)

    monkeypatch.setattr(selftest, "compare", spy)
    assert selftest.main(["--config", config_file, *SMALL, "--no-packing"]) == 0
    assert seen == {"gdn": (32, 4, 30, False), "retnet": (32, 4, 30, False)}
    seen.clear()
    assert selftest.main(["--config", config_file, "--mixers", "kda"]) == 0
    assert seen == {"kda": (32, 4, 500, True)}
    seen.clear()
    assert selftest.main([]) == 0
    assert list(seen) == [*RECURRENT, "window", "nsa", "dsa"]


def test_a_config_without_such_mixers_is_not_called_right(
    config_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(config_file).write_text("model: {pattern: full}")
    assert selftest.main(["--config", config_file]) == 2
    assert "model.pattern 'full' has no mixer with a kernel" in capsys.readouterr().err


def test_fp32_products_of_the_fast_kernels_may_be_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    run = selftest._run

    def plain(mixer, parts, weights, scan, dtype):  # type: ignore[no-untyped-def]
        return run(mixer, parts, weights, replace(scan, backend="torch"), dtype)

    assert _compare().tolerance == 2e-4
    monkeypatch.setattr(selftest, "_run", plain)
    assert _compare(backend="fla").tolerance == 1e-2
    assert _compare(backend="fla", dtype=torch.bfloat16).tolerance == 2e-2


def _trainer_on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """`check_kernels` compares the plain form with itself; returns what it will ask for."""
    compare, asked = selftest.compare, []

    def on_cpu(name: str, model: ModelConfig, **given: object) -> selftest.Comparison:
        asked.append({"name": name, **given})
        return compare(name, model, **{**given, "backend": "torch"})  # type: ignore[arg-type]

    monkeypatch.setattr(selftest, "compare", on_cpu)
    return asked


def _run_config() -> RunConfig:
    config = RunConfig(model=replace(TINY, pattern="gdn+full+retnet", num_layers=3))
    config.parallel.tensor = 2
    return config


def test_trainer_compares_its_own_mixers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _trainer_on_cpu(monkeypatch)
    config = _run_config()
    config.data.isolate_documents = False
    selftest.check_kernels(config, torch.float32, CPU)
    assert [call["name"] for call in asked] == ["gdn", "retnet"]
    for call in asked:
        assert (call["backend"], call["ranks"], call["packed"]) == ("fla", 2, False)


@pytest.mark.parametrize("fault, named", [("gradient", "decay"), ("nan", "output off by nan%")])
def test_trainer_refuses_a_wrong_kernel(
    fault: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _break_gdn(monkeypatch, fault)
    _trainer_on_cpu(monkeypatch)
    with pytest.raises(ConfigError) as caught:
        selftest.check_kernels(_run_config(), torch.float32, CPU)
    message = str(caught.value)
    assert "\n" not in message
    for part in ("kernels of gdn", named, "precision.kernels=torch", "precision.selftest=false"):
        assert part in message
