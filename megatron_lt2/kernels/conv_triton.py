"""Triton kernels of the short causal convolution, see `megatron_lt2.kernels.conv`.

A program takes a block of channels (one head where heads are scaled to length 1) and several runs
of neighbouring tokens. It walks along its runs all at once and holds the last inputs in registers,
so that each input is loaded once a run plus what the taps look back at; what the next two steps
need is being loaded meanwhile, for the kernels are as fast as memory. The backward pass computes
the convolution again, walks W-1 tokens past the end of each run, where gradients still reach back
into it, and writes sums for the taps a program instead of adding them up atomically: results are
the same every time.

Everything is fp32 inside. Up to four taps; tap j multiplies the input j tokens ago.
"""

from torch import Tensor

from ..ops.chunks import L2_NORM_EPS

try:
    import triton
    import triton.language as tl
except ImportError:  # this file travels with exports, which also run without Triton
    triton = None

MAX_TAPS = 4

ELEMENTS = 512
"""Channels x runs of a program: four a thread. Eight would leave room for half as many warps."""

BLOCK, BLOCK_BACK = 128, 256
"""Channels of a program where heads do not matter, forward and backward."""

RUN, RUN_BACK = 16, 64
"""Tokens of a run, forward and backward; timed on an H200, with `BLOCK`."""


