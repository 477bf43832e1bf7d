"""mLSTM with a choice of kernel; `megatron_lt2.ops.mlstm` explains the mathematics.

FLA has no mLSTM. Its kernel for scalar decay computes numerator and denominator at once, the latter
as one more value column; the columns are filled up to a multiple of 8, so that rows stay aligned
for 16-byte loads.
"""

import torch.nn.functional as F
from torch import Tensor

from ..ops.mlstm import (
    State,
    check_mlstm,
    chunk_mlstm,
    mlstm_step,
    read_out,
    stabilised_inputs,
    stabilisers,
    with_ones,
)
from .backend import check_device, run_torch, use_fla
from .guards import check_packed
from .simple_gla import simple_gla

ALIGNED_COLUMNS = 8


def extra_columns(value_dim: int) -> int:
    """How many columns follow the values: the one of ones, and zeros up to a multiple of 8."""
    return ALIGNED_COLUMNS - value_dim % ALIGNED_COLUMNS


def mlstm(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    i_BTH: Tensor,
    f_BTH: Tensor,
    *,
    backend: str,
    scale: float | None = None,
    initial_state: State | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, State | None]:
    """mLSTM with exponential input gate and a stabilised state.

    Arguments as `megatron_lt2.ops.mlstm.chunk_mlstm`, and:

    Args:
        backend: "fla" or "torch".
        cu_seqlens: see `megatron_lt2.kernels.simple_gla.simple_gla`.
        output_final_state: also return the state after each document.

    Returns:
        Output [B, T, H, V] in v's dtype, and the final state (S [N, H, K, V+1], m [N, H]) in fp32
        or None.

    Raises:
        ValueError: the backend cannot take these inputs.
    """
    tensors = (q_BTHK, k_BTHK, v_BTHV, i_BTH, f_BTH)
    if not use_fla(backend):
        return run_torch(
            chunk_mlstm,
            mlstm_step,
            tensors,
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
            output_final_state=output_final_state,
            scale=scale,
        )

    batch, value_dim = v_BTHV.shape[0], v_BTHV.shape[-1]
    check_device(q_BTHK.device.type)
    check_packed(cu_seqlens, batch)
    documents = batch if cu_seqlens is None else len(cu_seqlens) - 1
    check_mlstm(*tensors, initial_state, documents)
    extra = extra_columns(value_dim)
    matrix, m_NH = (None, None) if initial_state is None else initial_state
    if matrix is not None:
        matrix = F.pad(matrix.float(), (0, extra - 1))
    before, m, m_final = stabilisers(i_BTH, f_BTH, m_NH, cu_seqlens)
    k, g = stabilised_inputs(k_BTHK, i_BTH, f_BTH, before, m)
    o, final = simple_gla(
        q_BTHK,
        k,
        with_ones(v_BTHV, extra),
        g,
        backend=backend,
        scale=scale,
        initial_state=matrix,
        cu_seqlens=cu_seqlens,
        output_final_state=output_final_state,
    )
    h = read_out(o, m, value_dim).to(v_BTHV.dtype)
    return h, None if final is None else (final[..., : value_dim + 1], m_final)
