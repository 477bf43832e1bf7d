"""HGRN2 (Qin et al. 2024, arXiv 2404.07904) as LT2 uses it: without learned lower bounds.

    S_t = Diag(f_t) S_{t-1} + (1 - f_t) v_t^T,   o_t = S_t^T silu(q_t) / sqrt(K),   f = sigmoid(.)

The forget gate is the decay and one minus it the key. HGRN2 learns a lower bound of f a layer, one
parameter across all layers; a fixed bound that rises evenly with depth is available instead, which
no pipeline stage has to share. No convolution, no output gate; RMS norm over all heads together.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.gla import gla
from .base import Layout, Recurrence, RecurrentMixer, Scan, Section, wide


class HGRN2(RecurrentMixer):
    """A decay a channel that is tied to the key."""

    def describe(self) -> Layout:
        s = self.settings
        k, v = s.head_k_dim, s.head_v_dim
        return Layout(
            heads=s.num_heads,
            head_k_dim=k,
            head_v_dim=v,
            sections={"q": Section(k), "forget": Section(k), "v": Section(v)},
            norm=s.norm,
            norm_eps=s.norm_eps,
        )

    def prepare(
        self, parts: dict[str, Tensor], weights: dict[str, Tensor], scan: Scan
    ) -> Recurrence:
        forget = parts["forget"]
        log_decay = F.logsigmoid(wide(forget))
        bound = self.settings.lower_bound * self.depth
        if bound > 0:
            floor = log_decay.new_tensor(math.log(bound))
            log_decay = torch.logaddexp(floor, math.log1p(-bound) + log_decay)
        key = torch.sigmoid(-forget)  # 1 - sigmoid(forget), without its rounding near 1
        if bound > 0:
            key = key * (1 - bound)
        return Recurrence(
            gla, (F.silu(parts["q"]), scan.blank(key), parts["v"], scan.blank(log_decay))
        )

    def problem(self) -> str | None:
        bound = self.settings.lower_bound
        if not 0 <= bound < 1:
            return f"lower_bound {bound} is not a share; choose one from 0 to below 1"
        return None


MIXER = HGRN2
