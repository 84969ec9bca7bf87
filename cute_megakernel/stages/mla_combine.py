"""The parts of mla_decode put together, as the input of the mla_expand_value row that follows.

    o = sum over parts of exp(largest_i - largest) * part_i / sum over parts of exp(largest_i - largest) * sum_i

Every SM does it for the heads that its tiles of that row read.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_megakernel import ptx
from cute_megakernel.core import (
    LOG2E,
    POLLS_BETWEEN_LOOKS,
    Fields,
    Sm,
    give_up,
    poll_pair,
    region,
    warp_max,
    warp_sum,
    word_address,
)
from cute_megakernel.shape import CONSUMERS, MAX_SPLITS
from cute_megakernel.stages.mla_cache import NO_SCORE, seq_len, split


@cute.jit
def mla_combine(sm: Sm, f: Fields, low: Int32, high: Int32):
    """x <- o_latent of the heads that tiles [low, high) of the following row read, `group_pad` columns a head."""
    if low < high:
        first, end = low // f["groups"], (high - 1) // f["groups"] + 1
        for r in range(f["r0"], f["r1"]):
            _, parts = split(seq_len(sm, r))
            for head in range(first, end):
                _combine_head(sm, f, r, head, head - first, parts)


@cute.jit
def _combine_head(sm: Sm, f: Fields, r: Int32, head: Int32, place: Int32, parts: Int32):
    L, heads = sm.shape.kv_lora_rank, sm.shape.mla_heads
    tag = sm.tag + f["sub"]
    x = region(sm, "x") + (r - f["r0"]) * f["x_pitch"] + place * f["group_pad"] * 2
    top, total = Float32(NO_SCORE), Float32(0.0)
    if sm.lane < parts:
        at = f["ml"] + ((r * heads + head) * MAX_SPLITS + sm.lane) * 2
        bits, sums = poll_pair(sm, f.number, at, tag)
        top, total = ptx.bits_float(bits), ptx.bits_float(sums)
    largest = warp_max(top)
    weight = ptx.exp2_approx((top - largest) * LOG2E)
    weight = ptx.select_f32(sm.lane < parts, weight, Float32(0.0))
    denominator = warp_sum(weight * total)
    weight = ptx.select_f32(sm.lane < parts, ptx.div_full(weight, denominator), Float32(0.0))
    shares = region(sm, "sums") + sm.warp * 128
    ptx.st_shared_f32(shares + sm.lane * 4, weight)
    ptx.sync_warp()
    pair = sm.thread
    while pair < f["group_pad"] // 2:
        a, b = Float32(0.0), Float32(0.0)
        if pair < L // 2:
            a, b = _sum_parts(sm, f, f["part"] + (r * heads + head) * MAX_SPLITS * L + 2 * pair, L, parts, tag, shares)
        word = ptx.pack_bf16(a, b)
        ptx.st_shared_b32(x + pair * 4, word)
        if (f["dst"] >= 0) & (pair < L // 2):
            ptx.st_word(word_address(sm, f["dst"] + r * f["dst_pitch"] + (head * L) // 2 + pair), word, sm.tag)
        pair += CONSUMERS
    ptx.sync_warp()


@cute.jit
def _sum_parts(sm: Sm, f: Fields, at: Int32, L: cutlass.Constexpr, parts: Int32, tag: Int32, shares: Int32):
    """Two columns over all parts, eight loads on their way at a time; `shares` holds the weight of each part."""
    a, b = Float32(0.0), Float32(0.0)
    for first in range(0, parts, 8):
        bits = cute.make_rmem_tensor(16, Int32)
        tags = cute.make_rmem_tensor(16, Int32)
        ready, polls = Int32(0), Int32(0)
        while ready == 0:
            ready = Int32(1)
            for i in cutlass.range_constexpr(8):
                part = ptx.select(first + i < parts, first + i, first)
                address = word_address(sm, at + part * L)
                bits[2 * i], tags[2 * i], bits[2 * i + 1], tags[2 * i + 1] = ptx.ld_word_pair(address)
            for i in cutlass.range_constexpr(16):
                if tags[i] != tag:
                    ready = Int32(0)
            polls += 1
            if polls % POLLS_BETWEEN_LOOKS == 0:
                if give_up(sm, f.number) != 0:
                    ready = Int32(1)
        for i in cutlass.range_constexpr(8):
            if first + i < parts:
                share = ptx.ld_shared_f32(shares + (first + i) * 4)
                a, b = a + share * ptx.bits_float(bits[2 * i]), b + share * ptx.bits_float(bits[2 * i + 1])
    return a, b
