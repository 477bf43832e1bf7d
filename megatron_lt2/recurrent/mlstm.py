"""mLSTM (xLSTM; Beck et al. 2024, arXiv 2405.04517), sizes of xLSTM 7B (arXiv 2503.13427).

    C_t = f_t C_{t-1} + i_t k_t v_t^T,   n_t = f_t n_{t-1} + i_t k_t
    h_t = C_t^T q_t / max(|n_t^T q_t|, 1),   f = sigmoid(.), i = exp(.), q scaled by 1/sqrt(K)

The exponential input gate can be huge; `ops/mlstm.py` shows how the state is kept in range without
changing h. Both gates are softly capped first. The output is RMS-normed a head and gated by a
sigmoid. The gates' biases stay in fp32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.mlstm import mlstm
from .base import Layout, Recurrence, RecurrentMixer, Scan, Section, Weight, wide
from .initial import constant, evenly


class MLSTM(RecurrentMixer):
    """A scalar forget gate and an exponential input gate a head, with a normaliser."""

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
                "input": Section(1),
                "forget": Section(1),
            },
            weights={
                "input_bias": Weight(1, constant(s.input_bias)),
                "forget_bias": Weight(1, evenly(s.forget_bias_min, s.forget_bias_max)),
            },
            gate="gate",
            gate_activation="sigmoid",
            norm_eps=s.norm_eps,
        )

    def prepare(
        self, parts: dict[str, Tensor], weights: dict[str, Tensor], scan: Scan
    ) -> Recurrence:
        log_input = self._capped(parts["input"], weights["input_bias"])
        log_forget = F.logsigmoid(self._capped(parts["forget"], weights["forget_bias"]))
        gates = (log_input, scan.blank(log_forget))
        return Recurrence(mlstm, (parts["q"], scan.blank(parts["k"]), parts["v"], *gates))

    def _capped(self, x: Tensor, bias: Tensor) -> Tensor:
        x = wide(x.squeeze(-1)) + bias
        cap = self.settings.gate_cap
        return x if cap is None else cap * torch.tanh(x / cap)

    def problem(self) -> str | None:
        low, high = self.settings.forget_bias_min, self.settings.forget_bias_max
        if low > high:
            return f"forget_bias_min {low} is above forget_bias_max {high}; swap them"
        return None

    def flops(self) -> float:
        """The value and the normaliser's column."""
        layout = self.layout
        return 4.0 * layout.heads * layout.head_k_dim * (layout.head_v_dim + 1)

    def state_numbers(self) -> int:
        layout = self.layout
        return layout.heads * (layout.head_k_dim * (layout.head_v_dim + 1) + 1)


MIXER = MLSTM
