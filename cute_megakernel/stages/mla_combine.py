"""The parts of mla_decode put together, as the input of the mla_expand_value row that follows.

Every SM does it for the heads that its tiles of that row read: up to 16 parts by itself, more from MLA_REDUCE.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_megakernel import ptx
from cute_megakernel.core import Fields, Sm, poll_pair, region, sync, word_address
from cute_megakernel.shape import CONSUMER_WARPS, CONSUMERS, DIRECT_PARTS, SUM_COLUMNS, SUM_PARTS
from cute_megakernel.stages.mla_cache import AREA, Parts, few, sum_parts, summed

DIRECT_SLICES = CONSUMER_WARPS * SUM_PARTS // DIRECT_PARTS  # all columns of a head, by all warps


@cute.jit
def mla_combine(sm: Sm, f: Fields, low: Int32, high: Int32):
    """x <- o_latent of the heads that tiles [low, high) of the following row read, `group_pad` columns a head."""
    if low < high:
        first, end, turn = (low * f["magic"]) >> 20, (((high - 1) * f["magic"]) >> 20) + 1, Int32(0)
        for r in range(f["r0"], f["r1"]):
            parts, x = Parts(sm, r), region(sm, "x") + (r - f["r0"]) * f["x_pitch"]
            if few(parts):
                head = first
                while head < end:
                    area, at = region(sm, "sums") + turn * (2 * AREA), x + (head - first) * f["group_pad"] * 2
                    some = ptx.smaller(end - head, Int32(together(sm)))
                    if some == 1:
                        _heads(sm, f, r, head, 1, parts, at, area)
                    elif cutlass.const_expr(together(sm) == 2):
                        _heads(sm, f, r, head, 2, parts, at, area)
                    head, turn = head + some, turn ^ 1
            else:
                _load_heads(sm, f, r, first, end, x)


def together(sm: Sm) -> int:
    """Heads at a time: two, and one wait for both, where they are wide enough to be worth the registers."""
    return 2 if sm.shape.kv_lora_rank > 4 * SUM_COLUMNS else 1


@cute.jit
def _heads(sm: Sm, f: Fields, r: Int32, head: Int32, heads: cutlass.Constexpr, parts: Parts, x: Int32, area: Int32):
    """One head or two, from their parts."""
    sum_parts(sm, f, r, head, heads, Int32(0), DIRECT_SLICES, parts, area)
    sync(sm)  # the other areas are used next, and these only behind another one
    for h in cutlass.range_constexpr(heads):
        _keep_head(sm, f, r, head + h, x + h * f["group_pad"] * 2, area + h * AREA)


@cute.jit
def _keep_head(sm: Sm, f: Fields, r: Int32, head: Int32, x: Int32, area: Int32):
    """A head's columns, and zeros up to `group_pad`: two a thread."""
    pair, L = sm.thread, sm.shape.kv_lora_rank
    if pair < f["group_pad"] >> 1:
        word = ptx.select(pair < L // 2, ptx.pack_bf16(*summed(sm, area, DIRECT_SLICES)), Int32(0))
        ptx.st_shared_b32(x + pair * 4, word)
        if (f["dst"] >= 0) & (pair < L // 2):
            ptx.st_word(word_address(sm, f["dst"] + r * f["dst_pitch"] + head * (L // 2) + pair), word, sm.tag)


@cute.jit
def _load_heads(sm: Sm, f: Fields, r: Int32, first: Int32, end: Int32, x: Int32):
    """Heads that are there as words, several at a time: four columns a thread."""
    L = sm.shape.kv_lora_rank
    span = 1 << ((-(-L // 64) * 16) - 1).bit_length()  # threads of a head
    head, quad = first + (sm.thread >> span.bit_length() - 1), sm.thread & (span - 1)
    while head < end:
        words = cute.make_rmem_tensor(2, Int32)
        words[0], words[1] = Int32(0), Int32(0)
        if quad < L // 4:
            at = f["o"] + r * f["o_pitch"] + head * (L // 2) + 2 * quad
            words[0], words[1] = poll_pair(sm, f.number, at, sm.tag)
        if quad < f["group_pad"] >> 2:
            ptx.st_shared_v2_b32(x + (head - first) * f["group_pad"] * 2 + quad * 8, words[0], words[1])
        head += CONSUMERS // span
