"""causal_conv1d of one channel of a head.

    z[c] = silu(sum over taps of window[c] * weight[c])       the window moves on by one input, which it keeps raw

Source   DESIGN.md section 5
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_megakernel import ptx
from cute_megakernel.core import Fields, Sm, address_of, sigmoid

TAPS = 4


def channel_of(sm: Sm, h: Int32, i: Int32) -> Int32:
    """Channel i of the head's q, k and v among those of all heads."""
    K, H = sm.shape.kda_head_dim, sm.shape.kda_heads
    return i // K * (H * K) + h * K + i % K


def window_at(sm: Sm, f: Fields, channel: Int32, slot: Int32) -> Int64:
    """Address of a channel's oldest input; the next is `step_bytes` on."""
    return address_of(f, "window") + Int64(slot) * address_of(f, "window_stride") + Int64(channel) * 2


def step_bytes(sm: Sm) -> int:
    return 6 * sm.shape.kda_heads * sm.shape.kda_head_dim


@cute.jit
def load_channel(sm: Sm, f: Fields, channel: Int32, slot: Int32, old, windows: cute.Tensor, taps: cute.Tensor):
    """Window, unless it starts from zeros, and taps; on their way when this returns."""
    if old:
        window = window_at(sm, f, channel, slot)
        for i in cutlass.range_constexpr(TAPS - 1):
            windows[i] = ptx.ld_fresh_u16(window + i * step_bytes(sm))
    weights = ptx.ld_global_v4_f32(address_of(f, "weight") + Int64(channel) * 16)
    for i in cutlass.range_constexpr(TAPS):
        taps[i] = weights[i]


@cute.jit
def convolve(windows: cute.Tensor, new: Int32, taps: cute.Tensor) -> Float32:
    """Oldest input first."""
    total = Float32(0.0)
    for i in cutlass.range_constexpr(TAPS - 1):
        total = total + ptx.low_bf16(windows[i]) * taps[i]
    total = total + ptx.low_bf16(new) * taps[TAPS - 1]
    return total * sigmoid(total)


@cute.jit
def store_window(sm: Sm, f: Fields, channel: Int32, slot: Int32, windows: cute.Tensor, new: Int32):
    window = window_at(sm, f, channel, slot)
    for i in cutlass.range_constexpr(TAPS - 2):
        ptx.st_global_u16(window + i * step_bytes(sm), windows[i + 1])
    ptx.st_global_u16(window + (TAPS - 2) * step_bytes(sm), new)
