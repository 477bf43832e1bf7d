"""Mamba2, the state-space dual form (Dao and Gu 2024, arXiv 2405.21060).

    S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_t^T,   y_t = S_t^T C_t + D x_t

with dt = softplus(. + dt_bias) and A = -exp(A_log) < 0, a number a head each. In the terms of the
other mixers C is the query, dt B the key, x the value, dt A the log decay. B and C belong to a
group of heads (one group: to all), x, B and C pass through a short convolution with a bias and
SiLU. The output is gated by SiLU first and then RMS-normed, over all heads together by default.

dt scales the key, not the value: the key is smaller, and has to be written out a head anyway.
"""

import torch
from torch import Tensor

from ..kernels.mamba2 import decays_and_keys, of_heads
from ..kernels.simple_gla import simple_gla
from .base import Layout, Recurrence, RecurrentMixer, Scan, Section, Weight
from .initial import constant, inverse_softplus_of_steps, log_uniform


class Mamba2(RecurrentMixer):
    """A scalar decay a head tied to the step size, keys and queries shared by heads."""

    def describe(self) -> Layout:
        s = self.settings
        shared = s.groups * s.head_k_dim
        return Layout(
            heads=s.num_heads,
            head_k_dim=s.head_k_dim,
            head_v_dim=s.head_v_dim,
            sections={
                "x": Section(s.head_v_dim, conv=True),
                "B": Section(shared, shared=True, conv=True),
                "C": Section(shared, shared=True, conv=True),
                "gate": Section(s.head_v_dim),
                "dt": Section(1),
            },
            weights={
                "A_log": Weight(1, log_uniform(s.a_init_min, s.a_init_max)),
                "dt_bias": Weight(1, inverse_softplus_of_steps(s.dt_min, s.dt_max)),
                "D": Weight(1, constant(1.0)),
            },
            conv_size=s.conv_size,
            conv_bias=True,
            gate="gate",
            gate_first=True,
            norm=s.norm,
            norm_eps=s.norm_eps,
        )

    def prepare(
        self, parts: dict[str, Tensor], weights: dict[str, Tensor], scan: Scan
    ) -> Recurrence:
        x = parts["x"]
        B, groups = self._of_groups(parts["B"], scan.heads)
        C, _ = self._of_groups(parts["C"], scan.heads)
        log_decay, key = decays_and_keys(
            parts["dt"].squeeze(-1),
            B,
            weights["A_log"],
            weights["dt_bias"],
            groups,
            backend=scan.backend,
        )
        query = of_heads(C, groups, x.shape[2])
        return Recurrence(
            simple_gla, (query, scan.blank(key), x, scan.blank(log_decay)), {"scale": 1.0}
        )

    def finish(self, out: Tensor, parts: dict[str, Tensor], weights: dict[str, Tensor]) -> Tensor:
        x = parts["x"]
        return torch.addcmul(out, weights["D"].unsqueeze(-1).to(x.dtype), x)

    def _of_groups(self, shared: Tensor, heads: slice) -> tuple[Tensor, int]:
        """[B, T, groups * N] -> the channels that these heads use, and in how many equal groups."""
        groups = self.settings.groups
        if groups == 1:
            return shared, 1
        each = shared.unflatten(-1, (groups, -1))
        per_group = self.layout.heads // groups
        first, last = heads.start // per_group, (heads.stop - 1) // per_group
        if first == last or (heads.start % per_group == 0 and heads.stop % per_group == 0):
            return each[:, :, first : last + 1].flatten(2), last + 1 - first
        own = each.repeat_interleave(per_group, dim=2)[:, :, heads]  # a group is cut by the ranks
        return own.flatten(2), heads.stop - heads.start

    def problem(self) -> str | None:
        s = self.settings
        for name in ("dt", "a_init"):
            low, high = getattr(s, f"{name}_min"), getattr(s, f"{name}_max")
            if low > high:
                return f"{name}_min {low} is above {name}_max {high}; swap them"
        if s.num_heads % s.groups:
            return f"groups {s.groups} does not divide {s.num_heads} heads; choose a divisor"
        return None


MIXER = Mamba2
