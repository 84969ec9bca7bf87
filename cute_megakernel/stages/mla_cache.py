"""What the MLA rows share: into how many parts a sequence is cut, who has them, and how a row comes from words.

Parts of a sequence, 64 tokens or more each, are attended to by different SMs, 16 heads at a time; how many is a matter
of the length of the sequence alone, so a row does not depend on its neighbours. A part leaves, for each head,

    ml    largest score, sum of exp(score - largest)
    part  sum of exp(score - largest) * latent             both float32
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_megakernel import ptx
from cute_megakernel.core import (
    LOG2E,
    POLLS_BETWEEN_LOOKS,
    Fields,
    Sm,
    address_of,
    float_of,
    give_up,
    region,
    rms_scale,
    warp_max,
    warp_sum,
    word_address,
)
from cute_megakernel.shape import (
    CONSUMER_WARPS,
    CONSUMERS,
    DIRECT_PARTS,
    GROUP_HEADS,
    PART,
    SHORT_PART,
    SLOT_TOKENS,
    SUM_COLUMNS,
    SUM_PARTS,
    KernelShape,
)

NO_SCORE = -1.0e30
AREA = 8 * CONSUMERS  # bytes of what `sum_parts` leaves of a head


def seq_len(sm: Sm, r: Int32) -> Int32:
    return ptx.ld_shared_b32(region(sm, "slots") + 64 + r * 4)


def part_tokens(shape: KernelShape, length: Int32) -> Int32:
    """Tokens of a part, whole slots of them."""
    short = ptx.smaller((length + DIRECT_PARTS - 1) >> DIRECT_PARTS.bit_length() - 1, Int32(PART))
    most = ptx.larger(short, (length + shape.splits - 1) >> shape.splits.bit_length() - 1)
    return (ptx.larger(most, Int32(SHORT_PART)) + SLOT_TOKENS - 1) & -SLOT_TOKENS


def units(shape: KernelShape) -> int:
    """(part, batch row, group of 16 heads), counted with the group fastest; an SM has every `sms`-th."""
    return shape.splits * shape.rows * shape.head_groups


def unit_of(sm: Sm, unit: Int32):
    """-> batch row, first head, part, its first token and the one behind it, whether it has the newest token"""
    rows, groups = sm.shape.rows, sm.shape.head_groups
    part = unit // (rows * groups)
    rest = unit - part * (rows * groups)
    r = rest // groups
    length = seq_len(sm, r)
    tokens = part_tokens(sm.shape, length)
    start = part * tokens
    end = ptx.smaller(start + tokens, length)
    newest = ptx.select((start < end) & (end == length), Int32(1), Int32(0))
    return r, (rest - r * groups) * GROUP_HEADS, part, start, end, newest


def page_at(sm: Sm, f: Fields, r: Int32, index: Int32) -> Int32:
    """A page of a sequence; one outside the pool counts as page 0."""
    page = ptx.ld_table(sm.batch["page_table"] + (Int64(r) * Int64(sm.batch["max_pages"]) + Int64(index)) * 4)
    return ptx.select((page >= 0) & (page < f["pool_count"]), page, Int32(0))


def steps(sm: Sm) -> int:
    """Loads of a latent by one warp, four columns a lane; one more has the extra dims."""
    return -(-sm.shape.kv_lora_rank // 128)


@cute.jit
def load_vector(sm: Sm, row: Int32, latent: Int32, extra: Int32, into: cute.Tensor):
    """[latent | extra dims] as bfloat16 pairs, from the words that begin at these two, by one warp, all on their way
    at once: four columns a lane and step. Past the end a lane repeats the first."""
    quads, last = sm.shape.kv_lora_rank // 4, steps(sm)
    ready, polls = Int32(0), Int32(0)
    while ready == 0:
        tags, wrong = cute.make_rmem_tensor(2 * last + 2, Int32), Int32(0)
        for j in cutlass.range_constexpr(last + 1):
            i, start, count = sm.lane + 32 * j, latent, quads
            if cutlass.const_expr(j == last):
                i, start, count = sm.lane, extra, sm.shape.qk_rope_dim // 4
            i = ptx.select(i < count, i, Int32(0))
            into[2 * j], tags[2 * j], into[2 * j + 1], tags[2 * j + 1] = ptx.ld_word_pair(
                word_address(sm, start + 2 * i)
            )
        for j in cutlass.range_constexpr(2 * last + 2):
            wrong = wrong | (tags[j] ^ sm.tag)
        ready = ptx.select(wrong == 0, Int32(1), Int32(0))
        polls += 1
        if (polls & (POLLS_BETWEEN_LOOKS - 1)) == 0:
            if give_up(sm, row) != 0:
                ready = Int32(1)


@cute.jit
def make_latent(sm: Sm, f: Fields, r: Int32, into: cute.Tensor):
    """The newest row of the cache, by one warp: RMSNorm of the latent, the extra dims as they are."""
    quads, last, start = sm.shape.kv_lora_rank // 4, steps(sm), f["ckv"] + r * f["ckv_pitch"]
    weights = cute.make_rmem_tensor(2 * last, Int32)
    for j in cutlass.range_constexpr(last):
        i = ptx.select(sm.lane + 32 * j < quads, sm.lane + 32 * j, Int32(0))
        weights[2 * j], weights[2 * j + 1] = ptx.ld_global_v2_b32(address_of(f, "norm") + Int64(i) * 8)
    load_vector(sm, f.number, start, start + 2 * quads, into)
    squares = Float32(0.0)
    for j in cutlass.range_constexpr(2 * last):
        a, b = ptx.low_bf16(into[j]), ptx.high_bf16(into[j])
        squares = squares + ptx.select_f32(sm.lane + 32 * (j // 2) < quads, a * a + b * b, Float32(0.0))
    scale = rms_scale(warp_sum(squares), Float32(sm.shape.kv_lora_rank), float_of(f, "eps"))
    for j in cutlass.range_constexpr(2 * last):
        low = ptx.low_bf16(into[j]) * scale * ptx.low_bf16(weights[j])
        into[j] = ptx.pack_bf16(low, ptx.high_bf16(into[j]) * scale * ptx.high_bf16(weights[j]))


@cute.jit
def keep_vector(sm: Sm, address: Int32, words: cute.Tensor):
    """What `load_vector` or `make_latent` left in a warp, as a row in shared memory."""
    L, last = sm.shape.kv_lora_rank, steps(sm)
    for j in cutlass.range_constexpr(last):
        if sm.lane + 32 * j < L // 4:
            ptx.st_shared_v2_b32(address + (sm.lane + 32 * j) * 8, words[2 * j], words[2 * j + 1])
    if sm.lane < sm.shape.qk_rope_dim // 4:
        ptx.st_shared_v2_b32(address + 2 * L + sm.lane * 8, words[2 * last], words[2 * last + 1])


class Parts:
    """Into how many parts the sequence of a batch row was cut: part i is there where i * tokens < length."""

    def __init__(self, sm: Sm, r: Int32):
        self.length = seq_len(sm, r)
        self.tokens = part_tokens(sm.shape, self.length)


def has_part(parts: Parts, index: Int32) -> Boolean:
    return index * parts.tokens < parts.length


def few(parts: Parts) -> Boolean:
    """Whether every SM reads the parts of its heads itself."""
    return parts.length <= DIRECT_PARTS * parts.tokens


@cute.jit
def sum_parts(
    sm: Sm, f: Fields, r: Int32, head: Int32, heads: cutlass.Constexpr, first: Int32, slices: cutlass.Constexpr,
    parts: Parts, area: Int32,
):  # fmt: skip
    """o = sum over parts of exp(largest_i - largest) * part_i / sum over parts of exp(largest_i - largest) * sum_i

    All warps, for `slices` slices of 64 columns of one head or two: each adds up 8 parts of a slice, two columns a
    lane, all its loads on their way at once, and leaves them in `area`; `summed` adds those up.
    """
    L, splits, held = sm.shape.kv_lora_rank, sm.shape.splits, -(-CONSUMER_WARPS // slices * SUM_PARTS // 32)
    start = (sm.warp >> slices.bit_length() - 1) * SUM_PARTS
    column = (first + (sm.warp & (slices - 1))) * SUM_COLUMNS
    sums = cute.make_rmem_tensor(2 * heads, Float32)
    for i in cutlass.range_constexpr(2 * heads):
        sums[i] = Float32(0.0)
    if has_part(parts, start) & (column < L):
        at = (r * sm.shape.mla_heads + head) * splits
        column = ptx.select(column + 2 * sm.lane < L, column + 2 * sm.lane, Int32(0))
        ml = cute.make_rmem_tensor(2 * heads * held, Int32)
        words = cute.make_rmem_tensor(2 * heads * SUM_PARTS, Int32)
        first_ml = word_address(sm, f["ml"] + 2 * (at + sm.lane))
        first_word = word_address(sm, f["part"] + (at + start) * L + column)
        present = ptx.ballot(has_part(parts, (start & -32) + sm.lane)) >> (start & 31)
        tag, ready, polls = sm.tag + f["sub"], Int32(0), Int32(0)
        while ready == 0:  # words of parts that are not there are loaded too, and not looked at
            wrong = Int32(0)
            ml_tags = cute.make_rmem_tensor(2 * heads * held, Int32)
            tags = cute.make_rmem_tensor(2 * heads * SUM_PARTS, Int32)
            for k in cutlass.range_constexpr(heads * held):
                address = first_ml + 16 * (k // held * splits + 32 * (k % held))
                ml[2 * k], ml_tags[2 * k], ml[2 * k + 1], ml_tags[2 * k + 1] = ptx.ld_word_pair(address)
            for k in cutlass.range_constexpr(heads * SUM_PARTS):
                address = first_word + 8 * L * (k // SUM_PARTS * splits + k % SUM_PARTS)
                words[2 * k], tags[2 * k], words[2 * k + 1], tags[2 * k + 1] = ptx.ld_word_pair(address)
            for k in cutlass.range_constexpr(heads * held):
                bad = (ml_tags[2 * k] ^ tag) | (ml_tags[2 * k + 1] ^ tag)
                wrong = wrong | ptx.select(has_part(parts, sm.lane + 32 * (k % held)), bad, Int32(0))
            for k in cutlass.range_constexpr(heads * SUM_PARTS):
                bad = (tags[2 * k] ^ tag) | (tags[2 * k + 1] ^ tag)
                wrong = wrong | ptx.select((present & (1 << k % SUM_PARTS)) != 0, bad, Int32(0))
            ready = ptx.select(wrong == 0, Int32(1), Int32(0))
            polls += 1
            if (polls & (POLLS_BETWEEN_LOOKS - 1)) == 0:
                if give_up(sm, f.number) != 0:
                    ready = Int32(1)
        for h in cutlass.range_constexpr(heads):
            share = _share(sm, ml, 2 * h * held, held, parts, start)
            for i in cutlass.range_constexpr(SUM_PARTS):
                k, weight, there = 2 * (h * SUM_PARTS + i), ptx.shfl(share, (start + i) & 31), present & (1 << i)
                for n in cutlass.range_constexpr(2):
                    more = sums[2 * h + n] + weight * ptx.bits_float(words[k + n])
                    sums[2 * h + n] = ptx.select_f32(there != 0, more, sums[2 * h + n])
    for h in cutlass.range_constexpr(heads):
        ptx.st_shared_v2_f32(area + h * AREA + (sm.warp * 32 + sm.lane) * 8, sums[2 * h], sums[2 * h + 1])


@cute.jit
def _share(
    sm: Sm, ml: cute.Tensor, at: cutlass.Constexpr, held: cutlass.Constexpr, parts: Parts, start: Int32
) -> Float32:  # fmt: skip
    """What is to become of each part: of part `lane` of those 32 that part `start` is among; 0 where there is none."""
    largest, total = Float32(NO_SCORE), Float32(0.0)
    for j in cutlass.range_constexpr(held):
        top = ptx.select_f32(has_part(parts, sm.lane + 32 * j), ptx.bits_float(ml[at + 2 * j]), Float32(NO_SCORE))
        largest = ptx.fmax(largest, top)
    largest = warp_max(largest)
    weights = cute.make_rmem_tensor(held, Float32)
    for j in cutlass.range_constexpr(held):
        weight, there = ptx.exp2_approx((ptx.bits_float(ml[at + 2 * j]) - largest) * LOG2E), sm.lane + 32 * j
        weights[j] = ptx.select_f32(has_part(parts, there), weight, Float32(0.0))
        of_part = weight * ptx.bits_float(ml[at + 2 * j + 1])
        total = total + ptx.select_f32(has_part(parts, there), of_part, Float32(0.0))
    mine, total = weights[0], warp_sum(total)
    for j in cutlass.range_constexpr(1, held):
        mine = ptx.select_f32(start >> 5 == j, weights[j], mine)
    return ptx.div_full(mine, total)


def summed(sm: Sm, area: Int32, slices: int) -> tuple[Float32, Float32]:
    """Two columns, place `thread` of the slices, over all groups of parts in their order; behind a `sync`."""
    a, b = Float32(0.0), Float32(0.0)
    for group in range(CONSUMER_WARPS // slices):
        low, high = ptx.ld_shared_v2_f32(area + (group * slices * 32 + sm.thread) * 8)
        a, b = a + low, b + high
    return a, b
