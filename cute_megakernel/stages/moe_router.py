"""moe_router, in every SM: the experts of each batch row, and the list of distinct experts that the step touches.

    key = sigmoid(logit) + bias; the top_k largest, the lower id on ties; weight = score / (sum + 1e-20) * scaling

A NaN score counts as 0. One warp does a batch row. The top_k-th largest of the 32 lanes' largest keys is a floor under
the picks; the few keys that are not below it are listed and ranked by counting. Then the distinct experts are listed in
ascending order, the same list in every SM:

    ids      number of distinct experts, then their ids
    slot_of  [expert of the list, batch row] which pick it is there, 255 where it is none

Source   DESIGN.md section 5
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_megakernel import ptx
from cute_megakernel.core import (
    POLLS_BETWEEN_LOOKS,
    Fields,
    Sm,
    address_of,
    float_of,
    give_up,
    region,
    sigmoid,
    sync,
    wait_barrier,
    warp_sum,
    word_address,
)
from cute_megakernel.shape import CONSUMERS, MAX_PICKS

NOT_PICKED = 255
MAX_CANDIDATES = 64


@cute.jit
def moe_router(sm: Sm, f: Fields):
    per_lane = -(-sm.shape.num_experts // 32)
    words = -(-sm.shape.num_experts // 32)
    before = f["sub"] - sm.batch["first_moe"]  # lists made in this launch
    if before > 0:  # the streaming warp is done with the last one
        wait_barrier(sm, region(sm, "ids_free"), (before - 1) & 1)
    if sm.warp < sm.shape.rows:
        _pick(sm, f, sm.warp, per_lane)
    if sm.thread < 2 * MAX_PICKS:
        ptx.st_shared_b32(region(sm, "slot_of") + sm.thread * 4, Int32(-1))
    sync(sm)
    if sm.warp == 0:
        _list_distinct(sm, words)
        ptx.sync_warp()
        if sm.lane == 0:
            ptx.mbarrier_arrive(region(sm, "ids_ready"))
    sync(sm)


@cute.jit
def _pick(sm: Sm, f: Fields, r: Int32, per_lane: cutlass.Constexpr):
    """Ids and weights of one batch row, pick a in lane a."""
    keys = cute.make_rmem_tensor(per_lane, Int32)
    scores = cute.make_rmem_tensor(per_lane, Float32)
    _load_keys(sm, f, r, per_lane, keys, scores)
    found = _candidates(sm, r, per_lane, keys, scores)
    mine, my_score = Int32(0), Float32(0.0)
    if found <= MAX_CANDIDATES:
        mine, my_score = _rank(sm, r, found)
    else:
        mine, my_score = _pick_one_by_one(sm, per_lane, keys, scores)
    total = warp_sum(my_score) + Float32(1.0e-20)
    weight = ptx.div_full(my_score, total) * float_of(f, "scale")
    if sm.lane < sm.shape.top_k:
        ptx.st_shared_b32(region(sm, "scratch") + 512 + (r * 32 + sm.lane) * 4, mine)
        ptx.st_shared_f32(region(sm, "pick_weights") + (r * 32 + sm.lane) * 4, weight)
        if (f["dst"] >= 0) & (sm.block == 0):
            ptx.st_word(word_address(sm, f["dst"] + r * f["dst_pitch"] + sm.lane), mine, sm.tag)
            ptx.st_word(word_address(sm, f["tap"] + r * f["tap_pitch"] + sm.lane), ptx.float_bits(weight), sm.tag)


@cute.jit
def _load_keys(sm: Sm, f: Fields, r: Int32, per_lane: cutlass.Constexpr, keys: cute.Tensor, scores: cute.Tensor):
    """Scores and ordered keys of experts lane, lane + 32, ...; 0 is the key of no expert."""
    bias = address_of(f, "weight")
    biases = cute.make_rmem_tensor(per_lane, Float32)
    for j in cutlass.range_constexpr(per_lane):
        biases[j] = Float32(0.0)
        if sm.lane + 32 * j < sm.shape.num_experts:
            biases[j] = ptx.ld_global_f32(bias + Int64(sm.lane + 32 * j) * 4)
    ready, polls = Int32(0), Int32(0)
    while ready == 0:
        ready = Int32(1)
        for j in cutlass.range_constexpr(per_lane):
            expert = ptx.select(sm.lane + 32 * j < sm.shape.num_experts, sm.lane + 32 * j, Int32(0))
            keys[j], tag = ptx.ld_word(word_address(sm, f["src"] + r * f["src_pitch"] + expert))
            scores[j] = ptx.bits_float(tag)
        for j in cutlass.range_constexpr(per_lane):
            if ptx.float_bits(scores[j]) != sm.tag:
                ready = Int32(0)
        if ready == 0:
            ptx.sleep_ns(sm.batch["poll_ns"])
        polls += 1
        if polls % POLLS_BETWEEN_LOOKS == 0:
            if give_up(sm, f.number) != 0:
                ready = Int32(1)
    for j in cutlass.range_constexpr(per_lane):
        score = sigmoid(ptx.bits_float(keys[j]))
        scores[j] = ptx.select_f32(score == score, score, Float32(0.0))
        key = _ordered(scores[j] + biases[j])
        keys[j] = ptx.select(sm.lane + 32 * j < sm.shape.num_experts, key, Int32(0))


def candidate(sm: Sm, r: Int32, place: Int32) -> Int32:
    """(key, expert, score) of a candidate, 16 bytes."""
    return region(sm, "sums") + (r * MAX_CANDIDATES + place) * 16


@cute.jit
def _candidates(sm: Sm, r: Int32, per_lane: cutlass.Constexpr, keys: cute.Tensor, scores: cute.Tensor) -> Int32:
    """Lists the keys that may be among the top_k: those not below the top_k-th of the lanes' largest. -> how many"""
    top_k = sm.shape.top_k
    largest = Int32(0)
    for j in cutlass.range_constexpr(per_lane):
        largest = ptx.max_u32(largest, keys[j])
    above = Int32(0)
    for lane in cutlass.range_constexpr(32):
        other = ptx.shfl(largest, Int32(lane))
        above = above + ptx.select(ptx.above_u32(other, largest, sm.lane > lane), Int32(1), Int32(0))
    holder = ptx.ballot(above == top_k - 1)
    floor = ptx.shfl(largest, ptx.first_bit(holder))
    count = Int32(0)
    for j in cutlass.range_constexpr(per_lane):
        count = count + ptx.select(ptx.not_below_u32(keys[j], floor), Int32(1), Int32(0))
    before = count
    for step in cutlass.range_constexpr(5):
        lower = ptx.shfl_up(before, 1 << step)
        before = before + ptx.select(sm.lane >= (1 << step), lower, Int32(0))
    found = ptx.shfl(before, Int32(31))
    place = before - count
    if found <= MAX_CANDIDATES:
        for j in cutlass.range_constexpr(per_lane):
            if ptx.not_below_u32(keys[j], floor):
                ptx.st_shared_v2_b32(candidate(sm, r, place), keys[j], sm.lane + 32 * j)
                ptx.st_shared_f32(candidate(sm, r, place) + 8, scores[j])
                place += 1
    ptx.sync_warp()
    return found


