"""Transitions A_t of the loops over one token, measured on real layers.

A delta-rule layer updates its state S [K, V] at a token by S <- A S + beta k v^T, with
A = alpha (I - beta k k^T) for a scalar decay alpha and A = (I - beta k k^T) Diag(alpha) for KDA. A
looped model meets the token T times, with another alpha, beta and k each time. Nothing of these
formulas is repeated here: the layer's own recurrence is run on what it was given for that token,
with the identity as state and v = 0, and the new state is A; with k = 0 it is the decay alone.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_lt2.config.schema import RunConfig
from megatron_lt2.recurrent.base import Scan
from tests.theory.models import random_model
from tests.tiny_run import tiny_config

KEY_CHANNELS = 8


@dataclass
class Loop:
    """One loop at one token and all heads, fp64: A, its decay part and the unit key."""

    transition: Tensor
    decay: Tensor
    key: Tensor


def rank_config(mixer: str, loops: int) -> RunConfig:
    """One layer of `mixer`, as many value channels as key channels: the identity is a state."""
    config = tiny_config()
    model = config.model
    model.pattern, model.num_layers, model.loops = mixer, 1, loops
    settings = replace(getattr(model, mixer), head_k_dim=KEY_CHANNELS, head_v_dim=KEY_CHANNELS)
    setattr(model, mixer, settings)
    config.data.isolate_documents = False
    return config


class Recorder:
    """Runs the model and keeps what its only mixer was given in each loop.

    Args:
        model: an LT2Model with one layer, in fp64.
        tokens: [1, s]; the transitions are those over the first token.
    """

    def __init__(self, model: Any, tokens: Tensor) -> None:
        self.model, self.tokens = model, tokens
        self.mixer = model.decoder.layers[0].self_attention
        self.inputs: list[Tensor] = []
        self._given: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []

    def run(self, passes: int | None = None) -> list[Loop]:
        """One forward pass, of `passes` loops instead of the model's T; one entry a loop."""
        self.inputs, self._given = [], []

        def keep_input(module: Any, args: Any, given: dict[str, Any]) -> None:
            hidden_states = args[0] if args else given["hidden_states"]
            self.inputs.append(hidden_states[0, 0].detach().clone())

        hook = self.mixer.register_forward_pre_hook(keep_input, with_kwargs=True)
        mix = self.mixer.recurrent.mix

        def recorded(parts: dict[str, Tensor], weights: dict[str, Tensor], scan: Scan) -> Any:
            self._given.append((parts, weights))
            return mix(parts, weights, scan)

        self.mixer.recurrent.mix = recorded
        try:
            positions = torch.arange(self.tokens.shape[1])[None]
            with torch.no_grad():
                self.model(self.tokens, positions, loops=passes)
                return [self._measure(mix, *given) for given in self._given]
        finally:
            self.mixer.recurrent.mix = mix
            hook.remove()

    def _measure(self, mix: Any, parts: dict[str, Tensor], weights: dict[str, Tensor]) -> Loop:
        token = {name: part[:, :1].double() for name, part in parts.items()}
        token["v"] = torch.zeros_like(token["v"])
        weights = {name: weight.double() for name, weight in weights.items()}
        identity = torch.eye(KEY_CHANNELS, dtype=torch.float64).expand(
            1, token["k"].shape[2], -1, -1
        )
        heads = slice(0, token["k"].shape[2])
        scan = Scan("torch", heads, state=(identity.contiguous(),), keep_state=True)
        states = [
            mix({**token, "k": key}, weights, scan)[1][0][0]
            for key in (token["k"], torch.zeros_like(token["k"]))
        ]
        key = token["k"][0, 0]
        return Loop(*states, key / key.norm(dim=-1, keepdim=True))

    def set_keys(self, wanted: Tensor) -> None:
        """Choose the key projection such that loop t's projected key is `wanted[t]` [T, H, K].

        What a loop gets depends on the loops before it, so keys are fixed one after another: with
        the keys of loops 1..t in place their inputs, and that of t + 1, no longer move. Convolution
        and SiLU act a channel after it, so they keep zeros, and equal keys equal.
        """
        layout = self.mixer.layout
        before = list(layout.sections).index("k")
        first = sum(layout.rows(name) for name in list(layout.sections)[:before])
        rows = self.mixer.in_proj.weight[first : first + layout.rows("k")]
        for known in range(1, len(wanted) + 1):
            self.run()
            inputs = torch.stack(self.inputs[:known])
            targets = wanted[:known].flatten(1).to(inputs.dtype)
            with torch.no_grad():
                rows.copy_((torch.linalg.pinv(inputs) @ targets).T)


def orthogonal_keys(loops: int, heads: int) -> Tensor:
    """Projected keys [T, H, K] on channels of their own, two a loop."""
    wanted = torch.zeros(loops, heads, KEY_CHANNELS, dtype=torch.float64)
    values = torch.rand(loops, heads, 2, generator=torch.Generator().manual_seed(7)).double() + 0.5
    for loop in range(loops):
        wanted[loop, :, 2 * loop : 2 * loop + 2] = values[loop]
    return wanted


def equal_keys(loops: int, heads: int) -> Tensor:
    """The same projected key [T, H, K] in every loop, on all channels."""
    values = torch.rand(heads, KEY_CHANNELS, generator=torch.Generator().manual_seed(8)).double()
    return (values + 0.5).expand(loops, -1, -1)


def change_of_state(loops: list[Loop]) -> Tensor:
    """prod_t A_t - prod_t decay_t, the latest loop leftmost; [H, K, K]."""
    product = decay = torch.eye(KEY_CHANNELS, dtype=torch.float64)
    for loop in loops:
        product, decay = loop.transition @ product, loop.decay @ decay
    return product - decay


def even_decay(mixer: Any) -> None:
    """Give all channels of a KDA head one decay, the same in every loop."""
    with torch.no_grad():
        mixer.up["decay"].weight.zero_()
        mixer.dt_bias.fill_(-1.0)


def singular_values(
    mixer: str, loops: int, keys: str, *, passes: int | None = None, even: bool = False
) -> dict[str, Any]:
    """Singular values of the change of state over one token, by head, in a random model.

    Args:
        loops: T of the model.
        keys: "random" (as the parameters give them), "orthogonal" or "equal".
        passes: loops to run after the keys were set; default T.
        even: KDA's decays made equal over the channels.

    Returns:
        "singular" [H, K], relative to the largest; "keys" [T, H, K]; "decay" [T, H, K, K].
    """
    model = random_model(rank_config(mixer, loops))
    recorder = Recorder(model, torch.tensor([[5, 17, 3, 44, 9]]))
    if even:
        even_decay(recorder.mixer)
    if keys != "random":
        wanted = {"orthogonal": orthogonal_keys, "equal": equal_keys}[keys]
        recorder.set_keys(wanted(loops, recorder.mixer.heads))
    measured = recorder.run(passes)
    singular = torch.linalg.svdvals(change_of_state(measured))
    return {
        "singular": (singular / singular[:, :1]).numpy(),
        "keys": torch.stack([loop.key for loop in measured]).numpy(),
        "decay": torch.stack([loop.decay for loop in measured]).numpy(),
    }
