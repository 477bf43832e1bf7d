"""The linear mixers of `plain_lt2`, token by token, head by head, sharing no code with the model.

A mixer gets a layer's weights, its settings, the tokens of one row and its depth (layer / layers).
Settings that only change what another one shows are taken at the value that the tests use.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    return torch.log1p(torch.exp(x))


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean() + eps).sqrt() * weight


@dataclass
class Layer:
    """Weights of a layer, settings of its mixer, and the row."""

    weights: dict[str, Tensor]
    s: dict[str, Any]
    xs: list[Tensor]
    depth: float

    def own(self, name: str) -> Tensor:
        return self.weights[f"mixer.{name}"]

    def projected(self, name: str) -> list[Tensor]:
        """[heads, channels] a token."""
        heads = self.s["num_heads"]
        if f"mixer.{name}_proj.weight" in self.weights:
            return [(self.own(f"{name}_proj.weight") @ x).view(heads, -1) for x in self.xs]
        up, down = self.own(f"{name}_up.weight"), self.own(f"{name}_down.weight")
        bias = self.weights.get(f"mixer.{name}_up.bias", torch.zeros(len(up)).double())
        return [(up @ (down @ x) + bias).view(heads, -1) for x in self.xs]

    def convolved(self, name: str) -> list[Tensor]:
        """[channels] a token, after the convolution and SiLU."""
        rows = [self.own(f"{name}_proj.weight") @ x for x in self.xs]
        taps = self.own(f"{name}_conv1d.weight")[:, 0]
        bias = self.weights.get(f"mixer.{name}_conv1d.bias", torch.zeros(len(taps)).double())
        count, out = taps.shape[1], []
        for t in range(len(rows)):
            y = bias.clone()
            for back in range(min(count, t + 1)):
                y = y + taps[:, count - 1 - back] * rows[t - back]
            out.append(silu(y))
        return out

    def heads_of(self, name: str) -> list[Tensor]:
        """`convolved` as [heads, channels]."""
        return [x.view(self.s["num_heads"], -1) for x in self.convolved(name)]

    def finish(self, outputs: list[Tensor], activation: Callable | None) -> list[Tensor]:
        """Norm a head, gate, and output projection of [heads, V] a token."""
        eps, weight = self.s["norm_eps"], self.own("o_norm.weight")
        gates = self.projected("gate") if activation else [None] * len(outputs)
        finished = []
        for o, gate in zip(outputs, gates, strict=True):
            y = torch.stack([rms(head, weight, eps) for head in o])
            if activation is not None:
                y = y * activation(gate)
            finished.append(self.own("o_proj.weight") @ y.flatten())
        return finished


def recurrence(
    q: list[Tensor],
    k: list[Tensor],
    v: list[Tensor],
    decay: Callable[[int, int], Tensor],
    beta: Callable[[int, int], Tensor] | None = None,
    scale: float | None = None,
) -> list[Tensor]:
    """S = decay S + k v^T, or the delta rule with write strength `beta`; o = scale * S^T q.

    decay(t, h) is one number, or one a key channel.
    """
    heads, keys = q[0].shape
    states = [torch.zeros(keys, v[0].shape[1]).double() for _ in range(heads)]
    scale = keys**-0.5 if scale is None else scale
    outputs = []
    for t in range(len(q)):
        row = []
        for h in range(heads):
            q_h, k_h = q[t][h], k[t][h]
            if beta is not None:
                q_h = q_h / (q_h @ q_h + 1e-6).sqrt()
                k_h = k_h / (k_h @ k_h + 1e-6).sqrt()
            d = decay(t, h)
            kept = (d[:, None] if d.dim() else d) * states[h]
            write = v[t][h]
            if beta is not None:
                write = beta(t, h) * (write - k_h @ kept)
            states[h] = kept + torch.outer(k_h, write)
            row.append(scale * (q_h @ states[h]))
        outputs.append(torch.stack(row))
    return outputs


def kda(layer: Layer) -> list[Tensor]:
    a, b = layer.projected("decay"), layer.projected("beta")
    rate, bias = torch.exp(layer.own("A_log")), layer.own("dt_bias").view(layer.s["num_heads"], -1)
    out = recurrence(
        *(layer.heads_of(name) for name in "qkv"),
        decay=lambda t, h: torch.exp(-rate[h] * softplus(a[t][h] + bias[h])),
        beta=lambda t, h: sigmoid(b[t][h, 0]) * (2 if layer.s["allow_neg_eigval"] else 1),
    )
    return layer.finish(out, sigmoid)


def deltanet(layer: Layer) -> list[Tensor]:
    b = layer.projected("beta")
    out = recurrence(
        *(layer.heads_of(name) for name in "qkv"),
        decay=lambda t, h: torch.tensor(1.0),
        beta=lambda t, h: sigmoid(b[t][h, 0]) * (2 if layer.s["allow_neg_eigval"] else 1),
    )
    return layer.finish(out, silu if layer.s["output_gate"] else None)


def mamba2(layer: Layer) -> list[Tensor]:
    s = layer.s
    heads, groups = s["num_heads"], s["groups"]
    group = [h // (heads // groups) for h in range(heads)]
    x = layer.heads_of("x")
    b, c = ([y.view(groups, -1)[group] for y in layer.convolved(name)] for name in "BC")
    step = [softplus(y[:, 0] + layer.own("dt_bias")) for y in layer.projected("dt")]
    rate = torch.exp(layer.own("A_log"))
    out = recurrence(
        c,
        b,
        [step[t][:, None] * x[t] for t in range(len(x))],
        decay=lambda t, h: torch.exp(-rate[h] * step[t][h]),
        scale=1.0,
    )
    finished = []
    for o, x_t, gate in zip(out, x, layer.projected("gate"), strict=True):
        y = ((o + layer.own("D")[:, None] * x_t) * silu(gate)).flatten()
        y = rms(y, layer.own("o_norm.weight"), s["norm_eps"])
        finished.append(layer.own("o_proj.weight") @ y)
    return finished


def retnet(layer: Layer) -> list[Tensor]:
    half = layer.s["head_k_dim"] // 2
    frequencies = layer.s["rope_theta"] ** -(torch.arange(half).double() / half)

    def rotated(rows: list[Tensor]) -> list[Tensor]:
        out = []
        for t, x in enumerate(rows):
            turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(
                torch.ones(half).double(), t * frequencies
            )
            out.append(torch.cat([turned.real, turned.imag], -1))
        return out

    out = recurrence(
        rotated(layer.projected("q")),
        rotated(layer.projected("k")),
        layer.projected("v"),
        decay=lambda t, h: torch.tensor(1 - 2.0 ** (-5 - h)).double(),
    )
    return layer.finish(out, silu)


def gla(layer: Layer) -> list[Tensor]:
    a, bias = layer.projected("decay"), layer.own("decay_bias").view(layer.s["num_heads"], -1)
    out = recurrence(
        *(layer.projected(name) for name in "qkv"),
        decay=lambda t, h: sigmoid(a[t][h] + bias[h]) ** (1 / layer.s["gate_normalizer"]),
    )
    return layer.finish(out, silu)


def linear(layer: Layer) -> list[Tensor]:
    """With weights written out, so that dividing by their sum is a second opinion."""
    assert layer.s["feature_map"] == "elu1"

    def phi(x: Tensor) -> Tensor:
        return torch.where(x > 0, x + 1, torch.exp(x))

    q, k = ([phi(x) for x in layer.projected(name)] for name in "qk")
    v, outputs = layer.projected("v"), []
    for t in range(len(q)):
        row = []
        for h in range(layer.s["num_heads"]):
            weights = torch.stack([q[t][h] @ k[s][h] for s in range(t + 1)])
            if layer.s["normalize"]:
                weights = weights / (weights.sum() + 1e-6)
            else:
                weights = weights / layer.s["head_k_dim"] ** 0.5
            row.append(weights @ torch.stack([v[s][h] for s in range(t + 1)]))
        outputs.append(torch.stack(row))
    return layer.finish(outputs, None)


def mlstm(layer: Layer) -> list[Tensor]:
    """The quadratic form: weights exp(sum of log forget gates + log input gate) of past tokens."""

    def capped(x: Tensor) -> Tensor:
        cap = layer.s["gate_cap"]
        return x if cap is None else cap * torch.tanh(x / cap)

    q, k, v = (layer.projected(name) for name in "qkv")
    gates = {}
    for name in ("input", "forget"):
        bias = layer.own(f"{name}_bias")
        gates[name] = torch.stack([capped(x[:, 0] + bias) for x in layer.projected(name)])
    forget = torch.log(sigmoid(gates["forget"]))
    outputs = []
    for t in range(len(q)):
        row = []
        for h in range(layer.s["num_heads"]):
            weights = []
            for s in range(t + 1):
                score = q[t][h] @ k[s][h] / layer.s["head_k_dim"] ** 0.5
                weights.append(
                    score * torch.exp(forget[s + 1 : t + 1, h].sum() + gates["input"][s, h])
                )
            weight = torch.stack(weights)
            values = torch.stack([v[s][h] for s in range(t + 1)])
            row.append(weight @ values / weight.sum().abs().clamp_min(1))
        outputs.append(torch.stack(row))
    return layer.finish(outputs, sigmoid)


def hgrn2(layer: Layer) -> list[Tensor]:
    bound = layer.s["lower_bound"] * layer.depth
    forget = [bound + (1 - bound) * sigmoid(x) for x in layer.projected("forget")]
    out = recurrence(
        [silu(x) for x in layer.projected("q")],
        [1 - x for x in forget],
        layer.projected("v"),
        decay=lambda t, h: forget[t][h],
    )
    weight, eps = layer.own("o_norm.weight"), layer.s["norm_eps"]
    return [layer.own("o_proj.weight") @ rms(o.flatten(), weight, eps) for o in out]


MIXERS: dict[str, Callable[[Layer], list[Tensor]]] = {
    "kda": kda,
    "deltanet": deltanet,
    "mamba2": mamba2,
    "retnet": retnet,
    "gla": gla,
    "linear": linear,
    "mlstm": mlstm,
    "hgrn2": hgrn2,
}
