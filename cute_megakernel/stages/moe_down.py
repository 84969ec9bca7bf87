"""moe_down and moe_down_mxfp4: this SM's outputs, over all picked experts.

    y[r] = sum over picks of topk_weights * (w2[expert] . m[r, pick])

The experts of the step come one after the other in ascending order. A warp does a piece of one expert, scales it by
the weight that each batch row gives that expert, and leaves it at the row's pick, for the rows that picked it; at the
end the picks of a row are added in their own order, by quarters, so a row does not depend on what its neighbours
picked.

Rounding   float32 sums and weights, one rounding to bfloat16 at the end
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_megakernel import ptx
from cute_megakernel.core import (
    Fields,
    Sm,
    first_phase,
    first_piece,
    own_slot,
    pass_by,
    region,
    release_own,
    sync,
    wait_own,
)
from cute_megakernel.shape import PICKS
from cute_megakernel.stages.linear import finish
from cute_megakernel.stages.moe_router import NOT_PICKED
from cute_megakernel.stages.residual_add import ask_addends
from cute_megakernel.stages.tiles import (
    add_sums,
    lane_inputs,
    lane_row,
    lane_weights,
    multiply,
    products,
    sums_address,
    unit_of_thread,
)


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
    place, row, half = unit_of_thread(sm, 4)
    mine = (place < tiles) & (row < r1 - r0)
    at = (row + r0) * f["dst_pitch"] + 4 * (low + place) + 2 * half
    asked = ask_addends(sm, f, mine, at)
    pieces = served_experts(sm, r0, r1) * per_expert
    piece, phase = first_piece(sm, pos), first_phase(sm, pos)
    while piece < pieces:
        expert, before = _expert_of(sm, piece, per_expert, r0, r1)
        _piece(sm, f, phase, piece - before, expert, tiles)
        piece, phase = piece + 2 * sm.shape.slots, phase ^ 1
    slots = (pieces + 1) >> 1
    pass_by(sm, phase, piece, slots)
    sync(sm)
    values = _add_picks(sm, place * ppt * PICKS, row, half, ppt, mine)
    if mine & ((sm.thread & 3) == 0):
        finish(sm, f, values, asked, at)
    return pos + slots


@cute.jit
def _add_picks(sm: Sm, entry: Int32, row: Int32, half: Int32, ppt: Int32, mine):
    """Four outputs over the picks of a batch row: four neighbouring threads add a quarter each, then the quarters."""
    quarter = ptx.opaque(sm.thread) & 3
    entries = -(-sm.shape.top_k // 4) * ppt
    count = ptx.smaller(ppt * sm.shape.top_k - quarter * entries, entries)
    v = add_sums(sm, entry + quarter * entries, row, half, ptx.select(mine, count, Int32(0)))
    ptx.sync_warp()
    for step in cutlass.range_constexpr(2):
        v = tuple(value + ptx.shfl_xor(value, 1 << step) for value in v)
    return v


@cute.jit
def _piece(sm: Sm, f: Fields, phase: Int32, piece: Int32, expert: Int32, tiles: Int32):
    """One piece of an expert, scaled by the weight each batch row gives it, to the place of that pick."""
    ppt, tpp, blocks = f["ppt"], f["tpp"], f["piece"]
    first = piece * tpp  # tile and piece of this SM's, pieces counted through
    in_tile = first - ((first * f["magic"]) >> 20) * ppt
    row = lane_row(sm, sm.shape.mxfp4)
    x, second = _x_of(sm, f, expert, row), Int32(0)
    if cutlass.const_expr(products(sm.shape) == 2):
        second = _x_of(sm, f, expert, row + 4) - x
    x = x + lane_inputs(sm, sm.shape.mxfp4) + in_tile * blocks * (128 if sm.shape.mxfp4 else 64)
    targets = _targets(sm, f, expert)
    wait_own(sm, phase)
    address, step = own_slot(sm) + (sm.warp & 1) * f["second"], blocks * sm.shape.block_bytes
    if cutlass.const_expr(not sm.shape.mxfp4):
        address, step = address + lane_weights(sm, f["pitch"]), 8 * f["pitch"]
    t = Int32(0)
    while (t < tpp) & (first + t < tiles * ppt):
        sums = multiply(sm, address, x, second, blocks, sm.shape.mxfp4)
        for p in cutlass.range_constexpr(products(sm.shape)):
            _put(sm, targets[p], ppt, sm.quad + 4 * p, first + t, in_tile, sums[p])
        address = address + step
        t += 1
    release_own(sm)


def _pick_of(sm: Sm, f: Fields, expert: Int32, row: Int32) -> Int32:
    """Which pick of the batch row the expert is, NOT_PICKED where it is none or there is no such row."""
    inside = row < f["r1"] - f["r0"]
    pick = ptx.ld_shared_u8(region(sm, "slot_of") + expert * 8 + ptx.select(inside, row + f["r0"], f["r0"]))
    return ptx.select(inside, pick, Int32(NOT_PICKED))


def _x_of(sm: Sm, f: Fields, expert: Int32, row: Int32) -> Int32:
    """Inputs of the expert from a batch row; any where it did not pick it."""
    pick = _pick_of(sm, f, expert, row)
    at = row * f["x_pitch"] + pick * f["group_pad"] * 2
    return region(sm, "x") + f["x_at"] + ptx.select(pick != NOT_PICKED, at, Int32(0))


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
