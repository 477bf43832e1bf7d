"""The peer: LT2's 1.3B shape in plain PyTorch with flash-linear-attention's layers, one GPU.

Pure bf16 (weights, gradients and Adam's moments), fused AdamW, fused linear cross entropy, SDPA for
full attention, no recomputation, no torch.compile. Prints one JSON line a run.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from fla.layers import GatedDeltaNet
from fla.modules import FusedLinearCrossEntropyLoss, GatedMLP, RMSNorm, RotaryEmbedding
from torch import Tensor, nn

KINDS = {
    "full": lambda i: "full",
    "gdn": lambda i: "gdn",
    "hybrid": lambda i: "full" if i % 5 == 4 else "gdn",
}


class FullAttention(nn.Module):
    """Causal attention with rotary positions and a sigmoid output gate."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.gate = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.rotary = RotaryEmbedding(width // heads, base=10000.0)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).unbind(2)
        q, k = self.rotary(q, k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, length, width)
        return self.out(mixed * torch.sigmoid(self.gate(x)))


class Block(nn.Module):
    """Pre-norm mixer and SwiGLU."""

    def __init__(self, args: argparse.Namespace, kind: str, index: int) -> None:
        super().__init__()
        width = args.width
        self.norm_1, self.norm_2 = RMSNorm(width), RMSNorm(width)
        self.kind = kind
        if kind == "full":
            self.mixer: nn.Module = FullAttention(width, args.heads)
        else:
            self.mixer = GatedDeltaNet(
                hidden_size=width,
                num_heads=args.heads,
                head_dim=int(0.75 * width) // args.heads,
                expand_v=2,
                layer_idx=index,
            )
        self.mlp = GatedMLP(hidden_size=width, intermediate_size=args.ffn, fuse_swiglu=True)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mixer(self.norm_1(x))
        x = x + (mixed if self.kind == "full" else mixed[0])
        return x + self.mlp(self.norm_2(x))


class Peer(nn.Module):
    """The looped stack and its loss."""

    def __init__(self, args: argparse.Namespace, kind: str) -> None:
        super().__init__()
        self.loops = args.loops
        self.embedding = nn.Embedding(args.vocab, args.width)
        self.blocks = nn.ModuleList(Block(args, KINDS[kind](i), i) for i in range(args.layers))
        self.rho = nn.Parameter(torch.zeros(args.loops, args.width))
        self.norm = RMSNorm(args.width)
        self.head = nn.Linear(args.width, args.vocab, bias=False)
        self.loss = FusedLinearCrossEntropyLoss()
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        h = self.embedding(tokens)
        for loop in range(self.loops):
            x = h
            for block in self.blocks:
                x = block(x)
            h = x + self.rho[loop] * h
        return self.loss(self.norm(h).flatten(0, 1), labels.flatten(), self.head.weight)


def run(args: argparse.Namespace, kind: str, rows: int, length: int) -> dict[str, object]:
    """Train `args.steps` steps on random tokens."""
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = Peer(args, kind).cuda().bfloat16()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    blocks = sum(p.numel() for p in model.blocks.parameters())
    full_layers = sum(KINDS[kind](i) == "full" for i in range(args.layers))
    attention = 6 * length * args.width * full_layers * args.loops
    flops = 6 * (blocks * args.loops + model.head.weight.numel()) + attention
    times = []
    for _ in range(args.steps):
        tokens = torch.randint(0, args.vocab, (rows, length), device="cuda")
        torch.cuda.synchronize()
        started = time.perf_counter()
        loss = model(tokens, tokens.roll(-1, 1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    median = sorted(times[2:])[len(times[2:]) // 2]
    speed = rows * length / median
    return {
        "who": "peer",
        "kind": kind,
        "rows": rows,
        "length": length,
        "tokens_per_s": round(speed),
        "step_s": round(median, 3),
        "mfu": round(speed * flops / (args.peak * 1e12), 3),
        "gflop_per_token": round(flops / 1e9, 2),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),
        "first_step_s": round(times[0], 1),
        "loss": round(loss.item(), 3),
    }


def use_table() -> None:
    """FLA's own candidates as its autotuner chose them on this kind of GPU; nothing of ours."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from megatron_lt2.tuning import autotuners
    from megatron_lt2.warmup import architecture, known_table

    autotuners.install(
        autotuners.Tuning(known_table(architecture()), search=True, only_new=True), own_tiles=False
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", default="hybrid:2:4096", help="KIND:SEQUENCES:LENGTH,...")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=21)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--ffn", type=int, default=5632)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--loops", type=int, default=4)
    parser.add_argument("--peak", type=float, default=790.0, help="TFLOP/s for MFU")
    parser.add_argument(
        "--tuned",
        action="store_true",
        help="take FLA's choices for this GPU from megatron_lt2/tuning instead of timing its "
        "candidates, which takes minutes on a new machine",
    )
    args = parser.parse_args(argv)
    if args.tuned:
        use_table()
    for item in args.runs.split(","):
        kind, rows, length = item.split(":")
        try:
            print(json.dumps(run(args, kind, int(rows), int(length))), flush=True)
        except torch.OutOfMemoryError as error:
            print(json.dumps({"who": "peer", "case": item, "failed": str(error)[:200]}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
