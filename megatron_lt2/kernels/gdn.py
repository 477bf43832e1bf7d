"""The delta rule, gated and plain, with a choice of kernel; `megatron_lt2.ops.gdn` explains the
mathematics."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..ops.chunks import check_per_head, check_qkv
from ..ops.gdn import chunk_gated_delta_rule, gated_delta_rule_step, gdn_log_decay
from .backend import fla_function, one_token, run_torch, use_fla
from .guards import guard_head_parameters, guard_recurrence


def gated_delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    *,
    backend: str,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
    scale_qk: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule with L2-normalised queries and keys.

    Arguments as `megatron_lt2.ops.gdn.chunk_gated_delta_rule`, and:

    Args:
        backend: "fla" or "torch".
        cu_seqlens: see `megatron_lt2.kernels.simple_gla.simple_gla`.
        output_final_state: also return the state after each document.
        scale_qk: normalise q and k here; they have length 1 already if not.

    Returns:
        Output [B, T, H, V] in v's dtype, and the final state [N, H, K, V] in fp32 or None.

    Raises:
        ValueError: the backend cannot take these inputs.
    """
    if not use_fla(backend):
        return run_torch(
            chunk_gated_delta_rule,
            gated_delta_rule_step,
            (q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH),
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
            output_final_state=output_final_state,
            scale=scale,
            qk_l2norm=scale_qk,
        )
    gates = {"g": g_BTH, "beta": beta_BTH}
    _guard(q_BTHK, k_BTHK, v_BTHV, gates, cu_seqlens, initial_state)
    tensors = (q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH)
    return _kernel(tensors, initial_state, cu_seqlens)(
        q_BTHK,
        k_BTHK,
        v_BTHV,
        g=g_BTH.float(),
        beta=beta_BTH,
        scale=scale,
        initial_state=None if initial_state is None else initial_state.float(),
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=scale_qk,
        cu_seqlens=cu_seqlens,
    )


def gated_delta_net(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    a_BTH: Tensor,
    b_BTH: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    *,
    backend: str,
    allow_neg_eigval: bool = False,
    real_BT: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
    scale_qk: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet from raw gates: `gated_delta_rule` with

        g = -exp(A_log) softplus(a + dt_bias)        beta = sigmoid(b), doubled for neg. eigenvalues

    On FLA both are made inside the kernel, unless there is padding.

    Args:
        q_BTHK, k_BTHK, v_BTHV: queries, keys, values; q and k are L2-normalised here,
            unless `scale_qk` is off.
        a_BTH, b_BTH: decay and write strength before their activations.
        A_log_H, dt_bias_H: one number a head.
        backend: "fla" or "torch".
        allow_neg_eigval: write strengths in (0, 2).
        real_BT: bool, False for padding, which leaves the state alone; default: all tokens are
            real.
        scale, initial_state, cu_seqlens, output_final_state, scale_qk: as `gated_delta_rule`.

    Returns:
        Output [B, T, H, V] in v's dtype, and the final state [N, H, K, V] in fp32 or None.

    Raises:
        ValueError: the backend cannot take these inputs.
    """
    check_qkv(q_BTHK, k_BTHK, v_BTHV)
    check_per_head(k_BTHK, a=a_BTH, b=b_BTH)
    guard_head_parameters(k_BTHK.shape[2], A_log=(A_log_H, 1), dt_bias=(dt_bias_H, 1))
    if not use_fla(backend) or real_BT is not None:
        g = gdn_log_decay(a_BTH, A_log_H, dt_bias_H)
        beta = b_BTH.to(g.dtype).sigmoid()
        if allow_neg_eigval:
            beta = beta * 2
        if real_BT is not None:
            padding = ~real_BT.unsqueeze(-1)
            g, beta = g.masked_fill(padding, 0), beta.masked_fill(padding, 0)
        return gated_delta_rule(
            q_BTHK,
            k_BTHK,
            v_BTHV,
            g,
            beta,
            backend=backend,
            scale=scale,
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
            output_final_state=output_final_state,
            scale_qk=scale_qk,
        )
    _guard(q_BTHK, k_BTHK, v_BTHV, {"a": a_BTH, "b": b_BTH}, cu_seqlens, initial_state)
    tensors = (q_BTHK, k_BTHK, v_BTHV, a_BTH, b_BTH, A_log_H, dt_bias_H)
    return _kernel(tensors, initial_state, cu_seqlens)(
        q_BTHK,
        k_BTHK,
        v_BTHV,
        g=a_BTH,
        beta=b_BTH,
        A_log=A_log_H,
        dt_bias=dt_bias_H,
        scale=scale,
        initial_state=None if initial_state is None else initial_state.float(),
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=scale_qk,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=allow_neg_eigval,
        cu_seqlens=cu_seqlens,
    )


def delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    beta_BTH: Tensor,
    *,
    backend: str,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
    scale_qk: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """DeltaNet's rule: `gated_delta_rule` without decay.

    FLA has kernels of its own for it, which refuse fp32; there the gated ones run with decay 1.

    Arguments, results and errors as `gated_delta_rule`.
    """
    if not use_fla(backend):
        return run_torch(
            chunk_gated_delta_rule,
            gated_delta_rule_step,
            (q_BTHK, k_BTHK, v_BTHV, None, beta_BTH),
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
            output_final_state=output_final_state,
            scale=scale,
            qk_l2norm=scale_qk,
        )
    if q_BTHK.dtype == torch.float32:
        return gated_delta_rule(
            q_BTHK,
            k_BTHK,
            v_BTHV,
            torch.zeros_like(beta_BTH),
            beta_BTH,
            backend=backend,
            scale=scale,
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
            output_final_state=output_final_state,
            scale_qk=scale_qk,
        )
    _guard(q_BTHK, k_BTHK, v_BTHV, {"beta": beta_BTH}, cu_seqlens, initial_state)
    tensors = (q_BTHK, k_BTHK, v_BTHV, beta_BTH)
    decode = one_token(tensors, initial_state, cu_seqlens)
    kernel = "fused_recurrent_delta_rule" if decode else "chunk_delta_rule"
    return fla_function("fla.ops.delta_rule", kernel)(
        *tensors,
        scale=scale,
        initial_state=None if initial_state is None else initial_state.float(),
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=scale_qk,
        cu_seqlens=cu_seqlens,
    )


def _kernel(
    tensors: tuple[Tensor, ...], state: Tensor | None, cu_seqlens: Tensor | None
) -> Callable[..., Any]:
    # The recurrent kernel has no backward pass.
    decode = one_token(tensors, state, cu_seqlens)
    name = "fused_recurrent_gated_delta_rule" if decode else "chunk_gated_delta_rule"
    return fla_function("fla.ops.gated_delta_rule", name)


def _guard(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Mapping[str, Tensor],
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
) -> None:
    guard_recurrence(
        "delta rule",
        q,
        k,
        v,
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        per_head=gates,
        delta=True,
    )
