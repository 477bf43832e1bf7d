"""Early exits at inference (Ouro, arXiv 2510.25741): which loops run and whose output counts.

    lambda_t = sigmoid(gate(norm(h_t)));  p_t = lambda_t prod_{j<t} (1 - lambda_j), the last p takes
    what is left

A fixed step takes the output of one loop for every token, and later loops do not run. A threshold q
takes for each token the first loop by which it has left with probability q. All loops run then,
since later tokens look at this one in every loop: it chooses an output and saves nothing.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .configuration_lt2 import LT2Config


@dataclass
class LT2ModelOutput(BaseModelOutputWithPast):
    """transformers' output, and if `output_exits` was asked for:

    loop_states: normed output of every loop that ran, each [B, T, d].
    exit_probabilities: [B, T, loops], rows sum to 1; None without a gate.
    """

    loop_states: tuple[Tensor, ...] | None = None
    exit_probabilities: Tensor | None = None


@dataclass
class LT2CausalLMOutput(CausalLMOutputWithPast):
    """transformers' output, and if `output_exits` was asked for:

    loop_logits: of every loop that ran [loops, B, T, vocabulary], of the positions kept.
    exit_probabilities: [B, T, loops] of all positions; None without a gate.
    """

    loop_logits: Tensor | None = None
    exit_probabilities: Tensor | None = None


@dataclass(frozen=True)
class Exits:
    """What a call asked for.

    loops: that run.
    threshold: q, or None to take the last loop that runs.
    report: states and probabilities of all loops are wanted.
    """

    loops: int
    threshold: float | None
    report: bool

    @property
    def watches(self) -> bool:
        """Whether the outputs of all loops are needed."""
        return self.report or self.threshold is not None


def choose_exits(
    config: LT2Config,
    loops: int | None = None,
    threshold: float | None = None,
    step: int | None = None,
    report: bool | None = None,
) -> Exits:
    """What to do, from the arguments of a call; those left out are taken from the config.

    Raises:
        ValueError: this model cannot do it; says why.
    """
    if threshold is not None and step is not None:
        raise ValueError(f"exit_threshold {threshold} and exit_step {step}: give one of them")
    if threshold is None and step is None:
        threshold, step = config.exit_threshold, config.exit_step
    count = config.loops if loops is None else loops
    if count < 1:
        raise ValueError(f"loops must be at least 1, got {count}")
    if count > config.loops and config.loop_windows is not None:
        raise ValueError(
            f"loops {count}: the model has a mask for each of {config.loops} loops and none for "
            f"more; choose at most {config.loops}"
        )
    if count > config.loops and config.loop_residual == "per_channel":
        raise ValueError(
            f"loops {count}: rho has a row for each of {config.loops} loops and none for more; "
            f"choose at most {config.loops}"
        )
    if threshold is not None:
        if not config.exit_gate:
            raise ValueError(
                f"exit_threshold {threshold} needs an exit gate, and this model was trained "
                "without one; use exit_step or loops"
            )
        if not 0 <= threshold <= 1:
            raise ValueError(f"exit_threshold must be a probability, got {threshold}")
    if step is not None:
        if not 1 <= step <= count:
            raise ValueError(f"exit_step must be a loop from 1 to {count}, got {step}")
        count = step
    return Exits(count, threshold, bool(report))


class LT2ExitGate(nn.Linear):
    """The logit of leaving, in fp32 at least as in training."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, d] -> [B, T]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        assert self.bias is not None
        return F.linear(x.to(wide), self.weight.to(wide), self.bias.to(wide)).squeeze(-1)


def exit_probabilities(gate_logits: list[Tensor]) -> Tensor:
    """p [B, T, loops] from the gate's logits [B, T] of every loop; that of the last is not used."""
    leaves = torch.stack(gate_logits[:-1], -1) if len(gate_logits) > 1 else None
    if leaves is None:
        return torch.ones_like(gate_logits[0])[..., None]
    stays = F.logsigmoid(-leaves).cumsum(-1)
    stayed = torch.cat([torch.zeros_like(stays[..., :1]), stays[..., :-1]], -1)
    return torch.cat([F.logsigmoid(leaves) + stayed, stays[..., -1:]], -1).exp()


def take_by_threshold(states: list[Tensor], probabilities: Tensor, threshold: float) -> Tensor:
    """For each token the state [B, T, d] of the first loop by which it has left with probability
    `threshold`; of the last one if there is none.

    Args:
        states: of every loop, each [B, T, d].
        probabilities: [B, T, loops].
    """
    reached = probabilities.cumsum(-1) >= threshold
    reached[..., -1] = True
    first = reached.int().argmax(-1)
    chosen = states[0]
    for loop, state in enumerate(states[1:], 1):
        chosen = torch.where((first == loop)[..., None], state, chosen)
    return chosen
