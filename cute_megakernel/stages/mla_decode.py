"""mla_decode in parts: attention of 16 heads over one part of a sequence, all products on the tensor cores.

The cached rows come through the ring, 16 tokens a slot; the newest one, which the pool does not have yet, is made from
the words of in_proj where it is needed. A turn is a few slots: four groups of warps have a part of the columns each for
their scores, one of the four warps of a group a slot; then each warp has a head for the softmax, and some columns of
the latent for the values. All warps read all slots of a turn, those to which the slots belong give them back.

Rounding   float32; a probability is the sum of three bfloat16 numbers; a turn's products are added up by themselves

Source   DESIGN.md section 5; the absorbed form of DeepSeek-V2 (arXiv 2405.04434), without rotary embedding
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_megakernel import ptx
from cute_megakernel.core import (
    LOG2E,
    Fields,
    Sm,
    first_own,
    float_of,
    region,
    release,
    ring_slot,
    sync,
    wait_full,
    warp_max,
    warp_sum,
    word_address,
)
from cute_megakernel.shape import CONSUMER_WARPS, GROUP_HEADS, SCORE_GROUPS, SCORES_PITCH, SLOT_TOKENS
from cute_megakernel.stages.mla_cache import (
    NO_SCORE,
    keep_vector,
    load_vector,
    make_latent,
    steps,
    unit_of,
    units,
)

ADDENDS = 3  # bfloat16 numbers that a probability is the sum of
ZEROS = (Float32(0.0),) * 4


@cute.jit
def mla_decode(sm: Sm, f: Fields, pos: Int32) -> Int32:
    """This SM's units. -> position in the ring behind them"""
    unit = sm.block
    while unit < units(sm.shape):
        r, head, part, start, end, newest = unit_of(sm, unit)
        if start < end:
            pos = _attend(sm, f, pos, r, head, part, end - start, newest)
        unit += sm.shape.sms
    return pos


@cute.jit
def _attend(sm: Sm, f: Fields, pos: Int32, r: Int32, head: Int32, part: Int32, count: Int32, newest: Int32) -> Int32:
    """`count` tokens, the last of them in `local` where it is the newest."""
    _load(sm, f, r, head, newest)
    pairs, cached = value_pairs(sm), count - newest
    acc = cute.make_rmem_tensor(8 * pairs, Float32)
    for i in cutlass.range_constexpr(8 * pairs):
        acc[i] = Float32(0.0)
    top, total = Float32(NO_SCORE), Float32(0.0)
    sync(sm)
    while count > 0:
        _scores(sm, pos, count, cached)
        sync(sm)
        top, total = _softmax(sm, ptx.smaller(count, Int32(turn_tokens(sm))), top, total, float_of(f, "scale"))
        sync(sm)
        _values(sm, pos, count, cached, acc)
        sync(sm)
        used = ptx.smaller((ptx.larger(cached, Int32(0)) + SLOT_TOKENS - 1) >> 4, Int32(sm.shape.turn_slots))
        own = first_own(sm, pos)
        if own < used:
            release(sm, pos + own)
        pos += used
        count, cached = count - turn_tokens(sm), cached - turn_tokens(sm)
    _publish(sm, f, r, head, part, acc, top, total)
    return pos


def turn_tokens(sm: Sm) -> int:
    return sm.shape.turn_slots * SLOT_TOKENS


