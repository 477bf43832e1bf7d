"""Multi-scale retention (RetNet; Sun et al. 2023, arXiv 2307.08621).

    S_t = gamma_h S_{t-1} + k_t v_t^T,   o_t = S_t^T q_t / sqrt(K),   gamma_h = 1 - 2^(-5-h)

A fixed decay a head; rotary positions on q and k; no convolution. The output is RMS-normed a head
and gated by SiLU.
"""

import torch
from torch import Tensor

from ..kernels.rotary import rotary
from ..kernels.simple_gla import simple_gla
from .base import Layout, Recurrence, RecurrentMixer, Scan, Section, wide


class Retention(RecurrentMixer):
    """A fixed scalar decay a head."""

    reads_positions = True

    def describe(self) -> Layout:
        s = self.settings
        k, v = s.head_k_dim, s.head_v_dim
        return Layout(
            heads=s.num_heads,
            head_k_dim=k,
            head_v_dim=v,
            sections={"q": Section(k), "k": Section(k), "v": Section(v), "gate": Section(v)},
            gate="gate",
            norm_eps=s.norm_eps,
        )

    def prepare(
        self, parts: dict[str, Tensor], weights: dict[str, Tensor], scan: Scan
    ) -> Recurrence:
        q, k = rotary(
            parts["q"],
            parts["k"],
            theta=self.settings.rope_theta,
            positions_BT=scan.positions,
            cu_seqlens=scan.cu_seqlens,
            backend=scan.backend,
        )
        heads = torch.arange(scan.heads.start, scan.heads.stop, device=q.device)
        # fp64 for a moment: 1 - 2^-20 is not much above what fp32 can tell from 1.
        decay = torch.log1p(-torch.exp2(-5.0 - heads.double()))
        decay = decay.to(wide(q[:0]).dtype)
        each_token = None
        if scan.real is not None:  # padding must not decay
            each_token = scan.blank(decay.expand(*q.shape[:3]))
        return Recurrence(
            simple_gla,
            (q, scan.blank(k), parts["v"], each_token),
            {"decay_H": None if each_token is not None else decay},
        )


MIXER = Retention
