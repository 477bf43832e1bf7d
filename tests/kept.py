"""What real layers keep for their backward pass, measured on a CPU as they would keep it on a GPU.

FLA's kernels run in Triton's interpreter, whose bf16 numbers are wrong but whose tensors have the
right sizes. Four functions of torch and megatron-core keep more on a CPU than on a GPU; they are
replaced by ones that keep what the GPU's do (and have no backward pass).
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lt2.config.schema import ModelConfig, RunConfig
from megatron_lt2.kernels.rotary import TABLE_MIN
from megatron_lt2.model.activations import Share


def keeps(function: Callable[..., Tensor], kept: Callable[..., tuple[Any, ...]]) -> Any:
    """`function` as one step of autograd that keeps what `kept` says."""

    class Step(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Tensor:
            out = function(*args)
            ctx.save_for_backward(*kept(*args, out))
            return out

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            raise AssertionError("only what is kept is looked at")

    return Step.apply


def as_on_a_gpu(monkeypatch: Any) -> None:
    """Keep what a GPU's fused kernels keep."""
    from megatron.core.transformer.attention import Attention

    # Tensors are looked at through hooks, inside which nothing is dropped.
    monkeypatch.setattr("megatron_lt2.kernels.rematerialise._hooked", lambda: False)
    plain_norm, plain_sigmoid = F.rms_norm, F.logsigmoid

    def inverse_rms(x: Tensor) -> Tensor:
        return x[..., :1].float()

    norm = keeps(
        lambda x, weight, eps: plain_norm(x, (x.shape[-1],), weight, eps),
        lambda x, weight, eps, out: (x, weight, inverse_rms(x)),
    )
    monkeypatch.setattr(F, "rms_norm", lambda x, shape, weight, eps: norm(x, weight, eps))
    monkeypatch.setattr(F, "logsigmoid", keeps(plain_sigmoid, lambda x, out: (x,)))
    gate = keeps(lambda x, g: x * g.reshape(x.shape).sigmoid(), lambda x, g, out: (x, g))
    monkeypatch.setattr(Attention, "_apply_output_gate", lambda self, x, g: gate(x, g))
    if importlib.util.find_spec("fla") is not None:
        activations = importlib.import_module("fla.modules.activations")
        elu = keeps(lambda x: F.elu(x) + 1, lambda x, out: (x,))
        monkeypatch.setattr(activations, "elu_p1", elu)


def kept_bytes(model: ModelConfig, share: Share, kernels: str) -> float:
    """Bytes a token that the first layer of a bf16 model keeps, on one rank.

    kernels: "fla" in the interpreter; "torch" says nothing about linear mixers.
    """
    from megatron_lt2.model.core_config import transformer_config
    from megatron_lt2.model.init import initialise
    from megatron_lt2.model.lt2_model import LT2Model

    config = RunConfig(model=model)
    config.precision.dtype = "bf16"
    config.memory.recompute_cheap = share.cheap
    config.megatron.transformer = {"bias_activation_fusion": True}
    core = transformer_config(config, on_gpu=False)
    tokens = int(share.tokens)
    real = LT2Model(core, model, padded_vocab_size=64, max_sequence_length=tokens, kernels=kernels)
    initialise(real, model, 1)
    hidden = torch.randn(tokens, 1, model.hidden_size).bfloat16().requires_grad_()
    angles = real.rotary_pos_emb(tokens)
    apart = {p.untyped_storage().data_ptr() for p in real.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}
    alive: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        # Not counted: less than a byte a token (a number a head), and RetNet's rotary table, which
        # is longer than the row and serves all layers.
        shared = storage.data_ptr() in apart or x.shape[:1] == (TABLE_MIN,)
        if not shared and storage.nbytes() >= tokens:
            kept[storage.data_ptr()] = storage
            alive.append(x)  # so that its address is not used again
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        real.decoder.layers[0](
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=angles,
        )
    # Now, not when it was kept: an output that is made again has no memory any more.
    return sum(storage.nbytes() for storage in kept.values()) / tokens
