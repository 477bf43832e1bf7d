"""Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024, arXiv 2412.06464) with LT2's geometry.

    S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,   o_t = S_t^T q_t / sqrt(K)

q, k and v pass through a short convolution and SiLU; q and k are L2-normalised; the log decay is
g = -exp(A_log) softplus(a + dt_bias) a head; the output is RMS-normed a head and gated by SiLU.
A_log and dt_bias stay in fp32 whatever the model's dtype: bf16 cannot hold decays near one.
"""

from torch import Tensor

from ..kernels.gdn import gated_delta_net
from .base import Layout, Recurrence, RecurrentMixer, Scan, Section, Weight
from .initial import inverse_softplus_of_steps, log_uniform


class GatedDeltaNet(RecurrentMixer):
    """Scalar decay a head and a delta rule."""

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
                "gate": Section(v),
                "beta": Section(1),
                "decay": Section(1),
            },
            weights={
                "A_log": Weight(1, log_uniform(0.0, s.a_init_max)),
                "dt_bias": Weight(1, inverse_softplus_of_steps(s.dt_min, s.dt_max)),
            },
            conv_size=s.conv_size,
            gate="gate",
            norm_eps=s.norm_eps,
        )

    def prepare(
        self, parts: dict[str, Tensor], weights: dict[str, Tensor], scan: Scan
    ) -> Recurrence:
        gates = (parts["decay"].squeeze(-1), parts["beta"].squeeze(-1))
        return Recurrence(
            gated_delta_net,
            (parts["q"], parts["k"], parts["v"], *gates),
            {
                "A_log_H": weights["A_log"],
                "dt_bias_H": weights["dt_bias"],
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
        if s.dt_min > s.dt_max:
            return f"dt_min {s.dt_min} is above dt_max {s.dt_max}; swap them"
        return None


MIXER = GatedDeltaNet
