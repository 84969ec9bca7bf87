"""gated_rms_norm of one head: its outputs from shared memory, the result to all SMs.

    y = o / sqrt(mean(o^2) + eps) * weight * sigmoid(gate)

Source   DESIGN.md section 5
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_megakernel import ptx
from cute_megakernel.core import Fields, Sm, float_of, rms_scale, sigmoid, warp_sum, word_address
from cute_megakernel.stages.kda_head import local


@cute.jit
def gated_rms_norm(sm: Sm, f: Fields, item: Int32):
    """RMSNorm of the head's outputs times sigmoid(gate); each of the first warps sums the squares for itself."""
    K, H = sm.shape.kda_head_dim, sm.shape.kda_heads
    r, h = item // H, item % H
    if sm.thread < 32 * (-(-K // 64)):
        squares = Float32(0.0)
        for i in cutlass.range_constexpr(K // 32):
            o = ptx.ld_shared_f32(local(sm, "o") + (sm.lane + 32 * i) * 4)
            squares = squares + o * o
        scale = rms_scale(warp_sum(squares), Float32(K), float_of(f, "eps"))
        if sm.thread < K // 2:
            column = 2 * sm.thread
            y = cute.make_rmem_tensor(2, Float32)
            for i in cutlass.range_constexpr(2):
                at = (column + i) * 4
                normed = ptx.ld_shared_f32(local(sm, "o") + at) * scale * ptx.ld_shared_f32(local(sm, "norm") + at)
                y[i] = normed * sigmoid(ptx.ld_shared_f32(local(sm, "gate") + at))
            at = f["dst"] + r * f["dst_pitch"] + (h * K + column) // 2
            ptx.st_word(word_address(sm, at), ptx.pack_bf16(y[0], y[1]), sm.tag)
