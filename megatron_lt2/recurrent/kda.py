"""Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692).

    S_t = (I - beta_t k_t k_t^T) Diag(exp g_t) S_{t-1} + beta_t k_t v_t^T
    o_t = S_t^T q_t / sqrt(K)

Gated DeltaNet with a decay for every key channel: g = -exp(A_log) softplus(a + dt_bias), where a
comes through a bottleneck, A_log is a number a head and dt_bias one a channel. The output gate is a
sigmoid and comes through a bottleneck too. A_log and dt_bias stay in fp32.
"""

from torch import Tensor

from ..kernels.kda import kimi_delta_attention
from .base import Layout, Recurrence, RecurrentMixer, Scan, Section, Weight
from .initial import inverse_softplus_of_steps, log_uniform


class KimiDeltaAttention(RecurrentMixer):
    """A decay a channel and a delta rule."""

    def describe(self) -> Layout:
        s = self.settings
        k, v = s.head_k_dim, s.head_v_dim
        return Layout(
            heads=s.num_heads,
            head_k_dim=k,
            head_v_dim=v,
            sections={
                "q": Section(k, conv=True, unit=True),
                "k": Section(k, conv=True, unit=True),
                "v": Section(v, conv=True),
                "gate": Section(v, rank=s.rank, bias=True),
                "decay": Section(k, rank=s.rank),
                "beta": Section(1),
            },
            weights={
                "A_log": Weight(1, log_uniform(s.a_init_min, s.a_init_max)),
                "dt_bias": Weight(k, inverse_softplus_of_steps(s.dt_min, s.dt_max)),
            },
            conv_size=s.conv_size,
            gate="gate",
            gate_activation="sigmoid",
            norm_eps=s.norm_eps,
        )

    def prepare(
        self, parts: dict[str, Tensor], weights: dict[str, Tensor], scan: Scan
    ) -> Recurrence:
        gates = (parts["decay"], parts["beta"].squeeze(-1))
        return Recurrence(
            kimi_delta_attention,
            (parts["q"], parts["k"], parts["v"], *gates),
            {
                "A_log_H": weights["A_log"],
                "dt_bias_HK": weights["dt_bias"],
                "allow_neg_eigval": self.settings.allow_neg_eigval,
                "real_BT": scan.real,
                "scale_qk": not scan.scaled,
            },
        )

    def flops(self) -> float:
        """Read k^T S, write, read q^T S."""
        return 1.5 * super().flops()

    def problem(self) -> str | None:
        s = self.settings
        for name in ("dt", "a_init"):
            low, high = getattr(s, f"{name}_min"), getattr(s, f"{name}_max")
            if low > high:
                return f"{name}_min {low} is above {name}_max {high}; swap them"
        return None


MIXER = KimiDeltaAttention
