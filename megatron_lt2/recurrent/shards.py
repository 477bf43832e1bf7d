"""A recurrence over one rank's tokens when earlier tokens lie on other ranks.

Every recurrence here is linear in its state, so a rank need not wait for the state S that its
tokens find. It runs its kernel from an empty state and keeps what S would add:

    o_t = local_t + Q_t S        S_out = M S + B

Q_t is the query seen through all transitions since the rank's first token, M their product. Where
decays are numbers, Q_t = scale q_t exp(G_t) and M = exp(G_end) with G the running sum of log
decays. The delta rules mix key channels; there one pass of the kernel gives both as K more value
columns that write nothing and start from the identity: values [v | 0], state [0 | I].

With packed documents only the piece of a document at each edge takes part: S enters the first
piece if that document began on an earlier rank, B is the state after the last one if it goes on on
a later rank, and M is zero unless both are one piece. Pieces in the middle are this rank's own.
States of single documents are computed on slices of the row, because a kernel that starts from or
returns states does so for every document.

Shapes as in `base.py`; N is B, or 1 for a packed row.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.gdn import delta_rule, gated_delta_net
from ..kernels.gla import gla
from ..kernels.kda import kimi_delta_attention
from ..kernels.linear import normalized_linear_attention
from ..kernels.mlstm import extra_columns, mlstm
from ..kernels.simple_gla import simple_gla
from ..ops.chunks import default_scale
from ..ops.linear import NORMALIZER_EPS, normalize
from ..ops.mlstm import read_out, stabilised_inputs, stabilisers, with_ones
from .base import Recurrence, Scan, State, wide
from .state_maps import DenseMap, DiagonalMap, ScaledMap, StateMap


@dataclass(frozen=True)
class Span:
    """Which of a rank's tokens belong to documents that other ranks have a part of.

    continues: the first piece began on an earlier rank.
    continued: the last piece goes on on a later rank.
    first: tokens of the first piece.
    last: number of the last piece's first token; 0 if there is one piece.
    """

    continues: bool
    continued: bool
    first: int
    last: int = 0

    @property
    def one_piece(self) -> bool:
        """Whether all tokens belong to one document (of each row)."""
        return self.last == 0

    @property
    def through(self) -> bool:
        """Whether a state passes from before these tokens to after them."""
        return self.continues and self.continued and self.one_piece


@dataclass(frozen=True)
class ShardMap:
    """What a rank's tokens compute, up to the state that they find.

    local: output of the recurrence from an empty state [B, T, H, V or V + 1].
    query: Q_t of the first piece [B, first, H, K]; None if it begins here.
    state_map: M and B.
    read_out: makes the mixer's output [B, T, H, V] of the recurrence's.
    log_scales: mLSTM only: m of every token [B, T, H], and F of every token of the first piece,
        the running sum of log forget gates; local is e^m times smaller than it should be.
    """

    local: Tensor
    query: Tensor | None
    state_map: StateMap
    read_out: Callable[..., Tensor]
    log_scales: tuple[Tensor, Tensor] | None = None

    def output(self, state: State) -> Tensor:
        """Output of the recurrence [B, T, H, V].

        Args:
            state: that the tokens find, see `StateMap.apply`; unused if the first piece begins
                here.
        """
        extra = () if self.log_scales is None else (self.log_scales[0],)
        if self.query is None:
            return self.read_out(self.local, *extra)
        first, dtype = self.query.shape[1], self.local.dtype
        found = torch.einsum("bthk,bhkv->bthv", self.query.to(dtype), state[0].to(dtype))
        local = self.local[..., : found.shape[-1]]
        head, rest = local[:, :first], local[:, first:]
        if self.log_scales is not None:
            m, total = self.log_scales
            m_head = m[:, :first]
            arriving = state[1].detach().unsqueeze(1) + total
            m_new = torch.maximum(m_head, arriving.detach())
            head = head * (m_head - m_new).exp().unsqueeze(-1).to(dtype)
            found = found * (arriving - m_new).exp().unsqueeze(-1).to(dtype)
            extra = (torch.cat([m_new, m[:, first:]], 1),)
        whole = torch.cat([head + found, rest], 1) if rest.shape[1] else head + found
        return self.read_out(whole, *extra)


def shard_map(recurrence: Recurrence, scan: Scan, span: Span) -> ShardMap:
    """Run a recurrence over a rank's tokens.

    Args:
        recurrence: from `RecurrentMixer.prepare`; positions were those in the whole document.
        scan: its `cu_seqlens` are the borders of this rank's pieces; no state, no padding.
        span: what crosses the rank's edges.

    Raises:
        ValueError: no state map is known for the kernel.
    """
    assert scan.state is None and scan.real is None
    kind = _KINDS.get(recurrence.kernel)
    if kind is None:
        raise ValueError(
            f"the kernel {recurrence.kernel.__name__} has no state map in recurrent/shards.py; "
            "add one, or set parallel.context_exchange heads or parallel.context 1"
        )
    return kind(recurrence, scan, span)


def _same(x: Tensor) -> Tensor:
    return x


def _without_state(recurrence: Recurrence, scan: Scan, span: Span) -> tuple[Tensor, Tensor | None]:
    """Output from an empty state, and the state after the last piece if it goes on."""
    if span.one_piece:
        out, state = recurrence.run(replace(scan, cu_seqlens=None, keep_state=span.continued))
    else:
        out, state = recurrence.run(scan)
        if span.continued:
            tail = _cut(recurrence, slice(span.last, None))
            _, state = tail.run(replace(scan, cu_seqlens=None, keep_state=True))
    return out, None if state is None else state[0]


def _cut(recurrence: Recurrence, tokens: slice) -> Recurrence:
    """The recurrence over some of its tokens."""
    tensors = tuple(None if x is None else x[:, tokens] for x in recurrence.tensors)
    return replace(recurrence, tensors=tensors)


def _running_sum(x: Tensor) -> Tensor:
    """Sums over the tokens up to each, with T innermost meanwhile: far faster on a GPU."""
    return x.movedim(1, -1).contiguous().cumsum(-1).movedim(-1, 1)


def _diagonal(recurrence: Recurrence, scan: Scan, span: Span) -> ShardMap:
    """Decays a head or a channel, or none."""
    q, k, v, g = recurrence.tensors
    assert q is not None and k is not None and v is not None
    local, state = _without_state(recurrence, scan, span)
    if state is None:
        state = _empty(k, v)
    query, decay = None, state.new_zeros(())
    if span.continues:
        query = wide(q[:, : span.first]) * default_scale(
            recurrence.options.get("scale"), q.shape[-1]
        )
        constant = recurrence.options.get("decay_H")
        if g is not None:
            total = _running_sum(wide(g[:, : span.first]))
        elif constant is not None:
            tokens = torch.arange(1, span.first + 1, device=q.device)
            total = (tokens[:, None] * constant).expand(q.shape[0], -1, -1)
        else:
            total = state.new_zeros(q.shape[0], span.first, q.shape[2])
        kept = total.exp()
        kept = kept if kept.dim() == 4 else kept.unsqueeze(-1)
        query = query * kept
        if span.through:
            decay = kept[:, -1].unsqueeze(-1)
    channels = k.shape[-1] if g is not None and g.dim() == 4 else 1
    decay = decay.to(state.dtype).expand(*state.shape[:2], channels, 1)
    return ShardMap(local, query, DiagonalMap(decay, state), _same)


def _normalized(recurrence: Recurrence, scan: Scan, span: Span) -> ShardMap:
    """Linear attention divided by its weights: one more value column (`ops/linear.py`)."""
    q, k, v = recurrence.tensors
    assert v is not None
    values = _with_ones(v, scan.backend)
    inner = Recurrence(simple_gla, (q, k, values, None), {"scale": 1.0} | recurrence.options)
    found = _diagonal(inner, scan, span)

    def read(o: Tensor) -> Tensor:
        return normalize(o, v.shape[-1], NORMALIZER_EPS).to(v.dtype)

    assert isinstance(found.state_map, DiagonalMap)
    state = found.state_map.state[..., : v.shape[-1] + 1]
    return replace(found, state_map=replace(found.state_map, state=state), read_out=read)


def _scaled(recurrence: Recurrence, scan: Scan, span: Span) -> ShardMap:
    """mLSTM: a scalar decay and one more value column, in a scale of its own (`ops/mlstm.py`)."""
    q, k, v, i, f = recurrence.tensors
    assert q is not None and k is not None and v is not None and i is not None and f is not None
    before, m, _ = stabilisers(i, f, None, None if span.one_piece else scan.cu_seqlens)
    key, g = stabilised_inputs(k if scan.backend == "fla" else wide(k), i, f, before, m)
    values = _with_ones(v, scan.backend)
    inner = Recurrence(simple_gla, (q.to(key.dtype), key, values, g), recurrence.options)
    local, state = _without_state(inner, scan, span)
    width = v.shape[-1] + 1
    if state is None:
        state, m_end = _empty(key, values), torch.zeros_like(m[:, -1])
    else:
        m_end = m[:, -1]
    query, log_decay = None, torch.full_like(m_end, -math.inf)
    total = m[:, :0]
    if span.continues:
        scale = default_scale(recurrence.options.get("scale"), q.shape[-1])
        query = q[:, : span.first] * scale
        total = _running_sum(wide(f[:, : span.first]))
        if span.through:
            log_decay = total[:, -1]

    def read(o: Tensor, m: Tensor) -> Tensor:
        return read_out(o, m, v.shape[-1]).to(v.dtype)

    state_map = ScaledMap(log_decay, state[..., :width], m_end)
    return ShardMap(local, query, state_map, read, (m, total))


def _delta(recurrence: Recurrence, scan: Scan, span: Span) -> ShardMap:
    """Delta rules: Q_t and M come out of the kernel."""
    _, k, v, *_ = recurrence.tensors
    assert k is not None and v is not None
    key_dim, value_dim = k.shape[-1], v.shape[-1]
    if not (span.continues and span.one_piece):
        local, state = _without_state(recurrence, scan, span)
        query = None
        if span.continues:
            head = _cut(recurrence, slice(span.first))
            nothing = v.new_zeros(*v.shape[:1], span.first, v.shape[2], key_dim)
            query, _ = _with_identity(head, nothing, scan, keep_state=False)
        state = _empty(k, v) if state is None else state
        matrix = state.new_zeros(*state.shape[:2], key_dim, key_dim)
        return ShardMap(local, query, DenseMap(matrix, state), _same)
    values = F.pad(v, (0, key_dim))
    out, final = _with_identity(recurrence, values, scan, keep_state=span.continued)
    local, query = out.split([value_dim, key_dim], -1)
    if final is None:
        state = _empty(k, v)
        matrix = state.new_zeros(*state.shape[:2], key_dim, key_dim)
    else:
        state, matrix = final.split([value_dim, key_dim], -1)
    return ShardMap(local, query, DenseMap(matrix, state), _same)


def _with_identity(
    recurrence: Recurrence, values: Tensor, scan: Scan, keep_state: bool
) -> tuple[Tensor, Tensor | None]:
    """Run one document from a state whose last K columns are the identity, the others zero."""
    q, k, _, *gates = recurrence.tensors
    assert k is not None
    empty = _empty(k, values)
    identity = empty.diagonal_scatter(
        empty.new_ones(()).expand(*empty.shape[:2], k.shape[-1]),
        offset=values.shape[-1] - k.shape[-1],
        dim1=2,
        dim2=3,
    )
    filled = replace(recurrence, tensors=(q, k, values, *gates))
    out, final = filled.run(
        replace(scan, cu_seqlens=None, state=(identity,), keep_state=keep_state)
    )
    return out, None if final is None else final[0]


def _empty(k: Tensor, v: Tensor) -> Tensor:
    """A state of zeros [B, H, K, V]."""
    batch, _, heads, key_dim = k.shape
    return wide(v[:0]).new_zeros(batch, heads, key_dim, v.shape[-1])


def _with_ones(v: Tensor, backend: str) -> Tensor:
    """[v | 1 ..]: what `kernels/mlstm.py` and `ops/mlstm.py` give their kernels."""
    return with_ones(v, extra_columns(v.shape[-1])) if backend == "fla" else with_ones(wide(v))


_Kind = Callable[[Recurrence, Scan, Span], ShardMap]
_KINDS: dict[Callable[..., Any], _Kind] = {
    simple_gla: _diagonal,
    gla: _diagonal,
    normalized_linear_attention: _normalized,
    mlstm: _scaled,
    gated_delta_net: _delta,
    delta_rule: _delta,
    kimi_delta_attention: _delta,
}
