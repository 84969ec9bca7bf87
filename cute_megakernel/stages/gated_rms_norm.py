"""gated_rms_norm of one head: its outputs from shared memory, the result to all SMs.

    y = o / sqrt(mean(o^2) + eps) * weight * sigmoid(gate)

Source   DESIGN.md section 5
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_megakernel import ptx
from cute_megakernel.core import Fields, Sm, float_of, rms_scale, warp_sum, word_address


@cute.jit
def gated_rms_norm(sm: Sm, f: Fields, r: Int32, h: Int32, o: Int32, gate: Int32, norm: Int32):
    """By one warp, four columns a lane; `o`, `gate` (its sigmoid) and `norm` are places in shared memory."""
    K = sm.shape.kda_head_dim
    inside = sm.lane < K // 4
    at = ptx.select(inside, sm.lane * 16, Int32(0))
    outputs, gates = ptx.ld_shared_v4_f32(o + at), ptx.ld_shared_v4_f32(gate + at)
    norms = ptx.ld_shared_v4_f32(norm + at)
    dst, eps = f["dst"] + r * f["dst_pitch"] + h * (K // 2) + 2 * sm.lane, float_of(f, "eps")
    squares = Float32(0.0)
    for i in cutlass.range_constexpr(4):
        squares = squares + outputs[i] * outputs[i]
    squares = warp_sum(ptx.select_f32(inside, squares, Float32(0.0)))
    scale = rms_scale(squares, Float32(K), eps)
    y = []
    for i in cutlass.range_constexpr(4):
        y.append(outputs[i] * scale * norms[i] * gates[i])
    if inside:
        ptx.st_word_pair(word_address(sm, dst), ptx.pack_bf16(y[0], y[1]), ptx.pack_bf16(y[2], y[3]), sm.tag)
