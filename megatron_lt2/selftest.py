"""Do the kernels of this machine compute what the plain recurrences say?

    python -m megatron_lt2.selftest                      # every mixer but full, 1.3B shape
    python -m megatron_lt2.selftest --config FILE        # with the settings of a run
    python -m megatron_lt2.selftest --mixers gdn,kda --tokens 1000

Kernels are compiled for each GPU, Triton version and shape, and some combinations have been seen to
compute wrong gradients in silence. So each mixer's gates and recurrence, or its sparse attention
(selftest_attention.py), run once with the fast kernels in the training dtype and once in plain
torch in fp32, on the same random numbers, and outputs and all gradients are compared. On a machine
without a GPU the plain form in fp32 is compared with itself in fp64. A mixer whose kernels do not
take the model's geometry or the dtype is skipped with a line that says why.

The trainer runs a short form at start and refuses to train on a mismatch (precision.selftest).
Exit codes: 0 all agree, 1 a mixer does not, 2 the command line or the installation is at fault.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.schema import ModelConfig, RunConfig
from megatron_lt2.kernels.backend import resolve_backend
from megatron_lt2.mixers.registry import MIXER_NAMES, RECURRENT, recurrent_mixer
from megatron_lt2.model.pattern import expand_pattern
from megatron_lt2.parallel import platform
from megatron_lt2.recurrent.base import RecurrentMixer, Scan
from megatron_lt2.selftest_attention import TESTED as ATTENTION_TESTED
from megatron_lt2.selftest_attention import attention_runs, cannot_run

TESTED = (*RECURRENT, *ATTENTION_TESTED)
"""Mixers that are compared."""

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 1e-2, torch.float32: 2e-4}
"""Largest relative error (norm of the difference over norm) that rounding explains."""

TF32_TOLERANCE = TOLERANCE[torch.float16]
"""The same for fp32 in FLA's kernels, whose products may be of TF32, which is as fine as fp16."""


@dataclass(frozen=True)
class Comparison:
    """One mixer's result.

    output: relative error of the output.
    gradient, worst: largest relative error of a gradient, and whose it is.
    seconds: time taken, compilation included.
    """

    mixer: str
    output: float
    gradient: float
    worst: str
    tolerance: float
    seconds: float

    @property
    def agrees(self) -> bool:
        """Whether rounding explains the differences; a NaN does not agree."""
        return self.output <= self.tolerance and self.gradient <= self.tolerance


