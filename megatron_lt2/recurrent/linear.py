"""Plain linear attention (Katharopoulos et al. 2020, arXiv 2006.16236).

    S_t = S_{t-1} + phi(k_t) v_t^T,   o_t = S_t^T phi(q_t) / sqrt(K)

phi = elu + 1 by default. The paper divides by sum_s phi(q) phi(k_s); an RMS norm a head on the
undivided output trains more stably (Qin et al. 2022, arXiv 2210.10340) and is the default here.
"""

from torch import Tensor

from ..kernels.linear import feature_map, normalized_linear_attention
from ..kernels.simple_gla import simple_gla
from .base import Layout, Recurrence, RecurrentMixer, Scan, Section

POSITIVE = ("elu1", "relu", "softmax")
"""Feature maps without negative values."""


class LinearAttention(RecurrentMixer):
    """No decay at all."""

    def describe(self) -> Layout:
        s = self.settings
        k, v = s.head_k_dim, s.head_v_dim
        return Layout(
            heads=s.num_heads,
            head_k_dim=k,
            head_v_dim=v,
            sections={"q": Section(k), "k": Section(k), "v": Section(v)},
            norm_eps=s.norm_eps,
        )

    def prepare(
        self, parts: dict[str, Tensor], weights: dict[str, Tensor], scan: Scan
    ) -> Recurrence:
        s = self.settings
        q, k = (
            feature_map(parts[name], s.feature_map, backend=scan.backend) for name in ("q", "k")
        )
        k = scan.blank(k)
        if s.normalize:
            return Recurrence(normalized_linear_attention, (q, k, parts["v"]))
        return Recurrence(simple_gla, (q, k, parts["v"], None))

    def state_numbers(self) -> int:
        extra = self.layout.heads * self.layout.head_k_dim if self.settings.normalize else 0
        return super().state_numbers() + extra

    def problem(self) -> str | None:
        s = self.settings
        if s.normalize and s.feature_map not in POSITIVE:
            return (
                f"feature_map {s.feature_map!r} can be negative, so normalize could divide by "
                f"zero; use {', '.join(POSITIVE)} or turn normalize off"
            )
        return None


MIXER = LinearAttention
