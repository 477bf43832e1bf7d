"""Times each linear mixer's layer, forward and backward, beside FLA's own layer of the same shape.

The layers run alone on one GPU in bf16 with random input [length, rows, width]; gradients of the
input and of all weights are computed. Ours is the layer that the trainer uses. FLA's layers come
with the package `flash-linear-attention`; for Mamba2 the package `mamba_ssm` is timed too if it can
be imported (its Triton path). Ours and the peer alternate, the median of the rounds counts.

    python benchmarks/mixers.py --lengths 4096,32768
    python benchmarks/mixers.py --mixers gdn,kda --profile     # kernels of our layer by time

Prints one JSON line a measurement and a table at the end.
"""

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

from megatron_lt2.parallel import platform

platform.install()

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from megatron_lt2.config.schema import ModelConfig, ParallelConfig, RunConfig  # noqa: E402
from megatron_lt2.mixers.registry import RECURRENT, recurrent_mixer  # noqa: E402
from megatron_lt2.model.core_config import transformer_config  # noqa: E402
from megatron_lt2.parallel.start import start_ranks  # noqa: E402

Step = Callable[[], None]


def our_layer(name: str, model: ModelConfig) -> nn.Module:
    """The training layer of mixer `name` with random weights, on the GPU in bf16."""
    from megatron_lt2.mixers.linear import LinearMixer

    core = transformer_config(RunConfig(model=model), on_gpu=True)
    layer = LinearMixer(
        core,
        layer_number=1,
        recurrent=recurrent_mixer(name),
        settings=model.mixer_settings(name),
        kernels="fla",
    ).cuda()
    generator = torch.Generator(device="cuda").manual_seed(1)
    for parameter in layer.parameters():
        init = getattr(parameter, "lt2_init", None)
        with torch.no_grad():
            if init is not None:
                parameter.copy_(init(tuple(parameter.shape), generator))
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    return layer


def peer_layer(name: str, model: ModelConfig) -> nn.Module | None:
    """FLA's layer with the same geometry, or None where FLA has none."""
    from fla import layers

    s = model.mixer_settings(name)
    d, h = model.hidden_size, s.num_heads
    k, v = s.head_k_dim, s.head_v_dim
    make: dict[str, Callable[[], Any]] = {
        "gdn": lambda: layers.GatedDeltaNet(
            hidden_size=d, num_heads=h, head_dim=k, expand_v=v / k, layer_idx=0
        ),
        "kda": lambda: layers.KimiDeltaAttention(
            hidden_size=d, num_heads=h, head_dim=k, expand_v=v / k, layer_idx=0
        ),
        "deltanet": lambda: layers.DeltaNet(
            hidden_size=d, num_heads=h, expand_k=h * k / d, expand_v=h * v / d, layer_idx=0
        ),
        "retnet": lambda: layers.MultiScaleRetention(
            hidden_size=d, num_heads=h, expand_k=h * k / d, expand_v=h * v / d, layer_idx=0
        ),
        "gla": lambda: layers.GatedLinearAttention(
            hidden_size=d, num_heads=h, expand_k=h * k / d, expand_v=h * v / d, layer_idx=0
        ),
        "linear": lambda: layers.LinearAttention(
            hidden_size=d, num_heads=h, feature_map="elu", layer_idx=0
        ),
        "hgrn2": lambda: layers.HGRN2Attention(hidden_size=d, num_heads=h, expand_ratio=k),
    }
    if name not in make:
        return None
    return make[name]().cuda().bfloat16()


