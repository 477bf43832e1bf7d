"""Every condition that FLA's kernels put on a single call.

The kernels assume much and check little: some wrong inputs read out of bounds, and the numbers that
come back look like numbers. All guards are kept here, so that one place shows what is supported.
`megatron_lt2.kernels.backend` guards the installation.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..ops.chunks import check_per_channel, check_per_head, check_qkv, check_state
from .backend import check_device

DELTA_MAX_KEY_DIM = 256
ROTARY_MAX_DIM = 256
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_dtypes(**tensors: Tensor) -> None:
    """Refuse tensors that are not all of the same dtype, one that the kernels know.

    Raises:
        ValueError: naming the dtypes.
    """
    dtypes = {x.dtype for x in tensors.values()}
    if len(dtypes) != 1 or not dtypes <= set(KERNEL_DTYPES):
        found = ", ".join(f"{name} {x.dtype}" for name, x in tensors.items())
        raise ValueError(
            f"FLA kernels need one of bf16, fp16, fp32 for {', '.join(tensors)}, not {found}."
        )


def check_packed(cu_seqlens: Tensor | None, batch: int) -> None:
    """Refuse document borders for more than one row.

    Raises:
        ValueError: there are more.
    """
    if cu_seqlens is not None and batch != 1:
        raise ValueError(f"cu_seqlens needs one packed row, but the batch size is {batch}.")


def guard_recurrence(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    per_head: Mapping[str, Tensor | None] | None = None,
    per_channel: Tensor | None = None,
    delta: bool = False,
) -> None:
    """Conditions of FLA's recurrences.

    Head counts: `chunk_simple_gla` does not compare them and reads out of bounds. Odd head sizes:
    16-bit gradients of the values fault on Hopper (FLA PR 1241).

    Args:
        name: of the recurrence, for messages.
        q, k, v: [B, T, H, K or V].
        cu_seqlens: document borders.
        initial_state: one state a document, [N, H, K, V].
        per_head: gates with one number a token and head.
        per_channel: gate with one number a token, head and key channel.
        delta: it is a delta rule, whose kernels hold all key channels at once.

    Raises:
        ValueError: a condition is not met.
    """
    check_device(q.device.type)
    check_dtypes(q=q, k=k, v=v)
    check_packed(cu_seqlens, q.shape[0])
    check_qkv(q, k, v)
    check_per_head(k, **(per_head or {}))
    if per_channel is not None:
        check_per_channel(k, per_channel)
    heads, key_dim, value_dim = *k.shape[2:], v.shape[-1]
    documents = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    check_state(initial_state, (documents, heads, key_dim, value_dim))
    if delta and key_dim > DELTA_MAX_KEY_DIM:
        raise ValueError(
            f"FLA's {name} takes up to {DELTA_MAX_KEY_DIM} key channels a head, not {key_dim}."
        )
    if key_dim % 2 or value_dim % 2:
        raise ValueError(
            f"FLA's {name} needs even numbers of key and value channels a head,"
            f" not {key_dim} and {value_dim}."
        )


def guard_head_parameters(heads: int, **parameters: tuple[Tensor, int]) -> None:
    """Refuse parameters of a gate that do not have so many numbers a head.

    Args:
        heads: H.
        parameters: name -> (parameter, numbers a head).

    Raises:
        ValueError: naming the parameter.
    """
    for name, (x, each) in parameters.items():
        if x.numel() != heads * each:
            raise ValueError(f"{name} needs {heads * each} numbers, but has {x.numel()}.")


def guard_conv(
    x_BTD: Tensor,
    weight_DW: Tensor,
    bias_D: Tensor | None,
    state_NDW: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Conditions of the convolution kernels, FLA's and ours.

    A packed batch of two rows would get a wrong weight gradient from FLA's (FLA #955).

    Raises:
        ValueError: one of them is not met.
    """
    check_device(x_BTD.device.type)
    check_dtypes(x=x_BTD)
    check_packed(cu_seqlens, x_BTD.shape[0])
    channels, taps = weight_DW.shape
    if x_BTD.shape[-1] != channels:
        raise ValueError(
            f"The convolution has {channels} channels, but its input has {x_BTD.shape[-1]}."
        )
    if bias_D is not None and tuple(bias_D.shape) != (channels,):
        raise ValueError(
            f"The convolution has {channels} channels, but its bias has shape"
            f" {tuple(bias_D.shape)}."
        )
    documents = x_BTD.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    if state_NDW is not None and tuple(state_NDW.shape) != (documents, channels, taps - 1):
        raise ValueError(
            f"The convolution state must have shape {(documents, channels, taps - 1)},"
            f" not {tuple(state_NDW.shape)}."
        )


def guard_norm(x: Tensor, weight: Tensor, gate: Tensor | None = None) -> None:
    """Conditions of FLA's norms.

    Raises:
        ValueError: one of them is not met.
    """
    check_device(x.device.type)
    if gate is None:
        check_dtypes(x=x)
    else:
        check_dtypes(x=x, gate=gate)
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"The norm needs a weight of {x.shape[-1]} numbers, not {tuple(weight.shape)}."
        )
    if gate is not None and gate.shape != x.shape:
        raise ValueError(
            f"The gated norm needs a gate of the input's shape {tuple(x.shape)},"
            f" not {tuple(gate.shape)}."
        )


def guard_rotary(q: Tensor, k: Tensor, cu_seqlens: Tensor | None) -> None:
    """Conditions of FLA's rotary embedding.

    Raises:
        ValueError: one of them is not met.
    """
    check_device(q.device.type)
    check_dtypes(q=q, k=k)
    check_packed(cu_seqlens, q.shape[0])
    if q.shape[-1] > ROTARY_MAX_DIM:
        raise ValueError(
            f"FLA's rotary embedding takes up to {ROTARY_MAX_DIM} channels a head,"
            f" not {q.shape[-1]}."
        )
