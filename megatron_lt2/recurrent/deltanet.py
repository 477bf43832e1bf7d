"""DeltaNet (Yang et al. 2024, arXiv 2406.06484).

    S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,   o_t = S_t^T q_t / sqrt(K)

The delta rule without decay. q, k and v pass through a short convolution and SiLU; q and k are
L2-normalised; the output is RMS-normed a head, and gated by SiLU if asked for.
"""

from torch import Tensor

from ..kernels.gdn import delta_rule
from .base import Layout, Recurrence, RecurrentMixer, Scan, Section, wide


class DeltaNet(RecurrentMixer):
    """A delta rule and no decay."""

    def describe(self) -> Layout:
        s = self.settings
        k, v = s.head_k_dim, s.head_v_dim
        sections = {
            "q": Section(k, conv=True, unit=True),
            "k": Section(k, conv=True, unit=True),
            "v": Section(v, conv=True),
            "beta": Section(1),
        }
        if s.output_gate:
            sections["gate"] = Section(v)
        return Layout(
            heads=s.num_heads,
            head_k_dim=k,
            head_v_dim=v,
            sections=sections,
            conv_size=s.conv_size,
            gate="gate" if s.output_gate else None,
            norm_eps=s.norm_eps,
        )

    def prepare(
        self, parts: dict[str, Tensor], weights: dict[str, Tensor], scan: Scan
    ) -> Recurrence:
        beta = wide(parts["beta"].squeeze(-1)).sigmoid()
        if self.settings.allow_neg_eigval:
            beta = beta * 2
        return Recurrence(
            delta_rule,
            (parts["q"], scan.blank(parts["k"]), parts["v"], beta),
            {"scale_qk": not scan.scaled},
        )

    def flops(self) -> float:
        """Read k^T S, write, read q^T S."""
        return 1.5 * super().flops()


MIXER = DeltaNet
