"""argmax over the vocabulary: each SM keeps the best of its logits, one SM picks among those.

    index = the lowest with the largest logit; NaN never wins; a row without a number gives index 0 and -inf

Source   DESIGN.md section 5
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_megakernel import ptx
from cute_megakernel.core import Fields, Sm, poll_pair, region, sync, word_address
from cute_megakernel.shape import CONSUMERS

NO_INDEX = 0x7FFFFFFF


@cute.jit
def better(best: Float32, best_at: Int32, value: Float32, index: Int32):
    """The larger of two, the lower index where they are equal."""
    if (value > best) | ((value == best) & (index < best_at)):
        best, best_at = value, index
    return best, best_at


@cute.jit
def publish_best(sm: Sm, f: Fields, low: Int32, best: Float32, best_at: Int32):
    """The best of each batch row over the threads that finish its outputs -> two words.

    They are kept by SM, or by tile where there are fewer tiles than SMs.
    """
    rows = sm.shape.rows
    scratch = region(sm, "sums")
    sync(sm)
    ptx.st_shared_v2_b32(scratch + sm.thread * 8, ptx.float_bits(best), best_at)
    sync(sm)
    if sm.thread < rows:
        best, best_at = Float32(float("-inf")), Int32(NO_INDEX)
        for i in range(2 * f["group_tiles"]):
            owner = (i // 2) * 2 * rows + 2 * sm.thread + i % 2
            bits, index = ptx.ld_shared_v2_b32(scratch + owner * 8)
            best, best_at = better(best, best_at, ptx.bits_float(bits), index)
        at = f["part"] + (ptx.select(f["total"] < sm.shape.sms, low, sm.block) * rows + sm.thread) * 2
        ptx.st_word_pair(word_address(sm, at), ptx.float_bits(best), best_at, sm.tag)
    sync(sm)


@cute.jit
def argmax(sm: Sm, f: Fields):
    """The winner of each batch row among the SMs, to `tokens` int64 and `values` float32."""
    rows = sm.shape.rows
    if sm.warp < rows:
        best, best_at = Float32(float("-inf")), Int32(NO_INDEX)
        other = sm.lane
        while other < f["total"]:
            bits, index = poll_pair(sm, f.number, f["part"] + (other * rows + sm.warp) * 2, sm.tag)
            best, best_at = better(best, best_at, ptx.bits_float(bits), index)
            other += 32
        for step in cutlass.range_constexpr(5):
            value = ptx.shfl_xor(best, 16 >> step)
            index = ptx.float_bits(ptx.shfl_xor(ptx.bits_float(best_at), 16 >> step))
            best, best_at = better(best, best_at, value, index)
        if best_at == NO_INDEX:
            best_at = Int32(0)
        if sm.lane == 0:
            token = Int64(best_at) + Int64(f["vocab_start"])
            ptx.st_global_b64(sm.batch["next_tokens"] + Int64(sm.warp) * 8, token)
            ptx.st_global_f32(sm.batch["next_values"] + Int64(sm.warp) * 4, best)


assert CONSUMERS >= 256