def mamba_ssm_layer(model: ModelConfig) -> nn.Module | None:
    """mamba_ssm's Mamba2 of the same geometry, or None without that package."""
    try:
        from mamba_ssm.modules.mamba2 import Mamba2
    except Exception as error:  # absent, or its extensions do not load
        print(f"mamba_ssm: {type(error).__name__}: {error}", file=sys.stderr)
        return None
    s = model.mixer_settings("mamba2")
    inner = s.num_heads * s.head_v_dim
    layer = Mamba2(
        d_model=model.hidden_size,
        d_state=s.head_k_dim,
        d_conv=s.conv_size,
        expand=inner // model.hidden_size,
        headdim=s.head_v_dim,
        ngroups=s.groups,
        use_mem_eff_path=importlib.util.find_spec("causal_conv1d") is not None,
    )
    return layer.cuda().bfloat16()


def step_of(layer: nn.Module, x: Tensor, ours: bool) -> Step:
    """One forward and backward pass; x is [length, rows, d] for ours, [rows, length, d] else."""
    direction = torch.randn_like(x)

    def step() -> None:
        out = layer(x)
        out = out[0] if isinstance(out, tuple) else out
        out.backward(direction)
        for parameter in layer.parameters():
            parameter.grad = None
        x.grad = None

    return step


def timed(step: Step, repeats: int) -> float:
    """Milliseconds of one step, measured over `repeats` in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def measure(name: str, length: int, args: argparse.Namespace) -> dict[str, Any]:
    """Times of one mixer at one length, in milliseconds."""
    model = ModelConfig(hidden_size=args.width, num_heads=args.heads)
    x = torch.randn(length, 1, args.width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ours = our_layer(name, model)
    steps = {"ours": step_of(ours, x, ours=True)}
    peers = {"fla": peer_layer(name, model)}
    if name == "mamba2":
        peers["mamba_ssm"] = mamba_ssm_layer(model)
    x_peer = x.detach().transpose(0, 1).contiguous().requires_grad_()
    steps |= {
        who: step_of(layer, x_peer, ours=False) for who, layer in peers.items() if layer is not None
    }
    for who, step in steps.items():
        for _ in range(3):  # compiles and tunes
            step()
        torch.cuda.synchronize()
        print(f"warm: {name} {length} {who}", file=sys.stderr, flush=True)
    times: dict[str, list[float]] = {who: [] for who in steps}
    for _ in range(args.rounds):
        for who, step in steps.items():
            times[who].append(timed(step, args.repeats))
    result: dict[str, Any] = {"mixer": name, "length": length}
    result |= {f"{who}_ms": round(statistics.median(t), 3) for who, t in times.items()}
    torch.cuda.reset_peak_memory_stats()
    steps["ours"]()
    result["ours_peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    if args.profile:
        profile(name, steps["ours"])
        for who in peers:
            if who in steps:
                profile(f"{name} ({who})", steps[who])
    return result


def profile(title: str, step: Step) -> None:
    """Print the kernels of a step that take longest."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(5):
            step()
        torch.cuda.synchronize()
    events = sorted(trace.key_averages(), key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in events) / 5000
    print(f"--- {title}: {total:.3f} ms of kernels a step")
    for event in events[:14]:
        milliseconds = event.self_device_time_total / 5000
        print(f"{milliseconds:8.3f} ms {event.count // 5:4d} x {event.key[:90]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mixers", default=",".join(RECURRENT))
    parser.add_argument("--lengths", default="4096,32768")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args(arguments)
    start_ranks(ParallelConfig(), seed=1)
    results = []
    for name in args.mixers.split(","):
        for length in map(int, args.lengths.split(",")):
            results.append(measure(name, length, args))
            print(json.dumps(results[-1]), flush=True)
            torch.cuda.empty_cache()
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, one row")
    print("| mixer | tokens | ours ms | peer ms | ratio |\n|---|---|---|---|---|")
    for r in results:
        peers = {k[:-3]: v for k, v in r.items() if k.endswith("_ms") and k != "ours_ms"}
        for who, peer in peers.items() or {"none": float("nan")}.items():
            print(
                f"| {r['mixer']} | {r['length']} | {r['ours_ms']:.2f} | {peer:.2f} ({who}) | "
                f"{r['ours_ms'] / peer:.2f} |"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
