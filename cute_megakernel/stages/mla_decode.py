"""mla_decode in parts: attention of 16 heads over one part of a sequence, scores on the tensor cores.

Source   DESIGN.md section 5; the absorbed form of DeepSeek-V2 (arXiv 2405.04434), without rotary embedding
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_megakernel import ptx
from cute_megakernel.core import (
    LOG2E,
    POLLS_BETWEEN_LOOKS,
    Fields,
    Sm,
    float_of,
    give_up,
    poll_word,
    region,
    sync,
    warp_max,
    warp_sum,
    word_address,
)
from cute_megakernel.shape import CONSUMER_WARPS, CONSUMERS, DECODE_TOKENS, MAX_SPLITS
from cute_megakernel.stages.mla_cache import NO_SCORE, row_address, seq_len, split

HEADS = 16  # of one unit
WARP_HEADS = HEADS // CONSUMER_WARPS
VALUE_TOKENS = 16


@cute.jit
def mla_decode(sm: Sm, f: Fields):
    """This SM's units: (part, batch row, group of 16 heads), counted with the group fastest."""
    groups, rows = f["groups"], f["r1"] - f["r0"]
    unit = sm.block
    while unit < MAX_SPLITS * rows * groups:
        part, rest = unit // (rows * groups), unit % (rows * groups)
        r, head = rest // groups + f["r0"], (rest % groups) * HEADS
        length = seq_len(sm, r)
        tokens, parts = split(length)
        if part < parts:
            start = part * tokens
            end = ptx.select(start + tokens < length, start + tokens, length)
            _attend(sm, f, r, head, part, start, end)
        unit += sm.shape.sms


