"""Which kernel runs the gated delta rule of an exported model.

FLA's Triton kernels (flash-linear-attention) are used for 16-bit tensors on a CUDA device if `fla`
can be imported; everything else runs on the plain recurrence that lies beside this file. 32-bit
tensors stay on the plain form because FLA's kernels may round their products to TF32.
"""

import functools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from ..ops.gdn import chunk_gated_delta_rule, gated_delta_rule_step

FLA_MAX_KEY_DIM = 256


@functools.cache
def _fla_kernels() -> tuple[Callable, Callable] | None:
    """FLA's chunk and one-token kernels, or None (said once) if they cannot be imported."""
    try:
        from fla.ops.gated_delta_rule import (
            chunk_gated_delta_rule as chunk,
        )
        from fla.ops.gated_delta_rule import (
            fused_recurrent_gated_delta_rule as step,
        )
    except ImportError:
        return None
    except Exception as error:  # a Triton that does not fit fails in many ways
        warnings.warn(f"fla cannot be used ({error}); falling back to plain PyTorch", stacklevel=2)
        return None
    return chunk, step


def _kernels_for(q: Tensor, v: Tensor) -> tuple[Callable, Callable] | None:
    """FLA's kernels if they serve such tensors, else None."""
    fits = q.is_cuda and v.dtype in (torch.bfloat16, torch.float16)
    return _fla_kernels() if fits and q.shape[-1] <= FLA_MAX_KEY_DIM else None


def gated_delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    state_BHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule over T more tokens, with L2-normalised q and k.

    Args:
        q_BTHK, k_BTHK, v_BTHV: queries, keys, values.
        g_BTH: log decay, at most 0, fp32.
        beta_BTH: write strength.
        state_BHKV: state before these tokens; zero if None.

    Returns:
        Output [B, T, H, V] in v's dtype and the state after the tokens [B, H, K, V] in fp32 (fp64
        for fp64).
    """
    one_token = q_BTHK.shape[1] == 1
    kernels = _kernels_for(q_BTHK, v_BTHV)
    if kernels is not None:
        # FLA's one-token kernel has no backward pass.
        return kernels[int(one_token and not torch.is_grad_enabled())](
            q=q_BTHK,
            k=k_BTHK,
            v=v_BTHV,
            g=g_BTH,
            beta=beta_BTH,
            initial_state=state_BHKV,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
    if one_token and state_BHKV is not None:
        q_BHK, k_BHK, v_BHV = q_BTHK[:, 0], k_BTHK[:, 0], v_BTHV[:, 0]
        o_BHV, state = gated_delta_rule_step(
            q_BHK, k_BHK, v_BHV, g_BTH[:, 0], beta_BTH[:, 0], state_BHKV
        )
        return o_BHV[:, None], state
    return chunk_gated_delta_rule(q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH, initial_state=state_BHKV)
