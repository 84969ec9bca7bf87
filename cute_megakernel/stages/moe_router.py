"""moe_router, in every SM: the experts of each batch row, and the list of distinct experts that the step touches.

    key = sigmoid(logit) + bias; the top_k largest, the lower id on ties; weight = score / (sum + 1e-20) * scaling

A NaN score counts as 0. The warps are dealt out over the batch rows, the experts of a row over its warps, in 16 groups.
The least of the groups' largest keys is a floor under the picks; the keys that are not below it, about 16 * H(16) = 54,
are listed and ranked by counting. Then the distinct experts are listed in ascending order, the same list in every SM:

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
from cute_megakernel.shape import CONSUMER_WARPS, CONSUMERS, MAX_PICKS, PICKS, KernelShape

NOT_PICKED = 255
GROUPS = 16  # of the keys of a batch row; as many keys at least are not below the floor
MAX_CANDIDATES = 192  # more by chance: 16 * (15/16)^192, once in 15000
PASS = 64  # candidates ranked at a time


def warps_of_row(shape: KernelShape) -> int:
    """2, 4, 8 or 16."""
    return CONSUMER_WARPS >> (shape.rows - 1).bit_length()


def share(shape: KernelShape) -> int:
    """Threads that rank a candidate."""
    return 32 * warps_of_row(shape) // PASS


@cute.jit
def moe_router(sm: Sm, f: Fields):
    warps = warps_of_row(sm.shape)
    part_size = -(-sm.shape.num_experts // warps)
    per_lane = -(-part_size // 32)
    keys = cute.make_rmem_tensor(per_lane, Int32)
    scores = cute.make_rmem_tensor(per_lane, Float32)
    r, part = sm.warp // warps, sm.warp % warps
    before = f["sub"] - sm.batch["first_moe"]  # lists made in this launch
    if before > 0:  # the streaming warp is done with the last one
        wait_barrier(sm, region(sm, "ids_free"), (before - 1) & 1)
    if sm.thread < 2 * MAX_PICKS:
        ptx.st_shared_b32(region(sm, "slot_of") + sm.thread * 4, Int32(-1))
    if sm.thread < sm.shape.rows:
        ptx.st_shared_b32(found_address(sm, sm.thread), Int32(0))
    if r < sm.shape.rows:
        _load_keys(sm, f, r, part * part_size, part_size, per_lane, keys, scores)
        _put_largest(sm, r, part, per_lane, keys)
    sync(sm)
    if r < sm.shape.rows:
        _candidates(sm, r, part * part_size, per_lane, keys, scores)
    sync(sm)
    if r < sm.shape.rows:
        _rank(sm, r, part * 32 + sm.lane)
    sync(sm)
    if sm.warp < sm.shape.rows:
        _weigh(sm, f, sm.warp)
    if cutlass.const_expr(sm.shape.rows > 1):
        sync(sm)
    if sm.warp == 0:
        if cutlass.const_expr(sm.shape.rows > 1):
            _list_distinct(sm)
        else:
            _list_picks(sm)
        ptx.sync_warp()
        if sm.lane == 0:
            ptx.mbarrier_arrive(region(sm, "ids_ready"))


def largest_address(sm: Sm, r: Int32, group: Int32) -> Int32:
    return region(sm, "scratch") + (r * GROUPS + group) * 4


def pick_address(sm: Sm, r: Int32, pick: Int32) -> Int32:
    """Expert of a pick."""
    return region(sm, "scratch") + 512 + (r * 32 + pick) * 4


def weight_address(sm: Sm, r: Int32, pick: Int32) -> Int32:
    """Weight of a pick; before that, its score."""
    return region(sm, "pick_weights") + (r * 32 + pick) * 4


def found_address(sm: Sm, r: Int32) -> Int32:
    """Number of candidates."""
    return region(sm, "scratch") + 1536 + r * 4


@cute.jit
def _put_largest(sm: Sm, r: Int32, part: Int32, per_lane: cutlass.Constexpr, keys: cute.Tensor):
    """The largest key of each group of this warp's, of 4, 8, 16 or 32 lanes."""
    lanes = 2 * warps_of_row(sm.shape)
    largest = Int32(0)
    for j in cutlass.range_constexpr(per_lane):
        largest = ptx.max_u32(largest, keys[j])
    if cutlass.const_expr(lanes == 32):
        largest = ptx.redux_max_u32(largest)
    else:
        for step in cutlass.range_constexpr(lanes.bit_length() - 1):
            largest = ptx.max_u32(largest, ptx.shfl(largest, sm.lane ^ (1 << step)))
    if sm.lane % lanes == 0:
        ptx.st_shared_b32(largest_address(sm, r, (part * 32 + sm.lane) // lanes), largest)


@cute.jit
def _weigh(sm: Sm, f: Fields, r: Int32):
    """Weights of one batch row's picks, pick a in lane a."""
    mine, my_score = Int32(0), Float32(0.0)
    if ptx.ld_shared_b32(found_address(sm, r)) <= MAX_CANDIDATES:
        if sm.lane < sm.shape.top_k:
            mine = ptx.ld_shared_b32(pick_address(sm, r, sm.lane))
            my_score = ptx.ld_shared_f32(weight_address(sm, r, sm.lane))
    else:
        mine, my_score = _pick_one_by_one(sm, f, r)
    total = warp_sum(my_score) + Float32(1.0e-20)
    weight = ptx.div_full(my_score, total) * float_of(f, "scale")
    if sm.lane < sm.shape.top_k:
        ptx.st_shared_b32(pick_address(sm, r, sm.lane), mine)
        ptx.st_shared_f32(weight_address(sm, r, sm.lane), weight)
        if (f["dst"] >= 0) & (sm.block == 0):
            ptx.st_word(word_address(sm, f["dst"] + r * f["dst_pitch"] + sm.lane), mine, sm.tag)
            ptx.st_word(word_address(sm, f["tap"] + r * f["tap_pitch"] + sm.lane), ptx.float_bits(weight), sm.tag)


def _score(logit: Int32) -> Float32:
    """Sigmoid of the float with these bits, 0 for NaN."""
    score = sigmoid(ptx.bits_float(logit))
    return ptx.select_f32(score == score, score, Float32(0.0))


def _place(sm: Sm, first: Int32, count: int, j: int) -> Int32:
    """The j-th expert of this lane among `count` from `first` on, -1 where there is none."""
    here = first + sm.lane + 32 * j
    return ptx.select((sm.lane + 32 * j < count) & (here < sm.shape.num_experts), here, Int32(-1))


@cute.jit
def _load_keys(
    sm: Sm, f: Fields, r: Int32, first: Int32, count: cutlass.Constexpr, per_lane: cutlass.Constexpr,
    keys: cute.Tensor, scores: cute.Tensor,
):  # fmt: skip
    """Scores and ordered keys of experts `first` + lane, `first` + lane + 32, ...; 0 is the key of no expert."""
    bias = address_of(f, "weight")
    biases = cute.make_rmem_tensor(per_lane, Float32)
    for j in cutlass.range_constexpr(per_lane):
        place = _place(sm, first, count, j)
        biases[j] = ptx.ld_global_f32(bias + Int64(ptx.select(place < 0, Int32(0), place)) * 4)
    ready, polls = Int32(0), Int32(0)
    while ready == 0:
        ready = Int32(1)
        for j in cutlass.range_constexpr(per_lane):
            place = _place(sm, first, count, j)
            at = f["src"] + r * f["src_pitch"] + ptx.select(place < 0, Int32(0), place)
            keys[j], tag = ptx.ld_word(word_address(sm, at))
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
        scores[j] = _score(keys[j])
        key = _ordered(scores[j] + biases[j])
        keys[j] = ptx.select(_place(sm, first, count, j) < 0, Int32(0), key)


def candidate(sm: Sm, r: Int32, place: Int32) -> Int32:
    """(key, expert, score) of a candidate, 16 bytes."""
    return region(sm, "sums") + (r * MAX_CANDIDATES + place) * 16


@cute.jit
def _candidates(
    sm: Sm, r: Int32, first: Int32, per_lane: cutlass.Constexpr, keys: cute.Tensor, scores: cute.Tensor
):  # fmt: skip
    """Lists this warp's keys that may be among the top_k, in any order: those not below the floor."""
    floor = ptx.redux_min_u32(ptx.ld_shared_b32(largest_address(sm, r, sm.lane % GROUPS)))
    floor = ptx.max_u32(floor, Int32(1))
    masks = cute.make_rmem_tensor(per_lane, Int32)
    count = Int32(0)
    for j in cutlass.range_constexpr(per_lane):
        masks[j] = ptx.ballot(ptx.not_below_u32(keys[j], floor))
        count += ptx.popc(masks[j])
    start = Int32(0)
    if sm.lane == 0:
        start = ptx.atomic_add_shared(found_address(sm, r), count)
    start = ptx.shfl(start, Int32(0))
    if start + count <= MAX_CANDIDATES:
        for j in cutlass.range_constexpr(per_lane):
            if ptx.not_below_u32(keys[j], floor):
                place = start + ptx.popc(masks[j] & ((Int32(1) << sm.lane) - 1))
                ptx.st_shared_v2_b32(candidate(sm, r, place), keys[j], first + sm.lane + 32 * j)
                ptx.st_shared_f32(candidate(sm, r, place) + 8, scores[j])
            start += ptx.popc(masks[j])


@cute.jit
def _rank(sm: Sm, r: Int32, thread: Int32):
    """Counts, for each candidate, those before it; the one with a before it is pick a. A few threads of a warp share
    one, each takes every so many of the others, four at a time."""
    found = ptx.ld_shared_b32(found_address(sm, r))
    found = ptx.select(found <= MAX_CANDIDATES, found, Int32(0))
    i, offset = thread // share(sm.shape), thread % share(sm.shape)
    while i - thread // share(sm.shape) < found:
        at = candidate(sm, r, ptx.select(i < found, i, Int32(0)))
        key, expert = ptx.ld_shared_v2_b32(at)
        rank = Int32(0)
        for other in range(offset, found, 4 * share(sm.shape)):
            keys, experts = cute.make_rmem_tensor(4, Int32), cute.make_rmem_tensor(4, Int32)
            for j in cutlass.range_constexpr(4):
                k = other + j * share(sm.shape)
                keys[j], experts[j] = ptx.ld_shared_v2_b32(candidate(sm, r, ptx.select(k < found, k, other)))
                keys[j] = ptx.select(k < found, keys[j], Int32(0))
            for j in cutlass.range_constexpr(4):
                rank += ptx.select(ptx.above_u32(keys[j], key, experts[j] < expert), Int32(1), Int32(0))
        ptx.sync_warp()
        for step in cutlass.range_constexpr(share(sm.shape).bit_length() - 1):
            rank += ptx.shfl(rank, sm.lane ^ (1 << step))
        if (i < found) & (rank < sm.shape.top_k) & (offset == 0):
            ptx.st_shared_b32(pick_address(sm, r, rank), expert)
            ptx.st_shared_f32(weight_address(sm, r, rank), ptx.ld_shared_f32(at + 8))
        i += PASS


@cute.jit
def _pick_one_by_one(sm: Sm, f: Fields, r: Int32):
    """Where many keys are equal: one warp takes the largest key left, top_k times. All logits are there."""
    per_lane = -(-sm.shape.num_experts // 32)
    logits, bias = f["src"] + r * f["src_pitch"], address_of(f, "weight")
    keys = cute.make_rmem_tensor(per_lane, Int32)
    for j in cutlass.range_constexpr(per_lane):
        keys[j] = Int32(0)
        if sm.lane + 32 * j < sm.shape.num_experts:
            logit, _ = ptx.ld_word(word_address(sm, logits + sm.lane + 32 * j))
            keys[j] = _ordered(_score(logit) + ptx.ld_global_f32(bias + Int64(sm.lane + 32 * j) * 4))
    mine = Int32(0)
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
        for j in cutlass.range_constexpr(per_lane):
            keys[j] = ptx.select(expert == sm.lane + 32 * j, Int32(0), keys[j])
        mine = ptx.select(sm.lane == a, expert, mine)
    logit, _ = ptx.ld_word(word_address(sm, logits + mine))
    return mine, ptx.select_f32(sm.lane < sm.shape.top_k, _score(logit), Float32(0.0))


@cute.jit
def _ordered(key: Float32) -> Int32:
    """Bits of a float that compare as unsigned integers; at least 1, because 0 stands for a key that is gone."""
    bits = ptx.float_bits(key + Float32(0.0))  # -0 and 0 are one key
    return ptx.select(bits < 0, ~bits, bits | Int32(-(1 << 31)))


@cute.jit
def _list_picks(sm: Sm):
    """The list where there is one batch row: its picks in ascending order, by counting."""
    ptx.sync_warp()
    if sm.lane < sm.shape.top_k:
        expert, place = ptx.ld_shared_b32(pick_address(sm, Int32(0), sm.lane)), Int32(0)
        for a in cutlass.range_constexpr(sm.shape.top_k):
            other = ptx.ld_shared_b32(pick_address(sm, Int32(0), Int32(a)))
            place += ptx.select(other < expert, Int32(1), Int32(0))
        ptx.st_shared_b32(region(sm, "ids") + 16 + place * 4, expert)
        ptx.st_shared_u8(region(sm, "slot_of") + place * 8, sm.lane)
    if sm.lane == 0:
        ptx.st_shared_b32(region(sm, "ids"), Int32(sm.shape.top_k))


@cute.jit
def _list_distinct(sm: Sm):
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


assert CONSUMERS >= 2 * MAX_PICKS and GROUPS >= PICKS
