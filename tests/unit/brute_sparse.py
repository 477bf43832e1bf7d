"""Sparse attention spelled out query by query in plain Python: the second opinion of the tests.

One row [T, heads, channels] of one document; nothing here is shared with megatron_lt2/ops.
"""

import torch
from torch import Tensor


def attend(q: Tensor, keys: list[Tensor], values: list[Tensor], scale: float) -> Tensor:
    """One head's softmax attention to a list of keys; zeros without any."""
    if not keys:
        return torch.zeros_like(values[0]) if values else torch.zeros(0)
    weights = torch.stack([(q * k).sum() * scale for k in keys]).softmax(0)
    return sum(w * v for w, v in zip(weights, values, strict=True))


def importance(q: Tensor, t: int, k: Tensor, group: int, heads: list[int], block: int) -> list:
    """Mean softmax weight, over the heads of a group, of the blocks in the past of token t."""
    count = (t + 1) // block
    if not count:
        return []
    means = [k[b * block : (b + 1) * block, group].mean(0) for b in range(count)]
    scale = q.shape[-1] ** -0.5
    shares = [torch.stack([q[t, h] @ m * scale for m in means]).softmax(0) for h in heads]
    return torch.stack(shares).mean(0).tolist()


def nsa_row(
    q: Tensor, k: Tensor, v: Tensor, gates: tuple, *, block: int, count: int, window: int
) -> Tensor:
    """Native sparse attention of one document, [T, H, V]."""
    length, heads, channels = q.shape
    groups, scale = k.shape[1], channels**-0.5
    share, out = heads // groups, []
    for t in range(length):
        row = []
        for group in range(groups):
            own = list(range(group * share, (group + 1) * share))
            past = importance(q, t, k, group, own, block)
            last = t // block
            always = {0, last, max(last - 1, 0)}
            order = sorted(range(len(past)), key=lambda b: -past[b])
            order = sorted(always) + [b for b in order if b not in always]
            chosen = set(order[:count])
            tokens = [s for s in range(t + 1) if s // block in chosen]
            recent = range(max(0, t + 1 - window), t + 1)
            for h in own:
                means = [
                    [x[b * block : (b + 1) * block, group].mean(0) for b in range(len(past))]
                    for x in (k, v)
                ]
                cmp = (
                    attend(q[t, h], *means, scale) if past else torch.zeros(v.shape[-1]).to(v.dtype)
                )
                slc = attend(
                    q[t, h], [k[s, group] for s in tokens], [v[s, group] for s in tokens], scale
                )
                win = attend(
                    q[t, h], [k[s, group] for s in recent], [v[s, group] for s in recent], scale
                )
                g = [gate[t, h] for gate in gates]
                row.append(g[0] * cmp + g[1] * slc + g[2] * win)
        out.append(torch.stack(row))
    return torch.stack(out)


def index_score(q: Tensor, w: Tensor, k: Tensor) -> Tensor:
    """One query's score of one key: q [heads, channels], w [heads], k [channels]."""
    heads, channels = q.shape
    return sum(w[h] * torch.relu(q[h] @ k) for h in range(heads)) / (heads * channels) ** 0.5


def dsa_row(
    q: Tensor, k: Tensor, v: Tensor, index: tuple, *, count: int, dense: bool = False
) -> tuple[Tensor, Tensor]:
    """DeepSeek sparse attention of one document: [T, H, V] and the indexer's loss, summed."""
    length, heads, channels = q.shape
    groups, scale = k.shape[1], channels**-0.5
    qi, wi, ki = index
    out, loss = [], 0.0
    for t in range(length):
        scores = torch.stack([index_score(qi[t], wi[t], ki[s]) for s in range(t + 1)])
        order = sorted(range(t + 1), key=lambda s: (-scores[s].item(), -s))
        chosen = sorted(order[: t + 1 if dense else count])
        row, mass = [], 0.0
        for h in range(heads):
            group = h // (heads // groups)
            keys, values = [k[s, group] for s in chosen], [v[s, group] for s in chosen]
            weights = torch.stack([q[t, h] @ key * scale for key in keys]).softmax(0)
            mass = mass + weights.detach() / heads
            row.append(sum(w * x for w, x in zip(weights, values, strict=True)))
        out.append(torch.stack(row))
        log_share = scores[chosen].log_softmax(0)
        loss = loss + (mass * (mass.log() - log_share)).sum()
    return torch.stack(out), loss