@cute.jit
def _rank(sm: Sm, r: Int32, found: Int32):
    """Counts, for each candidate, those before it; the one with a before it is pick a, and goes to lane a."""
    mine, my_score = Int32(0), Float32(0.0)
    picks = region(sm, "scratch") + 512 + r * 128
    for first in range(0, found, 32):
        i = first + sm.lane
        key, expert = ptx.ld_shared_v2_b32(candidate(sm, r, ptx.select(i < found, i, Int32(0))))
        rank = Int32(0)
        for j in range(found):
            other, other_expert = ptx.ld_shared_v2_b32(candidate(sm, r, j))
            rank += ptx.select(ptx.above_u32(other, key, other_expert < expert), Int32(1), Int32(0))
        if (i < found) & (rank < sm.shape.top_k):
            ptx.st_shared_b32(picks + rank * 4, i)
    ptx.sync_warp()
    if sm.lane < sm.shape.top_k:
        i = ptx.ld_shared_b32(picks + sm.lane * 4)
        _, mine = ptx.ld_shared_v2_b32(candidate(sm, r, i))
        my_score = ptx.ld_shared_f32(candidate(sm, r, i) + 8)
    ptx.sync_warp()
    return mine, my_score


@cute.jit
def _pick_one_by_one(sm: Sm, per_lane: cutlass.Constexpr, keys: cute.Tensor, scores: cute.Tensor):
    """Where many keys are equal: the largest key left, top_k times."""
    mine, my_score = Int32(0), Float32(0.0)
    for a in range(sm.shape.top_k):
        largest = Int32(0)
        for j in cutlass.range_constexpr(per_lane):
            largest = ptx.max_u32(largest, keys[j])
        largest = ptx.redux_max_u32(largest)
        expert = Int32(0x7FFFFFFF)
        for j in cutlass.range_constexpr(per_lane):
            here = sm.lane + 32 * j
            expert = ptx.select((keys[j] == largest) & (here < expert), here, expert)
        expert = ptx.redux_min_u32(expert)
        score = Float32(0.0)
        for j in cutlass.range_constexpr(per_lane):
            taken = expert == sm.lane + 32 * j
            score = ptx.select_f32(taken, scores[j], score)
            keys[j] = ptx.select(taken, Int32(0), keys[j])
        score = ptx.bits_float(ptx.shfl(ptx.float_bits(score), expert % 32))
        mine = ptx.select(sm.lane == a, expert, mine)
        my_score = ptx.select_f32(sm.lane == a, score, my_score)
    return mine, my_score


