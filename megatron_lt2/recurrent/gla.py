"""Gated linear attention (Yang et al. 2023, arXiv 2312.06635).

    S_t = Diag(exp g_t) S_{t-1} + k_t v_t^T,   o_t = S_t^T q_t / sqrt(K)

with g = logsigmoid(. + decay_bias) / 16 a key channel, through a bottleneck of 16 channels; no
convolution. The output is RMS-normed a head and gated by SiLU. decay_bias stays in fp32.
"""

import torch.nn.functional as F
from torch import Tensor

from ..kernels.gla import gla
from .base import Layout, Recurrence, RecurrentMixer, Scan, Section, Weight, wide
from .initial import constant


class GatedLinearAttention(RecurrentMixer):
    """A decay a channel."""

    def describe(self) -> Layout:
        s = self.settings
        k, v = s.head_k_dim, s.head_v_dim
        return Layout(
            heads=s.num_heads,
            head_k_dim=k,
            head_v_dim=v,
            sections={
                "q": Section(k),
                "k": Section(k),
                "v": Section(v),
                "gate": Section(v),
                "decay": Section(k, rank=s.rank),
            },
            weights={"decay_bias": Weight(k, constant(0.0))},
            gate="gate",
            norm_eps=s.norm_eps,
        )

    def prepare(
        self, parts: dict[str, Tensor], weights: dict[str, Tensor], scan: Scan
    ) -> Recurrence:
        decay = parts["decay"]
        logits = wide(decay) + weights["decay_bias"].view(decay.shape[2:])
        log_decay = F.logsigmoid(logits) / self.settings.gate_normalizer
        return Recurrence(
            gla, (parts["q"], scan.blank(parts["k"]), parts["v"], scan.blank(log_decay))
        )


MIXER = GatedLinearAttention
