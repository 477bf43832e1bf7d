"""Mamba2, the state-space dual form (Dao and Gu 2024, arXiv 2405.21060).

    S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_t^T,   y_t = S_t^T C_t + D x_t

with dt = softplus(. + dt_bias) and A = -exp(A_log) < 0, a number a head each. In the terms of the
other mixers C is the query, dt B the key, x the value, dt A the log decay. B and C belong to a
group of heads (one group: to all), x, B and C pass through a short convolution with a bias and
SiLU. The output is gated by SiLU first and then RMS-normed, over all heads together by default.

dt scales the key, not the value: the key is smaller, and has to be written out a head anyway.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.simple_gla import simple_gla
from .base import Layout, Recurrence, RecurrentMixer, Scan, Section, Weight, wide
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
        B, C = (self._of_heads(parts[name], scan.heads) for name in ("B", "C"))
        dt = F.softplus(wide(parts["dt"]).squeeze(-1) + weights["dt_bias"])
        log_decay = -weights["A_log"].exp() * dt
        key = scan.blank((dt.unsqueeze(-1) * B).to(x.dtype))
        return Recurrence(
            simple_gla, (C.to(x.dtype), key, x, scan.blank(log_decay)), {"scale": 1.0}
        )

    def finish(self, out: Tensor, parts: dict[str, Tensor], weights: dict[str, Tensor]) -> Tensor:
        x = parts["x"]
        return torch.addcmul(out, weights["D"].unsqueeze(-1).to(x.dtype), x)

    def _of_heads(self, shared: Tensor, heads: slice) -> Tensor:
        """[B, T, groups * N] -> [B, T, H, N], the group of each of these heads."""
        groups = self.settings.groups
        each = shared.unflatten(-1, (groups, -1))
        if groups == 1:
            return each.expand(-1, -1, heads.stop - heads.start, -1)
        per_group = self.layout.heads // groups
        return each.repeat_interleave(per_group, dim=2)[:, :, heads]

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
