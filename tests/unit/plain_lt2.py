"""LT2's forward pass spelled out token by token in fp64, sharing no code with the model.

One row of tokens in, logits out. Every head, tap and state entry follows the paper's equations;
complex numbers do the rotation, so that even the rotary layout is a second opinion.
"""

import torch
from brute_sparse import dsa_row, nsa_row
from plain_mixers import MIXERS, Layer
from torch import Tensor

from megatron_lt2.hf.configuration_lt2 import LT2Config


def plain_logits(weights: dict[str, Tensor], config: LT2Config, ids: list[int]) -> Tensor:
    """Logits [T, vocabulary] of the tokens `ids`, from a state dict."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    stream = [w["model.embed_tokens.weight"][i] for i in ids]
    for loop in range(config.loops):
        before = list(stream)
        for i, mixer in enumerate(config.mixers):
            layer = {
                k.removeprefix(f"model.layers.{i}."): v
                for k, v in w.items()
                if k.startswith(f"model.layers.{i}.")
            }
            eps = config.rms_norm_eps
            normed = [_rms(x, layer["input_layernorm.weight"], eps) for x in stream]
            if mixer in ("full", "window"):
                window = len(ids) if mixer == "full" else config.window_size
                if config.loop_windows is not None:
                    window = config.loop_windows[loop][i] or len(ids)
                mixed = _attention(layer, config, normed, window)
            elif mixer in ("nsa", "dsa"):
                mixed = _sparse(mixer, layer, config, normed)
            elif mixer == "gdn":
                mixed = _gdn(layer, config, normed)
            else:
                depth = (i + 1) / config.num_hidden_layers
                settings = config.mixer_settings[mixer]
                mixed = MIXERS[mixer](Layer(layer, settings, normed, depth))
            stream = [x + y for x, y in zip(stream, mixed, strict=True)]
            for t, x in enumerate(stream):
                y = _rms(x, layer["post_attention_layernorm.weight"], eps)
                gate, up = layer["mlp.gate_proj.weight"] @ y, layer["mlp.up_proj.weight"] @ y
                stream[t] = x + layer["mlp.down_proj.weight"] @ (_silu(gate) * up)
        if config.loop_residual == "per_channel":
            rho = w["model.loop_residual"][loop]
            stream = [x + rho * x0 for x, x0 in zip(stream, before, strict=True)]
    head = w["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    final = [_rms(x, w["model.norm.weight"], config.rms_norm_eps) for x in stream]
    return torch.stack([head @ x for x in final])


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean() + eps).sqrt() * weight


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def _rotate(x: Tensor, position: int, config: LT2Config) -> Tensor:
    half = len(x) // 2
    exponents = torch.arange(half, dtype=torch.float64) / half
    turn = torch.polar(torch.ones(half).double(), position * config.rope_theta**-exponents)
    if config.rope_interleaved:
        turned = torch.complex(x[0::2], x[1::2]) * turn
        return torch.stack([turned.real, turned.imag], 1).flatten()
    turned = torch.complex(x[:half], x[half:]) * turn
    return torch.cat([turned.real, turned.imag])


def _attention(
    layer: dict[str, Tensor], config: LT2Config, xs: list[Tensor], window: int
) -> list[Tensor]:
    heads, dim = config.num_attention_heads, config.head_dim
    share = heads // config.num_key_value_heads
    queries, keys, values = [], [], []
    for t, x in enumerate(xs):
        q, k, v = ((layer[f"mixer.{n}_proj.weight"] @ x).view(-1, dim) for n in "qkv")
        queries.append([_rotate(head, t, config) for head in q])
        keys.append([_rotate(head, t, config) for head in k])
        values.append(v)
    outputs = []
    for t, x in enumerate(xs):
        mixed = []
        for head in range(heads):
            group = head // share
            seen = range(max(0, t + 1 - window), t + 1)
            scores = [queries[t][head] @ keys[s][group] / dim**0.5 for s in seen]
            weights = torch.stack(scores).softmax(0)
            mixed.append(sum(w * values[s][group] for w, s in zip(weights, seen, strict=True)))
        out = torch.cat(mixed)
        if config.attention_output_gate:
            out = out * _sigmoid(layer["mixer.g_proj.weight"] @ x)
        outputs.append(layer["mixer.o_proj.weight"] @ out)
    return outputs


def _sparse(
    mixer: str, layer: dict[str, Tensor], config: LT2Config, xs: list[Tensor]
) -> list[Tensor]:
    s = config.mixer_settings[mixer]

    def projected(name: str) -> list[Tensor]:
        return [layer[f"mixer.{name}_proj.weight"] @ x for x in xs]

    def turned(rows: list[Tensor], heads: int, first: int, last: int) -> Tensor:
        """[T, heads, channels], of which [first, last) are rotated."""
        out = torch.stack([row.view(heads, -1) for row in rows]).clone()
        for t in range(len(xs)):
            for h in range(heads):
                out[t, h, first:last] = _rotate(out[t, h, first:last].clone(), t, config)
        return out

    heads = s["num_heads"]
    if mixer == "nsa":
        groups, dim = s["num_kv_heads"], s["head_dim"]
        q = turned(projected("q"), heads, 0, dim)
        k = turned(projected("k"), groups, 0, dim)
        v = torch.stack(projected("v")).view(len(xs), groups, dim)
        gates = tuple(_sigmoid(torch.stack(projected(f"gate_{n}"))) for n in ("cmp", "slc", "win"))
        sizes = {"block": s["block_size"], "count": s["selected_blocks"], "window": s["window"]}
        out = nsa_row(q, k, v, gates, **sizes)
    else:
        latent, key = s["latent_dim"], s["latent_dim"] + s["rope_dim"]
        q = turned(projected("q"), heads, latent, key)
        k = turned(projected("kv"), 1, latent, key)
        size = s["index_rope_dim"]
        qi = turned(projected("indexer.q"), s["index_heads"], 0, size)
        ki = turned(projected("indexer.k"), 1, 0, size)[:, 0]
        index = (qi, torch.stack(projected("indexer.w")), ki)
        out, _ = dsa_row(q, k, k[..., :latent], index, count=s["top_k"])
    return [layer["mixer.o_proj.weight"] @ o.flatten() for o in out]


def _gdn(layer: dict[str, Tensor], config: LT2Config, xs: list[Tensor]) -> list[Tensor]:
    gdn = config.mixer_settings["gdn"]
    heads, taps = gdn["num_heads"], gdn["conv_size"]
    projected = {
        n: [layer[f"mixer.{n}_proj.weight"] @ x for x in xs]
        for n in ("q", "k", "v", "gate", "beta", "decay")
    }
    convolved: dict[str, list[Tensor]] = {}
    for n in "qkv":
        taps_of_channel = layer[f"mixer.{n}_conv1d.weight"][:, 0]
        convolved[n] = []
        for t in range(len(xs)):
            y = torch.zeros_like(projected[n][t])
            for back in range(min(taps, t + 1)):
                y = y + taps_of_channel[:, taps - 1 - back] * projected[n][t - back]
            convolved[n].append(_silu(y))
    rate = torch.exp(layer["mixer.A_log"])
    states = [torch.zeros(gdn["head_k_dim"], gdn["head_v_dim"]).double()] * heads
    outputs = []
    for t in range(len(xs)):
        q, k, v = (convolved[n][t].view(heads, -1) for n in "qkv")
        gate = projected["gate"][t].view(heads, -1)
        beta = _sigmoid(projected["beta"][t]) * (2 if gdn["allow_neg_eigval"] else 1)
        step = torch.log1p(torch.exp(projected["decay"][t] + layer["mixer.dt_bias"]))
        mixed = []
        for h in range(heads):
            q_h = q[h] / (q[h] @ q[h] + 1e-6).sqrt()
            k_h = k[h] / (k[h] @ k[h] + 1e-6).sqrt()
            kept = torch.exp(-rate[h] * step[h]) * states[h]
            erased = kept - beta[h] * torch.outer(k_h, k_h) @ kept
            states = list(states)
            states[h] = erased + beta[h] * torch.outer(k_h, v[h])
            o = q_h @ states[h] / gdn["head_k_dim"] ** 0.5
            o = _rms(o, layer["mixer.o_norm.weight"], gdn["norm_eps"])
            mixed.append(o * _silu(gate[h]))
        outputs.append(layer["mixer.o_proj.weight"] @ torch.cat(mixed))
    return outputs
