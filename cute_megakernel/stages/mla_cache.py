"""What the MLA rows share: into how many parts a sequence is cut, who has them, and how a row comes from words.

Parts of a sequence, 64 tokens or more each, are attended to by different SMs, 16 heads at a time; how many is a matter
of the length of the sequence alone, so a row does not depend on its neighbours. A part leaves, for each head,

    ml    largest score, sum of exp(score - largest)
    part  sum of exp(score - largest) * latent             both float32
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


def seq_len(sm: Sm, r: Int32) -> Int32:
    return ptx.ld_shared_b32(region(sm, "slots") + 64 + r * 4)


def part_tokens(shape: KernelShape, length: Int32) -> Int32:
    """Tokens of a part, whole slots of them."""
    short = ptx.smaller((length + DIRECT_PARTS - 1) >> DIRECT_PARTS.bit_length() - 1, Int32(PART))
    most = ptx.larger(short, (length + shape.splits - 1) >> shape.splits.bit_length() - 1)
    return (ptx.larger(most, Int32(SHORT_PART)) + SLOT_TOKENS - 1) & -SLOT_TOKENS


def part_count(shape: KernelShape, length: Int32) -> Int32:
    tokens = part_tokens(shape, length)
    return (length + tokens - 1) // tokens


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


@cute.jit
def sum_parts(
    sm: Sm, f: Fields, r: Int32, head: Int32, first: Int32, slices: cutlass.Constexpr, parts: Int32, area: Int32
):  # fmt: skip
    """o = sum over parts of exp(largest_i - largest) * part_i / sum over parts of exp(largest_i - largest) * sum_i

    All warps, for `slices` slices of 64 columns of one head: each adds up 8 parts of a slice, two columns a lane, all
    its loads on their way at once, and leaves them in `area`; `summed` adds those up.
    """
    L, most = sm.shape.kv_lora_rank, CONSUMER_WARPS // slices * SUM_PARTS
    group, held = sm.warp >> slices.bit_length() - 1, -(-most // 32)
    column = (first + (sm.warp & (slices - 1))) * SUM_COLUMNS + 2 * sm.lane
    a, b = Float32(0.0), Float32(0.0)
    if (SUM_PARTS * group < parts) & (column - 2 * sm.lane < L):
        at, tag, last = (r * sm.shape.mla_heads + head) * sm.shape.splits, sm.tag + f["sub"], parts - 1
        data = f["part"] + at * L + ptx.select(column < L, column, Int32(0))
        ml = cute.make_rmem_tensor(2 * held, Int32)
        words = cute.make_rmem_tensor(2 * SUM_PARTS, Int32)
        ready, polls = Int32(0), Int32(0)
        while ready == 0:
            tags, wrong = cute.make_rmem_tensor(2 * held + 2 * SUM_PARTS, Int32), Int32(0)
            for j in cutlass.range_constexpr(held):
                k, i = 2 * j, ptx.smaller(sm.lane + 32 * j, last)
                ml[k], tags[k], ml[k + 1], tags[k + 1] = ptx.ld_word_pair(word_address(sm, f["ml"] + 2 * (at + i)))
            for j in cutlass.range_constexpr(SUM_PARTS):
                k, i = 2 * j, ptx.smaller(SUM_PARTS * group + j, last)
                words[k], tags[2 * held + k], words[k + 1], tags[2 * held + k + 1] = ptx.ld_word_pair(
                    word_address(sm, data + i * L)
                )
            for j in cutlass.range_constexpr(2 * held + 2 * SUM_PARTS):
                wrong = wrong | (tags[j] ^ tag)
            ready = ptx.select(wrong == 0, Int32(1), Int32(0))
            polls += 1
            if (polls & (POLLS_BETWEEN_LOOKS - 1)) == 0:
                if give_up(sm, f.number) != 0:
                    ready = Int32(1)
        mine = _shares(sm, ml, held, parts, group)
        for i in cutlass.range_constexpr(SUM_PARTS):
            share = ptx.shfl(mine, (SUM_PARTS * group + i) & 31)
            a, b = a + share * ptx.bits_float(words[2 * i]), b + share * ptx.bits_float(words[2 * i + 1])
    ptx.st_shared_v2_f32(area + (sm.warp * 32 + sm.lane) * 8, a, b)


@cute.jit
def _shares(sm: Sm, ml: cute.Tensor, held: cutlass.Constexpr, parts: Int32, group: Int32) -> Float32:
    """What is to become of each part: of part `lane` of those 32 that the group's are among. 0 past the last one."""
    largest, total = Float32(NO_SCORE), Float32(0.0)
    for j in cutlass.range_constexpr(held):
        largest = ptx.fmax(largest, ptx.bits_float(ml[2 * j]))  # past the last part that one is there again
    largest = warp_max(largest)
    weights = cute.make_rmem_tensor(held, Float32)
    for j in cutlass.range_constexpr(held):
        weight = ptx.exp2_approx((ptx.bits_float(ml[2 * j]) - largest) * LOG2E)
        weights[j] = ptx.select_f32(sm.lane + 32 * j < parts, weight, Float32(0.0))
        total = total + weights[j] * ptx.bits_float(ml[2 * j + 1])
    mine, total = weights[0], warp_sum(total)
    for j in cutlass.range_constexpr(1, held):
        mine = ptx.select_f32((SUM_PARTS * group) >> 5 == j, weights[j], mine)
    return ptx.select_f32(mine > Float32(0.0), ptx.div_full(mine, total), mine)


def summed(sm: Sm, area: Int32, slices: int) -> tuple[Float32, Float32]:
    """Two columns, place `thread` of the slices, over all groups of parts in their order; behind a `sync`."""
    a, b = Float32(0.0), Float32(0.0)
    for group in range(CONSUMER_WARPS // slices):
        low, high = ptx.ld_shared_v2_f32(area + (group * slices * 32 + sm.thread) * 8)
        a, b = a + low, b + high
    return a, b
