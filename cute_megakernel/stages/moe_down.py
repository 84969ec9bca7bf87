"""moe_down and moe_down_mxfp4: this SM's outputs, over all picked experts.

    y[r] = sum over picks of topk_weights * (w2[expert] . m[r, pick])

The experts of the step come one after the other in ascending order. A warp does a piece of one expert, scales it by
the weight that each batch row gives that expert, and leaves it at the row's pick, for the rows that picked it; at the
end the picks of a row are added in their own order, so a row does not depend on what its neighbours picked.

Rounding   float32 sums and weights, one rounding to bfloat16 at the end
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_megakernel import ptx
from cute_megakernel.core import (
    Fields,
    Sm,
    first_own,
    pass_by,
    region,
    release,
    ring_slot,
    sync,
    wait_full,
    word_address,
)
from cute_megakernel.shape import PICKS, SLOT_BYTES
from cute_megakernel.stages.moe_router import NOT_PICKED
from cute_megakernel.stages.tiles import (
    add_sums,
    lane_inputs,
    lane_row,
    multiply,
    products,
    sums_address,
    unit_of_thread,
)

HALF_SLOT = SLOT_BYTES // 2


@cute.jit
def serves(sm: Sm, expert: Int32, r0: Int32, r1: Int32) -> Int32:
    """Whether any batch row of [r0, r1) picked the expert at this place of the list."""
    found = Int32(0)
    for r in range(r0, r1):
        if ptx.ld_shared_u8(region(sm, "slot_of") + expert * 8 + r) != NOT_PICKED:
            found = Int32(1)
    return found


@cute.jit
def served_experts(sm: Sm, r0: Int32, r1: Int32) -> Int32:
    """How many experts of the list any batch row of [r0, r1) picked: all of them where those are all batch rows."""
    experts = ptx.ld_shared_b32(region(sm, "ids"))
    count = experts
    if r1 - r0 != sm.shape.rows:
        count = Int32(0)
        for expert in range(experts):
            count += serves(sm, expert, r0, r1)
    return count


@cute.jit
def _expert_of(sm: Sm, piece: Int32, per_expert: Int32, r0: Int32, r1: Int32):
    """Place in the list of the expert that a piece belongs to, and the number of pieces before it."""
    expert = piece // per_expert
    before = expert * per_expert
    if r1 - r0 != sm.shape.rows:
        following = Int32(0)
        for place in range(ptx.ld_shared_b32(region(sm, "ids"))):
            if (following <= piece) & (serves(sm, place, r0, r1) != 0):
                expert, before = place, following
                following += per_expert
    return expert, before


@cute.jit
def moe_down(sm: Sm, f: Fields, pos: Int32, low: Int32, high: Int32) -> Int32:
    """Experts of the list one after the other, each cut into the same pieces; a warp does those in its slots."""
    ppt, tpp, tiles, r0, r1 = f["ppt"], f["tpp"], high - low, f["r0"], f["r1"]
    per_expert = (tiles * ppt + tpp - 1) // tpp
    pieces = served_experts(sm, r0, r1) * per_expert
    own = first_own(sm, pos)
    while 2 * own + (sm.warp & 1) < pieces:
        piece = 2 * own + (sm.warp & 1)
        expert, before = _expert_of(sm, piece, per_expert, r0, r1)
        _piece(sm, f, pos + own, piece, before, expert, tiles)
        own += sm.shape.slots
    slots = (pieces + 1) // 2
    pass_by(sm, pos, own, slots)
    sync(sm)
    place, row, half, mine = unit_of_thread(sm, tiles)
    if mine & (row < r1 - r0):
        v0, v1, v2, v3 = add_sums(sm, place * ppt * PICKS, row, half, ppt * sm.shape.top_k)
        at = f["dst"] + (row + r0) * f["dst_pitch"] + 4 * (low + place) + 2 * half
        ptx.st_word_pair(word_address(sm, at), ptx.pack_bf16(v0, v1), ptx.pack_bf16(v2, v3), sm.tag)
    return pos + slots


@cute.jit
def _piece(sm: Sm, f: Fields, pos: Int32, piece: Int32, before: Int32, expert: Int32, tiles: Int32):
    """One piece of an expert, scaled by the weight each batch row gives it, to the place of that pick."""
    ppt, tpp, blocks = f["ppt"], f["tpp"], f["piece"]
    first = (piece - before) * tpp  # tile and piece of this SM's, pieces counted through
    in_tile = first - ((first * f["magic"]) >> 20) * ppt
    row = lane_row(sm, sm.shape.mxfp4)
    x, second = _x_of(sm, f, expert, row), Int32(0)
    if cutlass.const_expr(products(sm.shape) == 2):
        second = _x_of(sm, f, expert, row + 4) - x
    x = x + lane_inputs(sm, sm.shape.mxfp4) + in_tile * blocks * (128 if sm.shape.mxfp4 else 64)
    targets = _targets(sm, f, expert)
    wait_full(sm, pos)
    address = ring_slot(sm, pos) + (piece & 1) * (HALF_SLOT)
    t = Int32(0)
    while (t < tpp) & (first + t < tiles * ppt):
        sums = multiply(sm, address, x, second, blocks, sm.shape.mxfp4)
        for p in cutlass.range_constexpr(products(sm.shape)):
            _put(sm, targets[p], ppt, sm.quad + 4 * p, first + t, in_tile, sums[p])
        address = address + blocks * sm.shape.block_bytes
        t += 1
    release(sm, pos)


def _pick_of(sm: Sm, f: Fields, expert: Int32, row: Int32) -> Int32:
    """Which pick of the batch row the expert is, NOT_PICKED where it is none or there is no such row."""
    inside = row < f["r1"] - f["r0"]
    pick = ptx.ld_shared_u8(region(sm, "slot_of") + expert * 8 + ptx.select(inside, row + f["r0"], f["r0"]))
    return ptx.select(inside, pick, Int32(NOT_PICKED))


def _x_of(sm: Sm, f: Fields, expert: Int32, row: Int32) -> Int32:
    """Inputs of the expert from a batch row; any where it did not pick it."""
    pick = _pick_of(sm, f, expert, row)
    at = row * f["x_pitch"] + pick * f["group_pad"] * 2
    return region(sm, "x") + ptx.select(pick != NOT_PICKED, at, Int32(0))


def _targets(sm: Sm, f: Fields, expert: Int32) -> tuple:
    """For the batch row of this lane in each product: which of its picks the expert is, and the weight of that."""
    found = []
    for p in range(products(sm.shape)):
        pick = _pick_of(sm, f, expert, sm.quad + 4 * p)
        row = ptx.select(pick != NOT_PICKED, f["r0"] + sm.quad + 4 * p, Int32(0))
        found.append((pick, ptx.ld_shared_f32(region(sm, "pick_weights") + (row * 32 + (pick & 31)) * 4)))
    return tuple(found)


@cute.jit
def _put(sm: Sm, target: tuple, ppt: Int32, row: Int32, piece: Int32, in_tile: Int32, value: Float32):
    """The weighted product of a batch row, to the place of its pick: [tile, pick, piece of the tile]."""
    pick, weight = target
    if pick != NOT_PICKED:
        entry = (piece - in_tile) * PICKS + pick * ppt + in_tile
        ptx.st_shared_f32(sums_address(sm, entry) + row * 32 + sm.group * 4, weight * value)