def compare(
    name: str,
    model: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    backend: str,
    tokens: int,
    packed: bool,
    ranks: int = 1,
    seed: int = 1,
) -> Comparison:
    """Run the mixer `name` fast and plain, forward and backward.

    Args:
        name: one of `TESTED`.
        model: its geometry.
        device, dtype, backend: of the fast run ("fla", or "torch" with fp32 for the plain one).
        tokens: length of the row.
        packed: cut the row into documents, one of them a single token.
        ranks: tensor-parallel ranks; the heads of one of them are run.
        seed: of the random numbers.
    """
    start = time.perf_counter()
    cuts = [0, tokens // 3, tokens // 3 + 1, tokens] if packed else None
    given: dict[str, Any] = {"device": device, "dtype": dtype, "backend": backend, "tokens": tokens}
    runs = _recurrent_runs if name in RECURRENT else attention_runs
    fast, plain = runs(name, model, **given, cuts=cuts, ranks=ranks, seed=seed)
    # A gradient that the kernel does not give is as wrong as can be.
    errors = {key: _error(fast[key], plain[key]) if key in fast else float("inf") for key in plain}
    output = errors.pop("output")
    # A NaN must win, which max() does not see to.
    worst = max(errors, key=lambda key: errors[key] if errors[key] == errors[key] else float("inf"))
    tolerance = TOLERANCE[dtype]
    if backend == "fla" and dtype == torch.float32:
        tolerance = TF32_TOLERANCE
    seconds = time.perf_counter() - start
    return Comparison(name, output, errors[worst], worst, tolerance, seconds)


def _recurrent_runs(
    name: str,
    model: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    backend: str,
    tokens: int,
    cuts: list[int] | None,
    ranks: int,
    seed: int,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Output and all gradients of a linear mixer, fast and plain; arguments as `compare`."""
    mixer = recurrent_mixer(name)(model.mixer_settings(name))
    heads = mixer.layout.heads // ranks
    parts, weights = _inputs(mixer, heads, tokens, dtype, seed)
    parts = {key: value.to(device) for key, value in parts.items()}
    weights = {key: value.to(device) for key, value in weights.items()}
    borders = torch.tensor(cuts, dtype=torch.int32, device=device) if cuts else None

    plain_dtype = torch.float32 if dtype != torch.float32 else torch.float64
    fast = _run(mixer, parts, weights, Scan(backend, slice(0, heads), borders), dtype)
    plain = _run(mixer, parts, weights, Scan("torch", slice(0, heads), borders), plain_dtype)
    return fast, plain


def _inputs(
    mixer: RecurrentMixer, heads: int, tokens: int, dtype: torch.dtype, seed: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Random sections, rounded to `dtype`, and the mixer's own parameters as initialised."""
    generator = torch.Generator().manual_seed(seed)
    parts = {}
    for name, section in mixer.layout.sections.items():
        each = (section.channels,) if section.shared else (heads, section.channels)
        x = torch.randn(1, tokens, *each, generator=generator)
        parts[name] = (F.silu(x) if section.conv else x).to(dtype)
    weights = {
        name: weight.init((heads * weight.channels,), generator)
        for name, weight in mixer.layout.weights.items()
    }
    return parts, weights


def _run(
    mixer: RecurrentMixer,
    parts: dict[str, Tensor],
    weights: dict[str, Tensor],
    scan: Scan,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Output and the gradient of every part and weight that gets one."""
    own = torch.promote_types(dtype, torch.float32)
    parts = {key: value.to(dtype, copy=True).requires_grad_() for key, value in parts.items()}
    weights = {key: value.to(own, copy=True).requires_grad_() for key, value in weights.items()}
    out, _ = mixer.mix(parts, weights, scan)
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(out.shape, generator=generator).to(out.device)
    inputs = {**parts, **weights}
    # A section such as the output gate is not part of the recurrence.
    gradients = torch.autograd.grad(
        (out.to(own) * direction.to(own)).sum(), list(inputs.values()), allow_unused=True
    )
    named = zip(inputs, gradients, strict=True)
    return {"output": out.detach(), **{key: grad for key, grad in named if grad is not None}}


def _error(fast: Tensor, plain: Tensor) -> float:
    plain = plain.double()
    return float((fast.double() - plain).norm() / plain.norm().clamp_min(1e-30))


def refusal(results: Iterable[Comparison]) -> str | None:
    """One sentence about the first mixer that does not agree, or None."""
    for result in results:
        if not result.agrees:
            return (
                f"the kernels of {result.mixer} do not compute what the plain recurrence says: "
                f"output off by {result.output:.1%}, gradient of {result.worst} by "
                f"{result.gradient:.1%} ({result.tolerance:.1%} allowed); use other versions of "
                "Triton and fla-core, set precision.kernels=torch, or train all the same with "
                "precision.selftest=false"
            )
    return None


def check_kernels(config: RunConfig, dtype: torch.dtype, device: torch.device) -> None:
    """The short form for the trainer: the run's mixers, the heads of one rank, 200 tokens.

    Raises:
        ConfigError: a kernel disagrees with the plain recurrence.
    """
    model = config.model
    used = expand_pattern(model.pattern, model.num_layers, MIXER_NAMES)
    for name in TESTED:
        if name in used:
            result = compare(
                name,
                model,
                device=device,
                dtype=dtype,
                backend="fla",
                tokens=200,
                packed=config.data.isolate_documents,
                ranks=config.parallel.tensor,
            )
            if message := refusal([result]):
                raise ConfigError(message)


def _table(results: Sequence[Comparison]) -> str:
    lines = ["| mixer | output | worst gradient | of | allowed | | seconds |", "|" + "---|" * 7]
    lines += [
        f"| {r.mixer} | {r.output:.1e} | {r.gradient:.1e} | {r.worst} | {r.tolerance:.0e} | "
        f"{'ok' if r.agrees else 'FAILED'} | {r.seconds:.1f} |"
        for r in results
    ]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_lt2.selftest",
        description="Compare each mixer's kernels with its plain form on this machine: outputs "
        "and all gradients.",
        epilog="example: python -m megatron_lt2.selftest --mixers gdn,kda --tokens 1000",
    )
    parser.add_argument("--config", help="take the model's settings from this run config")
    parser.add_argument(
        "--mixers", help="comma-separated names; default: all but full, or the config's"
    )
    parser.add_argument("--tokens", type=int, default=500, help="length of the row (default 500)")
    parser.add_argument(
        "--dtype",
        choices=("auto", "bf16", "fp16", "fp32"),
        default="auto",
        help="of the fast run; auto: bf16 on a GPU, fp32 without one",
    )
    parser.add_argument("--no-packing", dest="packed", action="store_false", help="one document")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    args = _parser().parse_args(arguments)
    device = platform.device()
    on_gpu = device.type == "cuda"
    dtypes: dict[str, Any] = {
        "auto": torch.bfloat16 if on_gpu else torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
    }
    try:
        model, names = _what_to_test(args)
        backend = resolve_backend("auto", device.type)
        if args.tokens < 4:
            raise ValueError(f"--tokens {args.tokens} is too short; give at least 4")
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    where = torch.cuda.get_device_name() if on_gpu else "CPU"
    print(f"{where}, kernels {backend}, {dtypes[args.dtype]}, {args.tokens} tokens", flush=True)
    results, complaints = [], []
    for name in names:
        reason = None
        if name in ATTENTION_TESTED:
            reason = cannot_run(name, model, dtypes[args.dtype], backend, 1)
        if reason is not None:
            print(f"{name} skipped: {reason}", flush=True)
            continue
        try:
            result = compare(
                name,
                model,
                device=device,
                dtype=dtypes[args.dtype],
                backend=backend,
                tokens=args.tokens,
                packed=args.packed,
            )
        except Exception as error:  # compilers fail in many ways; the other mixers still count
            complaints.append(f"{name} cannot run: {type(error).__name__}: {error}")
            continue
        results.append(result)
        print(_table([result]).splitlines()[-1], flush=True)
        if message := refusal([result]):
            complaints.append(message)
    print()
    print(_table(results))
    for message in complaints:
        print(f"error: {message}", file=sys.stderr)
    return 1 if complaints else 0


def _what_to_test(args: argparse.Namespace) -> tuple[ModelConfig, list[str]]:
    """The model whose shapes are tested, and the mixers.

    Raises:
        ValueError: an unknown mixer, or a config that cannot be read or has none of them.
    """
    from megatron_lt2.config.load import load_config

    model, names = ModelConfig(), list(TESTED)
    if args.config:
        model = load_config(["--config", args.config]).model
        used = expand_pattern(model.pattern, model.num_layers, MIXER_NAMES)
        names = [name for name in TESTED if name in used]
    if args.mixers is not None:
        names = args.mixers.split(",")
        for name in names:
            if name not in TESTED:
                raise ValueError(f"--mixers: unknown {name!r}; known are {', '.join(TESTED)}")
    if not names:
        raise ValueError(
            f"model.pattern {model.pattern!r} has no mixer with a kernel that is compared; "
            "name some with --mixers"
        )
    return model, names


if __name__ == "__main__":
    sys.exit(main())
