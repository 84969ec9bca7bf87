"""causal_conv1d of one head: its q, k and v channels, into shared memory; and what the rows behind it will need.

    z[c] = silu(sum over taps of window[c] * weight[c])       the window moves on by one input, which it keeps raw

The gates' and the norm's own inputs are fetched by the threads that have no channel, while the others wait for theirs.

Source   DESIGN.md section 5
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_megakernel import ptx
from cute_megakernel.core import Fields, Sm, address_of, poll_word, sigmoid
from cute_megakernel.shape import CONSUMERS
from cute_megakernel.stages.kda_head import half_of, is_new, local, number, put, slot_of_row

TAPS = 4


@cute.jit
def causal_conv1d(sm: Sm, f: Fields, item: Int32):
    """silu(sum of taps) of 3 * head_dim channels; the window moves on by one input, which it keeps raw."""
    K, H = sm.shape.kda_head_dim, sm.shape.kda_heads
    r, h = item // H, item % H
    slot = slot_of_row(sm, f, r)
    old = (slot >= 0) & (is_new(sm, r) == 0)
    turns = -(-4 * K // CONSUMERS)
    windows = cute.make_rmem_tensor(turns * (TAPS - 1), Int32)
    taps = cute.make_rmem_tensor(turns * TAPS, Float32)
    for j in cutlass.range_constexpr(turns):
        i = sm.thread + j * CONSUMERS
        if i < 3 * K:
            _load_channel(sm, f, _channel(sm, h, i), slot, old, windows, taps, j)
        elif i < 4 * K:
            _fetch(sm, f, r, h, i - 3 * K)
    for j in cutlass.range_constexpr(turns):
        i = sm.thread + j * CONSUMERS
        if i < 3 * K:
            channel = _channel(sm, h, i)
            word = poll_word(sm, f.number, f["src"] + r * f["src_pitch"] + channel // 2, sm.tag)
            z = _convolve(sm, f, channel, slot, ptx.shift_half(word, channel), windows, taps, j)
            ptx.st_shared_f32(local(sm, "q") + i * 4, z)
            put(sm, f, "dst", "dst_pitch", r, channel, z)


def _channel(sm: Sm, h: Int32, i: Int32) -> Int32:
    """Channel i of the head's q, k and v among those of all heads."""
    K, H = sm.shape.kda_head_dim, sm.shape.kda_heads
    return i // K * (H * K) + h * K + i % K


def _window(sm: Sm, f: Fields, channel: Int32, slot: Int32, step: int) -> Int64:
    """Address of a channel's input `step` of the window."""
    start = address_of(f, "pool") + Int64(slot) * address_of(f, "pool_stride")
    return start + Int64(channel + step * (3 * sm.shape.kda_heads * sm.shape.kda_head_dim)) * 2


@cute.jit
def _load_channel(
    sm: Sm, f: Fields, channel: Int32, slot: Int32, old, windows: cute.Tensor, taps: cute.Tensor, j: cutlass.Constexpr
):
    for i in cutlass.range_constexpr(TAPS - 1):
        windows[j * (TAPS - 1) + i] = Int32(0)
    if old:
        for i in cutlass.range_constexpr(TAPS - 1):
            windows[j * (TAPS - 1) + i] = ptx.ld_fresh_u16(_window(sm, f, channel, slot, i))
    weights = ptx.ld_global_v4_f32(address_of(f, "weight") + Int64(channel) * 16)
    for i in cutlass.range_constexpr(TAPS):
        taps[j * TAPS + i] = weights[i]


@cute.jit
def _convolve(
    sm: Sm, f: Fields, channel: Int32, slot: Int32, new: Int32, windows: cute.Tensor, taps: cute.Tensor,
    j: cutlass.Constexpr,
) -> Float32:  # fmt: skip
    """One channel, oldest input first; padding gives 0 and leaves the window alone."""
    total = Float32(0.0)
    for i in cutlass.range_constexpr(TAPS - 1):
        total = total + ptx.low_bf16(windows[j * (TAPS - 1) + i]) * taps[j * TAPS + i]
    total = total + ptx.low_bf16(new) * taps[j * TAPS + TAPS - 1]
    if slot >= 0:
        for i in cutlass.range_constexpr(TAPS - 2):
            ptx.st_global_u16(_window(sm, f, channel, slot, i), windows[j * (TAPS - 1) + i + 1])
        ptx.st_global_u16(_window(sm, f, channel, slot, TAPS - 2), new)
    return ptx.select_f32(slot >= 0, total * sigmoid(total), Float32(0.0))


@cute.jit
def _fetch(sm: Sm, f: Fields, r: Int32, h: Int32, k: Int32):
    """What the rows behind this one need from memory, on its way while the convolution waits for its own."""
    K = sm.shape.kda_head_dim
    dt = ptx.ld_global_f32(address_of(f, "weight2") + Int64(h * K + k) * 4)
    norm = ptx.ld_global_f32(address_of(f, "norm") + Int64(k) * 4)
    if k == 0:
        ptx.st_shared_f32(number(sm, 1), ptx.ld_global_f32(address_of(f, "A_log") + Int64(h) * 4))
        word = poll_word(sm, f.number, f["beta"] + r * f["beta_pitch"] + h // 2, sm.tag)
        ptx.st_shared_f32(number(sm, 0), half_of(word, h))
    ptx.st_shared_f32(local(sm, "dt_bias") + k * 4, dt)
    ptx.st_shared_f32(local(sm, "norm") + k * 4, norm)
    if f["gate"] >= 0:
        word = poll_word(sm, f.number, f["gate"] + r * f["gate_pitch"] + (h * K + k) // 2, sm.tag)
        ptx.st_shared_f32(local(sm, "gate") + k * 4, half_of(word, k))
