"""The self-test's runs of `window`, `nsa` and `dsa`: the kernel of this machine and the plain form.

Rounding must not decide which keys are read, or the comparison would be of different sums. So `nsa`
gets as many tokens as its blocks cover, and `dsa` random scores, which hardly ever tie; it reads a
quarter of the tokens. `dsa` runs in both of its stages, its indexer's loss included.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_lt2.config.schema import ModelConfig
from megatron_lt2.kernels import dsa as dsa_kernels
from megatron_lt2.kernels import nsa as nsa_kernels
from megatron_lt2.kernels.window import window_attention
from megatron_lt2.ops.reach import Reach, reach_of_documents
from megatron_lt2.ops.sparse_layout import key_channels

TESTED = ("window", "nsa", "dsa")
"""Mixers with a comparison here."""

Run = Callable[[dict[str, Tensor], str, Tensor | None], dict[str, Tensor]]
"""(tensors, backend, document borders) -> outputs and losses by name."""


def cannot_run(
    name: str, model: ModelConfig, dtype: torch.dtype, backend: str, ranks: int
) -> str | None:
    """Why the kernels of mixer `name` do not serve this geometry or dtype, or None."""
    if backend != "fla" or name == "window":
        return None
    s = model.mixer_settings(name)
    heads = s.num_heads // ranks
    if name == "nsa":
        kv_heads = max(1, s.num_kv_heads // ranks)
        return nsa_kernels.kernel_problem(heads, kv_heads, s.block_size, s.selected_blocks)
    if dtype not in dsa_kernels.DTYPES:
        return f"{dtype}, which its kernels do not take"
    if s.kv != "shared":
        heads, key = 1, 1
    else:
        key = key_channels("dsa", s)
    return dsa_kernels.kernel_problem(heads, key, s.index_dim)


def attention_runs(
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
    """Outputs and all gradients, of the kernel and of the plain form in fp32 (fp64 for fp32).

    Args:
        name: one of `TESTED`.
        model: its geometry.
        device, dtype, backend: of the fast run.
        tokens: length of the row.
        cuts: document borders; None: one document.
        ranks: tensor-parallel ranks; the heads of one of them are run.
        seed: of the random numbers.
    """
    shapes, run, tokens = _CASES[name](model, ranks, tokens)
    generator = torch.Generator().manual_seed(seed)
    inputs = {
        key: torch.randn(1, tokens, *shape, generator=generator).to(dtype).to(device)
        for key, shape in shapes.items()
    }
    borders = None
    if cuts:
        borders = torch.tensor(sorted({min(c, tokens) for c in cuts}), device=device).int()
    plain_dtype = torch.float64 if dtype == torch.float32 else torch.float32
    return (
        _with_gradients(run, inputs, dtype, backend, borders),
        _with_gradients(run, inputs, plain_dtype, "torch", borders),
    )


def _with_gradients(
    run: Run, inputs: dict[str, Tensor], dtype: torch.dtype, backend: str, borders: Tensor | None
) -> dict[str, Tensor]:
    own = torch.promote_types(dtype, torch.float32)
    leaves = {key: x.to(dtype, copy=True).requires_grad_() for key, x in inputs.items()}
    outputs = run(leaves, backend, borders)
    generator = torch.Generator().manual_seed(0)
    found: dict[str, list[Tensor]] = {key: [] for key in ("output", *leaves)}
    for out in outputs.values():
        # The loss is compared by its gradients: as a number it is small beside the outputs.
        direction = torch.ones_like(out)
        if out.ndim:
            direction = torch.randn(out.shape, generator=generator).to(out.device).to(own)
            found["output"].append(out.detach().flatten())
        gradients = torch.autograd.grad(
            (out.to(own) * direction).sum(), list(leaves.values()), allow_unused=True
        )
        for name, gradient in zip(leaves, gradients, strict=True):
            if gradient is not None:
                found[name].append(gradient.double().flatten())
    return {key: torch.cat(x) for key, x in found.items() if x}


def _window(model: ModelConfig, ranks: int, tokens: int) -> tuple[dict[str, Any], Run, int]:
    heads, kv_heads = model.num_heads // ranks, max(1, model.kv_heads // ranks)
    channels = model.attention_head_dim
    shapes = {"q": (heads, channels), "k": (kv_heads, channels), "v": (kv_heads, channels)}
    size = min(model.window.size, max(2, tokens // 4))

    def run(x: dict[str, Tensor], backend: str, borders: Tensor | None) -> dict[str, Tensor]:
        q, k, v = x["q"], x["k"], x["v"]
        if backend == "torch":
            from megatron_lt2.ops.window import window_attention as plain

            return {"out": plain(q, k, v, size, cu_seqlens=borders)}
        return {"out": window_attention(q, k, v, size, backend=backend, cu_seqlens=borders)}

    return shapes, run, tokens


def _nsa(model: ModelConfig, ranks: int, tokens: int) -> tuple[dict[str, Any], Run, int]:
    s = model.mixer_settings("nsa")
    heads, kv_heads = s.num_heads // ranks, max(1, s.num_kv_heads // ranks)
    gates = ("gate_cmp", "gate_slc", "gate_win")
    shapes: dict[str, Any] = {"q": (heads, s.head_dim)}
    shapes |= dict.fromkeys(("k", "v"), (kv_heads, s.head_dim)) | dict.fromkeys(gates, (heads,))

    def run(x: dict[str, Tensor], backend: str, borders: Tensor | None) -> dict[str, Tensor]:
        q = x["q"]
        out = nsa_kernels.nsa(
            q,
            x["k"],
            x["v"],
            (x["gate_cmp"].sigmoid(), x["gate_slc"].sigmoid(), x["gate_win"].sigmoid()),
            _reach(q, borders),
            block=s.block_size,
            count=s.selected_blocks,
            window=min(s.window, max(2, tokens // 4)),
            backend=backend,
            cu_seqlens=borders,
        )
        return {"out": out}

    return shapes, run, min(tokens, s.block_size * s.selected_blocks)


def _dsa(model: ModelConfig, ranks: int, tokens: int) -> tuple[dict[str, Any], Run, int]:
    s = model.mixer_settings("dsa")
    shared, channels = s.kv == "shared", key_channels("dsa", s)
    kv_heads = 1 if shared else max(1, s.num_kv_heads // ranks)
    values = s.latent_dim if shared else channels
    shapes: dict[str, Any] = {"q": (s.num_heads // ranks, channels), "k": (kv_heads, channels)}
    shapes |= {} if shared else {"v": (kv_heads, channels)}
    shapes |= {"index_q": (s.index_heads, s.index_dim), "index_w": (s.index_heads,)}
    shapes |= {"index_k": (s.index_dim,)}
    count = min(s.top_k, max(2, tokens // 4))

    def run(x: dict[str, Tensor], backend: str, borders: Tensor | None) -> dict[str, Tensor]:
        q, k = x["q"], x["k"]
        v = k[..., :values] if shared else x["v"]
        index = (x["index_q"], x["index_w"], x["index_k"])
        reach = _reach(q, borders)
        qi, wi, ki = (part.detach() for part in index)
        chosen = dsa_kernels.select_keys(qi, wi, ki, reach, count, backend=backend)
        found = {}
        for stage, seen in (("sparse", chosen), ("dense", None)):
            given = dsa_kernels.Attention(q, k, v, reach, seen, channels**-0.5, shared)
            out, lse = dsa_kernels.sparse_attention(given, backend=backend)
            found[stage] = out
            found[f"{stage} loss"] = dsa_kernels.indexer_loss(index, given, lse)
        return found

    return shapes, run, tokens


def _reach(q: Tensor, borders: Tensor | None) -> Reach:
    return reach_of_documents(q.shape[1], borders, 0, q.device)


_CASES: dict[str, Callable[[ModelConfig, int, int], tuple[dict[str, Any], Run, int]]] = {
    "window": _window,
    "nsa": _nsa,
    "dsa": _dsa,
}
