"""All linear recurrences in one table, each with its definition as a loop over tokens.

The loops are written for reading: explicit matrices, one token after another, no stabilisation.
States are compared as they are defined, so the mLSTM's are multiplied by e^m.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lt2.ops.gdn import chunk_gated_delta_rule, gated_delta_rule_step
from megatron_lt2.ops.gla import chunk_gla, gla_step
from megatron_lt2.ops.kda import chunk_kda, kda_step
from megatron_lt2.ops.linear import (
    chunk_normalized_linear_attention,
    normalized_linear_attention_step,
)
from megatron_lt2.ops.mlstm import chunk_mlstm, mlstm_step
from megatron_lt2.ops.simple_gla import chunk_simple_gla, simple_gla_step

HEADS, KEY, VALUE = 2, 5, 3
RETENTION = torch.tensor([-0.03, -0.9], dtype=torch.float64)
MLSTM_M = 0.7
"""What m starts from: any number is right, as long as the state was divided by e^m."""

Inputs = dict[str, Tensor]
Result = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Mixer:
    """One recurrence.

    `gates` names its gates and says whether they are one number a head ("h") or a channel ("c").
    `loop`, `chunk` and `step` take q, k, v, the gates and the state, and return output and state.
    """

    name: str
    gates: dict[str, str]
    loop: Callable[..., Result]
    chunk: Callable[..., Result]
    step: Callable[..., Result]
    extra_column: bool = False

    def names(self) -> list[str]:
        return ["q", "k", "v", *self.gates]

    def __str__(self) -> str:
        return self.name


def make(
    mixer: Mixer,
    batch: int,
    length: int,
    documents: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Inputs:
    """Random inputs that ask for gradients, `initial_state` last."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    x = {name: normal(batch, length, HEADS, KEY) for name in "qk"}
    x["v"] = normal(batch, length, HEADS, VALUE)
    for name, kind in mixer.gates.items():
        gate = normal(batch, length, HEADS, *([KEY] if kind == "c" else []))
        if name == "beta":
            gate = gate.sigmoid()
        elif name != "i":
            gate = -gate.square()
        x[name] = gate
    columns = VALUE + mixer.extra_column
    state = normal(documents or batch, HEADS, KEY, columns)
    # A normaliser without negative entries, or the loop would divide by almost nothing.
    x["initial_state"] = state.abs() if mixer.name == "normalized" else state
    return {name: y.to(dtype).detach().requires_grad_() for name, y in x.items()}


def run_loop(mixer: Mixer, x: Inputs, **options) -> Result:
    return mixer.loop(*(x[name] for name in mixer.names()), x["initial_state"], **options)


def run_chunk(mixer: Mixer, x: Inputs, **options) -> Result:
    return mixer.chunk(
        *(x[name] for name in mixer.names()), initial_state=x["initial_state"], **options
    )


def run_steps(mixer: Mixer, x: Inputs) -> Result:
    """One step after another."""
    state, outputs = x["initial_state"], []
    for t in range(x["q"].shape[1]):
        o, state = mixer.step(*(x[name][:, t] for name in mixer.names()), state)
        outputs.append(o)
    return torch.stack(outputs, 1), state


def documents_by_loop(mixer: Mixer, x: Inputs, bounds: list[int]) -> Result:
    """Every document of a packed row on its own."""
    outputs, states = [], []
    for n, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        own = {name: x[name][:, start:end] for name in mixer.names()}
        o, state = run_loop(mixer, {**own, "initial_state": x["initial_state"][n : n + 1]})
        outputs.append(o)
        states.append(state)
    return torch.cat(outputs, 1), torch.cat(states)


def gradients(result: Result, x: Inputs) -> tuple[Tensor, ...]:
    """Gradients of a random linear function of the output and of the final state."""
    random = torch.Generator().manual_seed(99)
    weights = [torch.randn(y.shape, generator=random, dtype=torch.float64) for y in result]
    loss = sum((y * w.to(y.dtype)).sum() for y, w in zip(result, weights, strict=True))
    return torch.autograd.grad(loss, list(x.values()), retain_graph=True)


def assert_same(
    result: Result, expected: Result, x: Inputs, rtol: float = 1e-9, atol: float = 1e-9
) -> None:
    """Output, final state and the gradients of all inputs agree."""
    for y, z in zip(result, expected, strict=True):
        torch.testing.assert_close(y, z, rtol=rtol, atol=atol)
    for name, y, z in zip(x, gradients(result, x), gradients(expected, x), strict=True):
        torch.testing.assert_close(y, z, rtol=rtol, atol=atol, msg=lambda m, n=name: f"d{n}: {m}")


def _unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def _matrices(
    q: Tensor, k: Tensor, v: Tensor, transition: Tensor, state: Tensor, beta: Tensor | None = None
) -> Result:
    """S <- transition S + beta k v^T, o = S^T q / sqrt(K)."""
    outputs = []
    for t in range(q.shape[1]):
        write = k[:, t, :, :, None] @ v[:, t, :, None, :]
        if beta is not None:
            write = beta[:, t, :, None, None] * write
        state = transition[:, t] @ state + write
        outputs.append((state.transpose(-1, -2) @ q[:, t, :, :, None]).squeeze(-1) * KEY**-0.5)
    return torch.stack(outputs, 1) if outputs else v.new_zeros(v.shape), state