def value_pairs(sm: Sm) -> int:
    """Columns of the latent that a warp has, in pairs of 8."""
    return -(-sm.shape.kv_lora_rank // (16 * CONSUMER_WARPS))


@cute.jit
def _load(sm: Sm, f: Fields, r: Int32, head: Int32, newest: Int32):
    """[absorbed query | unrotated dims] to shared memory, a head a warp, and by one warp the newest row of the cache.

    What there is for heads behind the last one makes scores and values that nobody reads.
    """
    L, P, nope = sm.shape.kv_lora_rank, sm.shape.qk_rope_dim, sm.shape.qk_nope_dim
    words = cute.make_rmem_tensor(2 * steps(sm) + 2, Int32)
    if (sm.warp == CONSUMER_WARPS - 1) & (newest != 0):
        make_latent(sm, f, r, words)
        keep_vector(sm, region(sm, "local"), words)
    own = head + sm.warp
    if own < sm.shape.mla_heads:
        latent = f["src"] + r * f["src_pitch"] + own * (L // 2)
        extra = f["rope"] + r * f["rope_pitch"] + own * ((nope + P) // 2) + nope // 2
        load_vector(sm, f.number, latent, extra, words)
        keep_vector(sm, region(sm, "x") + sm.warp * sm.shape.latent_pitch, words)


def scores_of(sm: Sm, group: Int32, head: Int32) -> Int32:
    """Scores of a turn as one group of warps has them; later one of the addends of the probabilities."""
    return region(sm, "sums") + (group * GROUP_HEADS + head) * SCORES_PITCH


def row_of(sm: Sm, pos: Int32, place: int, token: Int32, count: Int32, cached: Int32) -> Int32:
    """A token of slot `place` of the turn; past the last one of the sequence, that one again, with probability 0."""
    token = ptx.smaller(token, count - (place * SLOT_TOKENS + 1))
    address = ring_slot(sm, pos + place) + token * sm.shape.latent_pitch
    return ptx.select(token + place * SLOT_TOKENS < cached, address, region(sm, "local"))


@cute.jit
def _scores(sm: Sm, pos: Int32, count: Int32, cached: Int32):
    """Products of 16 queries and the rows of one slot, over this warp's part of the columns."""
    place, group = sm.warp & (SCORE_GROUPS - 1), sm.warp >> 2
    blocks = sm.shape.latent_bytes // 32
    own = -(-blocks // SCORE_GROUPS)
    if (place < sm.shape.turn_slots) & (place * SLOT_TOKENS < count):
        if place * SLOT_TOKENS < cached:
            wait_full(sm, pos + place)
        ptx.sync_warp()  # the products need the whole warp
        token, at = (sm.lane & 7) + (sm.lane >> 4) * 8, group * (32 * own)
        row = row_of(sm, pos, place, token, count, cached) + ((sm.lane >> 3) & 1) * 16 + at
        query = region(sm, "x") + (sm.lane & 15) * sm.shape.latent_pitch + (sm.lane >> 4) * 16 + at
        c = d = ZEROS
        for i in cutlass.range_constexpr(own):
            if cutlass.const_expr(blocks % SCORE_GROUPS == 0):
                c, d = _score_block(query + 32 * i, row + 32 * i, c, d)
            elif group * own + i < blocks:
                c, d = _score_block(query + 32 * i, row + 32 * i, c, d)
        out = scores_of(sm, group, sm.group) + (place * SLOT_TOKENS + 2 * sm.quad) * 4
        ptx.st_shared_v2_f32(out, c[0], c[1])
        ptx.st_shared_v2_f32(out + 32, d[0], d[1])
        ptx.st_shared_v2_f32(out + 8 * SCORES_PITCH, c[2], c[3])
        ptx.st_shared_v2_f32(out + 8 * SCORES_PITCH + 32, d[2], d[3])


def _score_block(query: Int32, row: Int32, c: tuple, d: tuple) -> tuple[tuple, tuple]:
    a, b = ptx.ldmatrix(query), ptx.ldmatrix(row)
    return ptx.mma_bf16(c, a, (b[0], b[1])), ptx.mma_bf16(d, a, (b[2], b[3]))


@cute.jit
def _softmax(sm: Sm, count: Int32, top: Float32, total: Float32, scale: Float32):
    """One head a warp: scores become exp(score - top), and what came before is to be scaled by `scratch[head]`."""
    at = scores_of(sm, Int32(0), sm.warp) + sm.lane * 8
    sums = [ptx.ld_shared_v2_f32(at + i * (GROUP_HEADS * SCORES_PITCH)) for i in range(SCORE_GROUPS)]
    ptx.sync_warp()  # where the scores are, the probabilities will be
    first, second = (((sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i])) * scale for i in range(2))
    first = ptx.select_f32(2 * sm.lane < count, first, Float32(NO_SCORE))
    second = ptx.select_f32(2 * sm.lane + 1 < count, second, Float32(NO_SCORE))
    largest = warp_max(ptx.fmax_nan(top, ptx.fmax_nan(first, second)))
    first, second = ptx.exp2_approx((first - largest) * LOG2E), ptx.exp2_approx((second - largest) * LOG2E)
    first = ptx.select_f32(2 * sm.lane < count, first, Float32(0.0))
    second = ptx.select_f32(2 * sm.lane + 1 < count, second, Float32(0.0))
    here, old = first + second, ptx.exp2_approx((top - largest) * LOG2E)
    for i in cutlass.range_constexpr(ADDENDS):
        pair = ptx.pack_bf16(first, second)
        ptx.st_shared_b32(scores_of(sm, Int32(i), sm.warp) + sm.lane * 4, pair)
        first, second = first - ptx.low_bf16(pair), second - ptx.high_bf16(pair)
    if sm.lane == 0:
        ptx.st_shared_f32(region(sm, "scratch") + sm.warp * 4, old)
    return largest, total * old + warp_sum(here)


@cute.jit
def _values(sm: Sm, pos: Int32, count: Int32, cached: Int32, acc: cute.Tensor):
    """acc = acc * old + sum over tokens of p * latent: columns of its own for each warp, for all heads."""
    pairs, L = value_pairs(sm), sm.shape.kv_lora_rank
    old = [ptx.ld_shared_f32(region(sm, "scratch") + (sm.group + 8 * i) * 4) for i in range(2)]
    here = cute.make_rmem_tensor(8 * pairs, Float32)
    for i in cutlass.range_constexpr(8 * pairs):
        here[i] = Float32(0.0)
    for place in cutlass.range_constexpr(sm.shape.turn_slots):
        if place * SLOT_TOKENS < cached:
            wait_full(sm, pos + place)  # long since, but each warp must see each filling of its slot
        if (place * SLOT_TOKENS < count) & (sm.warp * pairs < L // 16):
            _add_slot(sm, pos, place, count, cached, here)
    for i in cutlass.range_constexpr(8 * pairs):
        acc[i] = ptx.fma(acc[i], old[i // 2 % 2], here[i])


@cute.jit
def _add_slot(sm: Sm, pos: Int32, place: cutlass.Constexpr, count: Int32, cached: Int32, here: cute.Tensor):
    """Probabilities times the rows of a slot, this warp's columns: 8 sums for each 16 of them."""
    pairs = value_pairs(sm)
    ptx.sync_warp()  # the products need the whole warp
    row = row_of(sm, pos, place, sm.lane & 15, count, cached) + (sm.lane >> 4) * 16 + sm.warp * (32 * pairs)
    at = scores_of(sm, Int32(0), sm.lane & 15) + (sm.lane >> 4) * 16 + 32 * place
    p = [ptx.ldmatrix(at + i * (GROUP_HEADS * SCORES_PITCH)) for i in range(ADDENDS)]
    for n in cutlass.range_constexpr(pairs):
        v = ptx.ldmatrix_transposed(row + 32 * n)
        for half in cutlass.range_constexpr(2):
            k = 8 * n + 4 * half
            c = (here[k], here[k + 1], here[k + 2], here[k + 3])
            for i in cutlass.range_constexpr(ADDENDS):
                c = ptx.mma_bf16(c, p[ADDENDS - 1 - i], (v[2 * half], v[2 * half + 1]))
            for i in cutlass.range_constexpr(4):
                here[k + i] = c[i]


@cute.jit
def _publish(sm: Sm, f: Fields, r: Int32, head: Int32, part: Int32, acc: cute.Tensor, top: Float32, total: Float32):
    """This warp's head of `ml`, and its columns of all heads of `part`."""
    L, heads, splits, pairs = sm.shape.kv_lora_rank, sm.shape.mla_heads, sm.shape.splits, value_pairs(sm)
    tag, at = sm.tag + f["sub"], (r * heads + head) * splits + part
    if (sm.lane == 0) & (head + sm.warp < heads):
        ml = word_address(sm, f["ml"] + (at + sm.warp * splits) * 2)
        ptx.st_word_pair(ml, ptx.float_bits(top), ptx.float_bits(total), tag)
    for half in cutlass.range_constexpr(2):
        row = sm.group + 8 * half
        if (head + row < heads) & (sm.warp * pairs < L // 16):
            start = f["part"] + (at + row * splits) * L + sm.warp * (16 * pairs) + 2 * sm.quad
            for n in cutlass.range_constexpr(2 * pairs):
                i = 4 * n + 2 * half
                words = ptx.float_bits(acc[i]), ptx.float_bits(acc[i + 1])
                ptx.st_word_pair(word_address(sm, start + 8 * n), *words, tag)