@cute.jit
def _attend(sm: Sm, f: Fields, r: Int32, head: Int32, part: Int32, start: Int32, end: Int32):
    L = sm.shape.kv_lora_rank
    columns = CONSUMERS  # two a thread, for half the heads
    steps = -(-L // columns)
    half = HEADS // 2
    _load_query(sm, f, r, head)
    poll_word(sm, f.number, f["flag"] + r, sm.tag)
    ptx.fence_gpu()
    sync(sm)
    acc = cute.make_rmem_tensor(2 * half * steps, Float32)
    for i in cutlass.range_constexpr(2 * half * steps):
        acc[i] = Float32(0.0)
    tops = cute.make_rmem_tensor(WARP_HEADS, Float32)
    totals = cute.make_rmem_tensor(WARP_HEADS, Float32)
    for i in cutlass.range_constexpr(WARP_HEADS):
        tops[i], totals[i] = Float32(NO_SCORE), Float32(0.0)
    first = start
    while first < end:
        count = ptx.select(end - first < DECODE_TOKENS, end - first, Int32(DECODE_TOKENS))
        _row_addresses(sm, f, r, first, count)
        sync(sm)
        _scores(sm, count)
        sync(sm)
        for i in cutlass.range_constexpr(WARP_HEADS):
            head_of_warp = sm.warp + i * CONSUMER_WARPS
            tops[i], totals[i] = _softmax(sm, head_of_warp, count, tops[i], totals[i], float_of(f, "scale"))
        sync(sm)
        _values(sm, count, acc)
        sync(sm)
        first += DECODE_TOKENS
    _publish(sm, f, r, head, part, acc, tops, totals)
    sync(sm)


def query_pitch(sm: Sm) -> int:
    return 2 * (-(-(sm.shape.kv_lora_rank + sm.shape.qk_rope_dim) // 32) * 32) + 16


def probability(sm: Sm, head: Int32, token: Int32) -> Int32:
    return region(sm, "sums") + (head * DECODE_TOKENS + token) * 4


@cute.jit
def _load_query(sm: Sm, f: Fields, r: Int32, head: Int32):
    """[absorbed query | unrotated dims] of 16 heads, zeros where there are fewer, to shared memory."""
    L, P, nope = sm.shape.kv_lora_rank, sm.shape.qk_rope_dim, sm.shape.qk_nope_dim
    heads = ptx.select(sm.shape.mla_heads - head < HEADS, sm.shape.mla_heads - head, Int32(HEADS))
    _zero_query(sm)
    sync(sm)
    _query_part(sm, f, f["src"] + r * f["src_pitch"] + head * L // 2, L // 2, L // 2, heads, 0)
    rope = f["rope"] + r * f["rope_pitch"] + (head * (nope + P) + nope) // 2
    _query_part(sm, f, rope, (nope + P) // 2, P // 2, heads, L // 2)


@cute.jit
def _zero_query(sm: Sm):
    i = sm.thread
    while i < HEADS * query_pitch(sm) // 16:
        at = region(sm, "x") + i * 16
        ptx.st_shared_v2_b32(at, Int32(0), Int32(0))
        ptx.st_shared_v2_b32(at + 8, Int32(0), Int32(0))
        i += CONSUMERS


@cute.jit
def _query_part(
    sm: Sm, f: Fields, start: Int32, pitch: cutlass.Constexpr, pairs: cutlass.Constexpr, heads: Int32,
    column: cutlass.Constexpr,
):  # fmt: skip
    """`pairs` words of each head, `pitch` words apart, to pair `column` of its row; eight loads on their way."""
    first = Int32(0)
    while first < heads * pairs:
        payloads, tags = cute.make_rmem_tensor(8, Int32), cute.make_rmem_tensor(8, Int32)
        ready, polls = Int32(0), Int32(0)
        while ready == 0:
            ready = Int32(1)
            for j in cutlass.range_constexpr(8):
                i = first + sm.thread + j * CONSUMERS
                i = ptx.select(i < heads * pairs, i, Int32(0))
                payloads[j], tags[j] = ptx.ld_word(word_address(sm, start + i // pairs * pitch + i % pairs))
            for j in cutlass.range_constexpr(8):
                if tags[j] != sm.tag:
                    ready = Int32(0)
            polls += 1
            if polls % POLLS_BETWEEN_LOOKS == 0:
                if give_up(sm, f.number) != 0:
                    ready = Int32(1)
        for j in cutlass.range_constexpr(8):
            i = first + sm.thread + j * CONSUMERS
            if i < heads * pairs:
                at = region(sm, "x") + i // pairs * query_pitch(sm) + (column + i % pairs) * 4
                ptx.st_shared_b32(at, payloads[j])
        first += 8 * CONSUMERS


def row_of_token(sm: Sm, token: Int32) -> Int64:
    """Address of a cached row of the tokens at hand."""
    return ptx.ld_shared_b64(region(sm, "scratch") + 256 + token * 8)


@cute.jit
def _row_addresses(sm: Sm, f: Fields, r: Int32, first: Int32, count: Int32):
    """Addresses of the cached rows, by token; past the last one, the first again."""
    if sm.thread < DECODE_TOKENS:
        token = ptx.select(sm.thread < count, sm.thread, Int32(0))
        ptx.st_shared_b64(region(sm, "scratch") + 256 + sm.thread * 8, row_address(sm, f, r, first + token))


@cute.jit
def _scores(sm: Sm, count: Int32):
    """Products of 16 queries and 8 cached rows a warp, on the tensor cores."""
    width = sm.shape.kv_lora_rank + sm.shape.qk_rope_dim
    blocks = -(-width // 32)
    if sm.warp * 8 < count:
        row = row_of_token(sm, sm.warp * 8 + sm.group) + Int64(sm.quad) * 16
        c = (Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0))
        d = (Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0))
        query = region(sm, "x") + sm.group * query_pitch(sm) + sm.quad * 16
        for first in cutlass.range_constexpr(0, blocks, 9):
            some = min(9, blocks - first)
            cached = cute.make_rmem_tensor(36, Int32)
            for i in cutlass.range_constexpr(4 * some):
                cached[i] = Int32(0)
            for i in cutlass.range_constexpr(some):
                if 32 * (first + i) + 8 * sm.quad < width:
                    w = ptx.ld_fresh_v4_b32(row + 64 * (first + i))
                    for j in cutlass.range_constexpr(4):
                        cached[4 * i + j] = w[j]
            for i in cutlass.range_constexpr(some):
                lo = ptx.ld_shared_v4_b32(query + 64 * (first + i))
                hi = ptx.ld_shared_v4_b32(query + 8 * query_pitch(sm) + 64 * (first + i))
                c = ptx.mma_bf16(c, (lo[0], hi[0], lo[1], hi[1]), (cached[4 * i], cached[4 * i + 1]))
                d = ptx.mma_bf16(d, (lo[2], hi[2], lo[3], hi[3]), (cached[4 * i + 2], cached[4 * i + 3]))
        at = probability(sm, sm.group, sm.warp * 8 + 2 * sm.quad)
        ptx.st_shared_v2_f32(at, c[0] + d[0], c[1] + d[1])
        ptx.st_shared_v2_f32(at + 8 * DECODE_TOKENS * 4, c[2] + d[2], c[3] + d[3])


@cute.jit
def _softmax(sm: Sm, head: Int32, count: Int32, top: Float32, total: Float32, scale: Float32):
    """One head: scores become exp(score - top), and what came before is to be scaled by `scratch[head]`."""
    per_lane = DECODE_TOKENS // 32
    scores = cute.make_rmem_tensor(per_lane, Float32)
    largest = top
    for j in cutlass.range_constexpr(per_lane):
        token = sm.lane + 32 * j
        score = ptx.ld_shared_f32(probability(sm, head, token)) * scale
        scores[j] = ptx.select_f32(token < count, score, Float32(NO_SCORE))
        largest = ptx.fmax_nan(largest, scores[j])
    largest = warp_max(largest)
    here = Float32(0.0)
    for j in cutlass.range_constexpr(per_lane):
        token = sm.lane + 32 * j
        p = ptx.exp2_approx((scores[j] - largest) * LOG2E)
        p = ptx.select_f32(token < count, p, Float32(0.0))
        ptx.st_shared_f32(probability(sm, head, token), p)
        here = here + p
    old = ptx.exp2_approx((top - largest) * LOG2E)
    if sm.lane == 0:
        ptx.st_shared_f32(region(sm, "scratch") + head * 4, old)
    return largest, total * old + warp_sum(here)


@cute.jit
def _values(sm: Sm, count: Int32, acc: cute.Tensor):
    """acc = acc * old + sum over tokens of p * latent; two columns and 8 heads a thread, 16 loads on their way."""
    L = sm.shape.kv_lora_rank
    steps = -(-L // CONSUMERS)
    half = HEADS // 2
    side, pair = sm.thread // (CONSUMERS // 2), sm.thread % (CONSUMERS // 2)
    for h in cutlass.range_constexpr(half):
        old = ptx.ld_shared_f32(region(sm, "scratch") + (side * half + h) * 4)
        for s in cutlass.range_constexpr(steps):
            at = 2 * (s * half + h)
            acc[at], acc[at + 1] = acc[at] * old, acc[at + 1] * old
    for s in cutlass.range_constexpr(steps):
        column = 2 * pair + s * CONSUMERS
        if column < L:
            for token in range(0, count, VALUE_TOKENS):
                words = cute.make_rmem_tensor(VALUE_TOKENS, Int32)
                for t in cutlass.range_constexpr(VALUE_TOKENS):
                    words[t] = ptx.ld_fresh_b32(row_of_token(sm, token + t) + Int64(column) * 2)
                for h in cutlass.range_constexpr(half):
                    _add_tokens(sm, side * half + h, token, words, acc, 2 * (s * half + h))


@cute.jit
def _add_tokens(sm: Sm, head: Int32, token: Int32, words: cute.Tensor, acc: cute.Tensor, at: cutlass.Constexpr):
    """One head. Past the last token the first is repeated with p = 0: it is of the same sequence, NaN or not."""
    for t in cutlass.range_constexpr(0, VALUE_TOKENS, 4):
        p = ptx.ld_shared_v4_f32(probability(sm, head, token + t))
        for i in cutlass.range_constexpr(4):
            acc[at] = acc[at] + p[i] * ptx.low_bf16(words[t + i])
            acc[at + 1] = acc[at + 1] + p[i] * ptx.high_bf16(words[t + i])


@cute.jit
def _publish(sm: Sm, f: Fields, r: Int32, head: Int32, part: Int32, acc: cute.Tensor, tops, totals):
    L, heads = sm.shape.kv_lora_rank, sm.shape.mla_heads
    columns = CONSUMERS
    steps = -(-L // columns)
    half = HEADS // 2
    tag = sm.tag + f["sub"]
    side, pair = sm.thread // (CONSUMERS // 2), sm.thread % (CONSUMERS // 2)
    for i in cutlass.range_constexpr(WARP_HEADS):
        which = head + sm.warp + i * CONSUMER_WARPS
        if (sm.lane == 0) & (which < heads):
            at = f["ml"] + ((r * heads + which) * MAX_SPLITS + part) * 2
            ptx.st_word_pair(word_address(sm, at), ptx.float_bits(tops[i]), ptx.float_bits(totals[i]), tag)
    for s in cutlass.range_constexpr(steps):
        column = 2 * pair + s * columns
        for h in cutlass.range_constexpr(half):
            which = head + side * half + h
            if (column < L) & (which < heads):
                at = f["part"] + ((r * heads + which) * MAX_SPLITS + part) * L + column
                i = 2 * (s * half + h)
                ptx.st_word_pair(word_address(sm, at), ptx.float_bits(acc[i]), ptx.float_bits(acc[i + 1]), tag)