@cute.jit
def _ordered(key: Float32) -> Int32:
    """Bits of a float that compare as unsigned integers; at least 1, because 0 stands for a key that is gone."""
    bits = ptx.float_bits(key + Float32(0.0))  # -0 and 0 are one key
    return ptx.select(bits < 0, ~bits, bits | Int32(-(1 << 31)))


@cute.jit
def _list_distinct(sm: Sm, words: cutlass.Constexpr):
    """One warp: a bit for each picked expert, counted up to the place of each in the list."""
    bitmap, picks = region(sm, "scratch"), region(sm, "scratch") + 512
    ptx.st_shared_b32(bitmap + sm.lane * 4, Int32(0))
    ptx.sync_warp()
    for r in range(sm.shape.rows):
        if sm.lane < sm.shape.top_k:
            expert = ptx.ld_shared_b32(picks + (r * 32 + sm.lane) * 4)
            ptx.red_or_shared(bitmap + (expert // 32) * 4, Int32(1) << (expert % 32))
    ptx.sync_warp()
    bits = ptx.ld_shared_b32(bitmap + sm.lane * 4)
    before = ptx.popc(bits)
    for step in cutlass.range_constexpr(5):
        other = ptx.shfl_up(before, 1 << step)
        before = before + ptx.select(sm.lane >= (1 << step), other, Int32(0))
    total = ptx.shfl(before, Int32(31))
    before = before - ptx.popc(bits)
    ptx.st_shared_b32(region(sm, "scratch") + 256 + sm.lane * 4, before)
    if sm.lane == 0:
        ptx.st_shared_b32(region(sm, "ids"), total)
    ptx.sync_warp()
    for r in range(sm.shape.rows):
        if sm.lane < sm.shape.top_k:
            expert = ptx.ld_shared_b32(picks + (r * 32 + sm.lane) * 4)
            word = ptx.ld_shared_b32(bitmap + (expert // 32) * 4)
            place = ptx.ld_shared_b32(region(sm, "scratch") + 256 + (expert // 32) * 4)
            place = place + ptx.popc(word & ((Int32(1) << (expert % 32)) - 1))
            ptx.st_shared_b32(region(sm, "ids") + 16 + place * 4, expert)
            ptx.st_shared_u8(region(sm, "slot_of") + place * 8 + r, sm.lane)


assert CONSUMERS >= 2 * MAX_PICKS