def launch_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    places: tuple[Tensor, Tensor] | None,
    silu: bool,
    unit: int | None,
    y: Tensor,
) -> None:
    """Convolve into y.

    Args:
        x: [B, T, D], channels side by side; rows may be slices.
        weight: [D, W], contiguous.
        bias: [D] or None.
        state: [N, D, W-1] or None, in any layout.
        places: of the tokens of a packed row, each int32 [T]: how many tokens before it belong to
            its document (any number from W-1 on may stand for more), and the document's number.
        silu: the activation.
        unit: channels of a head, each scaled to length 1; or None.
        y: [B, T, D], contiguous.
    """
    channels = x.shape[-1]
    own, wide = _block(channels, unit, BLOCK)
    rows = max(1, ELEMENTS // wide)
    since, document = (None, None) if places is None else places
    grid = (triton.cdiv(channels, own), triton.cdiv(x.shape[1], rows * RUN), x.shape[0])
    _forward_kernel[grid](
        x, weight, bias, state, since, document, y,
        x.shape[1], x.stride(0), x.stride(1), *_strides(state),
        D=channels, W=weight.shape[1], OWN=own, BD=wide, ROWS=rows, RUN=RUN,
        HAS_BIAS=bias is not None, HAS_STATE=state is not None, PACKED=places is not None,
        SILU=silu, UNIT=unit is not None, EPS=L2_NORM_EPS,
        num_warps=4,
    )  # fmt: skip


def launch_backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    places: tuple[Tensor, Tensor] | None,
    silu: bool,
    unit: int | None,
    dy: Tensor,
    dx: Tensor,
    sums: Tensor,
) -> None:
    """Gradients of what `launch_forward` computes.

    Args:
        x, weight, bias, state, places, silu, unit: as there.
        dy: [B, T, D], contiguous.
        dx: [B, T, D], written; channels side by side, rows may be slices.
        sums: [programs along the tokens, W (+ 1 with a bias), D] fp32, written; channels side by
            side. The sum over the programs is the gradient of the taps, oldest first, then of the
            bias. `count_sums` gives the number of programs.
    """
    channels, length = x.shape[-1], x.shape[1]
    own, wide = _block(channels, unit, BLOCK_BACK)
    rows = max(1, ELEMENTS // wide)
    since, document = (None, None) if places is None else places
    blocks = triton.cdiv(length, rows * RUN_BACK)
    _backward_kernel[(triton.cdiv(channels, own), blocks, x.shape[0])](
        x, weight, bias, state, since, document, dy, dx, sums,
        length, x.stride(0), x.stride(1), *_strides(state),
        dx.stride(0), dx.stride(1), sums.stride(0), sums.stride(1),
        D=channels, W=weight.shape[1], OWN=own, BD=wide, ROWS=rows, RUN=RUN_BACK,
        HAS_BIAS=bias is not None, HAS_STATE=state is not None, PACKED=places is not None,
        SILU=silu, UNIT=unit is not None, EPS=L2_NORM_EPS,
        num_warps=4,
    )  # fmt: skip


def count_sums(x: Tensor, unit: int | None) -> int:
    """Programs along the tokens of `launch_backward`."""
    rows = max(1, ELEMENTS // _block(x.shape[-1], unit, BLOCK_BACK)[1])
    return x.shape[0] * int(triton.cdiv(x.shape[1], rows * RUN_BACK))


def _block(channels: int, unit: int | None, most: int) -> tuple[int, int]:
    """Channels of a program, and the power of two that holds them."""
    own = min(channels, most) if unit is None else unit
    return own, triton.next_power_of_2(own)


def _strides(state: Tensor | None) -> tuple[int, int, int]:
    return (0, 0, 0) if state is None else (state.stride(0), state.stride(1), state.stride(2))


if triton is not None:

    @triton.jit
    def _tap(weight_ptr, d, is_channel, J: tl.constexpr, W: tl.constexpr):
        at = weight_ptr + d * W + (W - 1 - J)
        return tl.load(at, mask=is_channel, other=0.0).to(tl.float32)[None, :]

    @triton.jit
    def _row(x_ptr, t, T, stride, d, is_channel):
        is_here = ((t >= 0) & (t < T))[:, None] & is_channel[None, :]
        at = x_ptr + t[:, None] * stride + d[None, :]
        return tl.load(at, mask=is_here, other=0.0)

    @triton.jit
    def _seen(
        x, since, document, state_ptr, state_n, state_d, state_c, d, is_channel,
        J: tl.constexpr, W: tl.constexpr, HAS_STATE: tl.constexpr, PACKED: tl.constexpr,
    ):  # fmt: skip
        """The input J tokens ago as a token sees it: of its document, or of what came before."""
        if HAS_STATE:
            reaches_back = (since < J)[:, None]
            column = (W - 1 - J) + since
            at = state_ptr + document[:, None] * state_n + d[None, :] * state_d
            at += column[:, None] * state_c
            before = tl.load(at, mask=reaches_back & is_channel[None, :], other=0.0)
            x = tl.where(reaches_back, before.to(tl.float32), x)
        elif PACKED:
            x = tl.where((since >= J)[:, None], x, 0.0)
        return x

    @triton.jit
    def _since(since_ptr, t, T, PACKED: tl.constexpr):
        """Tokens of the document before each token."""
        if PACKED:
            t = tl.load(since_ptr + t, mask=t < T, other=0)
        return t

    @triton.jit
    def _document(
        document_ptr, t, T, HAS_STATE: tl.constexpr, PACKED: tl.constexpr
    ):  # fmt: skip
        """The document of each token."""
        document = tl.zeros_like(t) + tl.program_id(2)
        if HAS_STATE and PACKED:
            document = tl.load(document_ptr + t, mask=t < T, other=0).to(tl.int64)
        return document

    @triton.jit
    def _forward_kernel(
        x_ptr, weight_ptr, bias_ptr, state_ptr, since_ptr, document_ptr, y_ptr,
        T, x_batch, x_row, state_n, state_d, state_c,
        D: tl.constexpr, W: tl.constexpr, OWN: tl.constexpr, BD: tl.constexpr,
        ROWS: tl.constexpr, RUN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr,
        PACKED: tl.constexpr, SILU: tl.constexpr, UNIT: tl.constexpr, EPS: tl.constexpr,
    ):  # fmt: skip
        batch = tl.program_id(2).to(tl.int64)
        c = tl.arange(0, BD)
        d = tl.program_id(0) * OWN + c
        is_channel = (c < OWN) & (d < D)
        first = tl.program_id(1).to(tl.int64) * (ROWS * RUN) + tl.arange(0, ROWS) * RUN
        x_ptr += batch * x_batch
        y_ptr += batch * T * D

        k0 = _tap(weight_ptr, d, is_channel, 0, W)
        bias = tl.zeros([1, BD], dtype=tl.float32)
        if HAS_BIAS:
            bias += tl.load(bias_ptr + d, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        if W > 1:
            k1 = _tap(weight_ptr, d, is_channel, 1, W)
            x1 = _row(x_ptr, first - 1, T, x_row, d, is_channel).to(tl.float32)
        if W > 2:
            k2 = _tap(weight_ptr, d, is_channel, 2, W)
            x2 = _row(x_ptr, first - 2, T, x_row, d, is_channel).to(tl.float32)
        if W > 3:
            k3 = _tap(weight_ptr, d, is_channel, 3, W)
            x3 = _row(x_ptr, first - 3, T, x_row, d, is_channel).to(tl.float32)

        next_x = _row(x_ptr, first, T, x_row, d, is_channel)
        later_x = _row(x_ptr, first + 1, T, x_row, d, is_channel)
        next_since = _since(since_ptr, first, T, PACKED)
        later_since = _since(since_ptr, first + 1, T, PACKED)

        for i in range(RUN):
            t = first + i
            x0, since = next_x.to(tl.float32), next_since
            next_x, next_since = later_x, later_since
            later_x = _row(x_ptr, t + 2, T, x_row, d, is_channel)
            later_since = _since(since_ptr, t + 2, T, PACKED)
            document = _document(document_ptr, t, T, HAS_STATE, PACKED)
            z = k0 * x0 + bias
            if W > 1:
                z += k1 * _seen(
                    x1, since, document, state_ptr, state_n, state_d, state_c, d, is_channel,
                    1, W, HAS_STATE, PACKED,
                )  # fmt: skip
            if W > 2:
                z += k2 * _seen(
                    x2, since, document, state_ptr, state_n, state_d, state_c, d, is_channel,
                    2, W, HAS_STATE, PACKED,
                )  # fmt: skip
            if W > 3:
                z += k3 * _seen(
                    x3, since, document, state_ptr, state_n, state_d, state_c, d, is_channel,
                    3, W, HAS_STATE, PACKED,
                )  # fmt: skip
            if SILU:
                z = z * tl.sigmoid(z)
            if UNIT:
                z = z * tl.rsqrt(tl.sum(z * z, axis=1) + EPS)[:, None]
            at = y_ptr + t[:, None] * D + d[None, :]
            is_own = (t < T)[:, None] & is_channel[None, :]
            tl.store(at, z.to(y_ptr.dtype.element_ty), mask=is_own)
            if W > 3:
                x3 = x2
            if W > 2:
                x2 = x1
            if W > 1:
                x1 = x0

    @triton.jit
    def _backward_kernel(
        x_ptr, weight_ptr, bias_ptr, state_ptr, since_ptr, document_ptr, dy_ptr, dx_ptr, sums_ptr,
        T, x_batch, x_row, state_n, state_d, state_c, dx_batch, dx_row, sums_program, sums_tap,
        D: tl.constexpr, W: tl.constexpr, OWN: tl.constexpr, BD: tl.constexpr,
        ROWS: tl.constexpr, RUN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr,
        PACKED: tl.constexpr, SILU: tl.constexpr, UNIT: tl.constexpr, EPS: tl.constexpr,
    ):  # fmt: skip
        batch = tl.program_id(2).to(tl.int64)
        c = tl.arange(0, BD)
        d = tl.program_id(0) * OWN + c
        is_channel = (c < OWN) & (d < D)
        first = tl.program_id(1).to(tl.int64) * (ROWS * RUN) + tl.arange(0, ROWS) * RUN
        x_ptr += batch * x_batch
        dy_ptr += batch * T * D
        dx_ptr += batch * dx_batch
        sums_ptr += (batch * tl.num_programs(1) + tl.program_id(1)) * sums_program + d

        k0 = _tap(weight_ptr, d, is_channel, 0, W)
        dk0 = tl.zeros([ROWS, BD], dtype=tl.float32)
        dbias = tl.zeros([ROWS, BD], dtype=tl.float32)
        bias = tl.zeros([1, BD], dtype=tl.float32)
        if HAS_BIAS:
            bias += tl.load(bias_ptr + d, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        # g1, g2, g3: gradients of the inputs one to three tokens ago, as far as they are known.
        if W > 1:
            k1 = _tap(weight_ptr, d, is_channel, 1, W)
            x1 = _row(x_ptr, first - 1, T, x_row, d, is_channel).to(tl.float32)
            dk1 = tl.zeros([ROWS, BD], dtype=tl.float32)
            g1 = tl.zeros([ROWS, BD], dtype=tl.float32)
        if W > 2:
            k2 = _tap(weight_ptr, d, is_channel, 2, W)
            x2 = _row(x_ptr, first - 2, T, x_row, d, is_channel).to(tl.float32)
            dk2 = tl.zeros([ROWS, BD], dtype=tl.float32)
            g2 = tl.zeros([ROWS, BD], dtype=tl.float32)
        if W > 3:
            k3 = _tap(weight_ptr, d, is_channel, 3, W)
            x3 = _row(x_ptr, first - 3, T, x_row, d, is_channel).to(tl.float32)
            dk3 = tl.zeros([ROWS, BD], dtype=tl.float32)
            g3 = tl.zeros([ROWS, BD], dtype=tl.float32)

        next_x = _row(x_ptr, first, T, x_row, d, is_channel)
        later_x = _row(x_ptr, first + 1, T, x_row, d, is_channel)
        next_dy = _row(dy_ptr, first, T, D, d, is_channel)
        later_dy = _row(dy_ptr, first + 1, T, D, d, is_channel)
        next_since = _since(since_ptr, first, T, PACKED)
        later_since = _since(since_ptr, first + 1, T, PACKED)

        for i in range(RUN + W - 1):
            t = first + i
            x0, dz, since = next_x.to(tl.float32), next_dy.to(tl.float32), next_since
            next_x, next_dy, next_since = later_x, later_dy, later_since
            later_x = _row(x_ptr, t + 2, T, x_row, d, is_channel)
            later_dy = _row(dy_ptr, t + 2, T, D, d, is_channel)
            later_since = _since(since_ptr, t + 2, T, PACKED)
            document = _document(document_ptr, t, T, HAS_STATE, PACKED)
            z = k0 * x0 + bias
            if W > 1:
                v1 = _seen(
                    x1, since, document, state_ptr, state_n, state_d, state_c, d, is_channel,
                    1, W, HAS_STATE, PACKED,
                )  # fmt: skip
                z += k1 * v1
            if W > 2:
                v2 = _seen(
                    x2, since, document, state_ptr, state_n, state_d, state_c, d, is_channel,
                    2, W, HAS_STATE, PACKED,
                )  # fmt: skip
                z += k2 * v2
            if W > 3:
                v3 = _seen(
                    x3, since, document, state_ptr, state_n, state_d, state_c, d, is_channel,
                    3, W, HAS_STATE, PACKED,
                )  # fmt: skip
                z += k3 * v3
            y = z
            if SILU:
                gate = tl.sigmoid(z)
                y = z * gate
            if UNIT:
                scale = tl.rsqrt(tl.sum(y * y, axis=1) + EPS)[:, None]
                y = y * scale
                dz = scale * (dz - y * tl.sum(dz * y, axis=1)[:, None])
            if SILU:
                dz = dz * gate * (1.0 + z * (1.0 - gate))

            # Tokens behind the run are counted by another run.
            own = tl.where(i < RUN, dz, 0.0)
            dk0 += own * x0
            dbias += own
            if W > 1:
                dk1 += own * v1
            if W > 2:
                dk2 += own * v2
            if W > 3:
                dk3 += own * v3

            done = k0 * dz
            if W > 1:
                newest = done
                done = g1 + k1 * _kept(dz, since, 1, PACKED)
            if W > 2:
                second = done
                done = g2 + k2 * _kept(dz, since, 2, PACKED)
            if W > 3:
                third = done
                done = g3 + k3 * _kept(dz, since, 3, PACKED)
                g3 = third
                x3 = x2
            if W > 2:
                g2 = second
                x2 = x1
            if W > 1:
                g1 = newest
                x1 = x0
            to = t - (W - 1)
            at = dx_ptr + to[:, None] * dx_row + d[None, :]
            is_own = ((to >= first) & (to < T))[:, None] & is_channel[None, :]
            tl.store(at, done.to(dx_ptr.dtype.element_ty), mask=is_own)

        tl.store(sums_ptr + (W - 1) * sums_tap, tl.sum(dk0, axis=0), mask=is_channel)
        if W > 1:
            tl.store(sums_ptr + (W - 2) * sums_tap, tl.sum(dk1, axis=0), mask=is_channel)
        if W > 2:
            tl.store(sums_ptr + (W - 3) * sums_tap, tl.sum(dk2, axis=0), mask=is_channel)
        if W > 3:
            tl.store(sums_ptr + (W - 4) * sums_tap, tl.sum(dk3, axis=0), mask=is_channel)
        if HAS_BIAS:
            tl.store(sums_ptr + W * sums_tap, tl.sum(dbias, axis=0), mask=is_channel)

    @triton.jit
    def _kept(dz, since, J: tl.constexpr, PACKED: tl.constexpr):
        """The part of dz that belongs to the input J tokens ago: none across a border."""
        if PACKED:
            dz = tl.where((since >= J)[:, None], dz, 0.0)
        return dz
