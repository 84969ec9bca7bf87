"""Scores of one bank row for every mix that will read it, as soon as the row exists: one unit a mix.

    score = rsqrt(mean(x^2) + eps) * sum(x * score_weight)       of attn_res_norm

Source   DESIGN.md section 5; the split of the softmax is that of an online softmax
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from cute_megakernel import ptx
from cute_megakernel.core import Fields, Sm, address_of, float_of, poll_quads, rms_scale, sum_two, word_address
from cute_megakernel.shape import CONSUMERS, MAX_BANK


@cute.jit
def bank_scores(sm: Sm, f: Fields, low, high):
    quads = -(-sm.shape.hidden_size // (4 * CONSUMERS))
    count = f["width"] // 4
    for unit in range(low, high):
        weights = ptx.ld_global_b64(address_of(f, "weight") + Int64(unit) * 8)
        for r in range(f["r0"], f["r1"]):
            pairs = cute.make_rmem_tensor(2 * quads, cutlass.Int32)
            poll_quads(sm, f.number, f["src"] + r * f["src_pitch"], count, quads, pairs)
            squares, dot = Float32(0.0), Float32(0.0)
            for j in cutlass.range_constexpr(quads):
                q = sm.thread + j * CONSUMERS
                if q < count:
                    w = ptx.ld_global_v4_f32(weights + Int64(q) * 16)
                    x = (
                        ptx.low_bf16(pairs[2 * j]), ptx.high_bf16(pairs[2 * j]),
                        ptx.low_bf16(pairs[2 * j + 1]), ptx.high_bf16(pairs[2 * j + 1]),
                    )  # fmt: skip
                    for i in cutlass.range_constexpr(4):
                        squares = squares + x[i] * x[i]
                        dot = dot + x[i] * w[i]
            squares, dot = sum_two(sm, squares, dot, 0)
            score = rms_scale(squares, f["width"], float_of(f, "eps")) * dot
            if sm.thread == 0:
                mixed = ptx.ld_table(address_of(f, "out") + Int64(unit) * 4)  # where the mix of this unit looks
                ptx.st_word(word_address(sm, mixed + r * MAX_BANK), ptx.float_bits(score), sm.tag)
            ptx.bar_sync(1, CONSUMERS)  # the scratch of sum_two is free again