def _diagonal(g: Tensor) -> Tensor:
    """Diag(exp g) for a log decay a head or a channel."""
    channels = g if g.ndim == 4 else g[..., None].expand(*g.shape, KEY)
    return torch.diag_embed(channels.exp())


def _erase(k: Tensor, beta: Tensor) -> Tensor:
    """I - beta k k^T."""
    return torch.eye(KEY, dtype=k.dtype) - beta[..., None, None] * k[..., None] @ k[..., None, :]


def _linear_loop(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> Result:
    return _matrices(q, k, v, _diagonal(torch.zeros_like(k)), state)


def _retention_loop(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> Result:
    return _matrices(q, k, v, _diagonal(RETENTION.expand(q.shape[:-1])), state)


def _decay_loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> Result:
    return _matrices(q, k, v, _diagonal(g), state)


def _delta_loop(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor) -> Result:
    q, k = _unit(q), _unit(k)
    return _matrices(q, k, v, _erase(k, beta), state, beta)


def _gated_delta_loop(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> Result:
    q, k = _unit(q), _unit(k)
    return _matrices(q, k, v, _erase(k, beta) @ _diagonal(g), state, beta)


def _mlstm_loop(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, state: Tensor) -> Result:
    matrix, normalizer = state[..., :VALUE], state[..., VALUE]
    outputs = []
    for t in range(q.shape[1]):
        forget, write = f[:, t].exp(), i[:, t].exp()
        matrix = forget[..., None, None] * matrix + write[..., None, None] * (
            k[:, t, :, :, None] @ v[:, t, :, None, :]
        )
        normalizer = forget[..., None] * normalizer + write[..., None] * k[:, t]
        query = q[:, t] * KEY**-0.5
        top = (matrix.transpose(-1, -2) @ query[..., None]).squeeze(-1)
        bottom = (normalizer * query).sum(-1, keepdim=True).abs()
        outputs.append(top / torch.maximum(bottom, torch.ones_like(bottom)))
    o = torch.stack(outputs, 1) if outputs else v.new_zeros(v.shape)
    return o, torch.cat([matrix, normalizer[..., None]], -1)


def _elu1(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, x.clamp_max(0).exp())


def _normalized_loop(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> Result:
    q, k = _elu1(q), _elu1(k)
    outputs = []
    for t in range(q.shape[1]):
        values = torch.cat([v[:, t], torch.ones_like(v[:, t, :, :1])], -1)
        state = state + k[:, t, :, :, None] @ values[..., None, :]
        both = (state.transpose(-1, -2) @ q[:, t, :, :, None]).squeeze(-1)
        outputs.append(both[..., :VALUE] / (both[..., VALUE:] + 1e-6))
    return torch.stack(outputs, 1) if outputs else v.new_zeros(v.shape), state


def _without_gate(function: Callable[..., Result], **options) -> Callable[..., Result]:
    """Pass None as the gate after q, k and v."""

    def call(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **more) -> Result:
        return function(q, k, v, None, *rest, **options, **more)

    return call


def _mlstm_chunk(*tensors: Tensor, initial_state: Tensor, **options) -> Result:
    m = torch.full_like(initial_state[..., 0, 0], MLSTM_M)
    state = initial_state * torch.exp(-m)[..., None, None], m
    h, (matrix, m) = chunk_mlstm(*tensors, initial_state=state, **options)
    return h, matrix * m.exp()[..., None, None]


def _mlstm_step(*tensors: Tensor) -> Result:
    *token, initial_state = tensors
    m = torch.full_like(initial_state[..., 0, 0], MLSTM_M)
    state = initial_state * torch.exp(-m)[..., None, None], m
    h, (matrix, m) = mlstm_step(*token, state)
    return h, matrix * m.exp()[..., None, None]


def _normalized_chunk(q: Tensor, k: Tensor, v: Tensor, **options) -> Result:
    return chunk_normalized_linear_attention(_elu1(q), _elu1(k), v, **options)


def _normalized_step(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> Result:
    return normalized_linear_attention_step(_elu1(q), _elu1(k), v, state)


MIXERS = [
    Mixer(
        "linear", {}, _linear_loop, _without_gate(chunk_simple_gla), _without_gate(simple_gla_step)
    ),
    Mixer(
        "retention",
        {},
        _retention_loop,
        _without_gate(chunk_simple_gla, decay_H=RETENTION),
        _without_gate(simple_gla_step, decay_H=RETENTION),
    ),
    Mixer("simple_gla", {"g": "h"}, _decay_loop, chunk_simple_gla, simple_gla_step),
    Mixer("gla", {"g": "c"}, _decay_loop, chunk_gla, gla_step),
    Mixer(
        "delta",
        {"beta": "h"},
        _delta_loop,
        _without_gate(chunk_gated_delta_rule),
        _without_gate(gated_delta_rule_step),
    ),
    Mixer(
        "gdn",
        {"g": "h", "beta": "h"},
        _gated_delta_loop,
        chunk_gated_delta_rule,
        gated_delta_rule_step,
    ),
    Mixer("kda", {"g": "c", "beta": "h"}, _gated_delta_loop, chunk_kda, kda_step),
    Mixer("mlstm", {"i": "h", "f": "h"}, _mlstm_loop, _mlstm_chunk, _mlstm_step, True),
    Mixer("normalized", {}, _normalized_loop, _normalized_chunk, _normalized_step, True),
]
BY_NAME = {mixer.name: mixer for mixer in MIXERS}
