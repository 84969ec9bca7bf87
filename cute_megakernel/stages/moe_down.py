"""moe_down and moe_down_mxfp4: this SM's outputs, over all picked experts.

    y[r] = sum over picks of topk_weights * (w2[expert] . m[r, pick])

The experts of the step come one after the other in ascending order. A warp does a piece of one expert, scales it by
the weight that each batch row gives that expert, and leaves it at the row's pick; at the end the picks of a row are
added in their own order, so a row does not depend on what its neighbours picked. Rows that did not pick an expert read
zeros for it.

Rounding   float32 sums and weights, one rounding to bfloat16 at the end
"""

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_megakernel import ptx
from cute_megakernel.core import (
    Fields,
    Sm,
    first_own,
    pass_by_old,
    region,
    release,
    ring_slot,
    sync,
    wait_full,
)
from cute_megakernel.shape import CONSUMERS, PICKS, SLOT_BYTES
from cute_megakernel.stages.linear import finish
from cute_megakernel.stages.moe_router import NOT_PICKED
from cute_megakernel.stages.residual_add import ask_addends
from cute_megakernel.stages.tiles import add_sums, multiply, sums_address, unit_of_thread

HALF_SLOT = SLOT_BYTES // 2


@cute.jit
def serves(sm: Sm, expert: Int32, r0: Int32, r1: Int32) -> Int32:
    """Whether any batch row of [r0, r1) picked the expert at this place of the list."""
    found = ptx.select(r1 - r0 == sm.shape.rows, Int32(1), Int32(0))  # an expert of the list was picked by some row
    for r in range(r0, ptx.select(found != 0, r0, r1)):
        if ptx.ld_shared_u8(region(sm, "slot_of") + expert * 8 + r) != NOT_PICKED:
            found = Int32(1)
    return found


@cute.jit
def moe_down(sm: Sm, f: Fields, pos: Int32, low: Int32, high: Int32) -> Int32:
    """Experts of the list one after the other, each cut into the same pieces; a warp does those in its slots."""
    ppt, tpp, tiles, r0, r1 = f["ppt"], f["tpp"], high - low, f["r0"], f["r1"]
    per_expert = (tiles * ppt + tpp - 1) // tpp
    place, row, half = unit_of_thread(sm)
    mine = place < tiles
    mine = mine & (row < r1 - r0)
    at = (row + r0) * f["dst_pitch"] + 4 * (low + place) + 2 * half
    asked = ask_addends(sm, f, mine, at)
    _clear_sums(sm, tiles * ppt)
    sync(sm)
    experts = ptx.ld_shared_b32(region(sm, "ids"))
    own, done = first_own(sm, pos), Int32(0)  # pieces of the experts before
    for expert in range(experts):
        if serves(sm, expert, r0, r1) != 0:
            while 2 * own + (sm.warp & 1) < done + per_expert:
                _piece(sm, f, pos + own, 2 * own + (sm.warp & 1), done, expert, tiles)
                own += sm.shape.slots
            done += per_expert
    slots = (done + 1) // 2
    pass_by_old(sm, pos, own, slots)
    sync(sm)
    if mine:
        finish(sm, f, add_sums(sm, place * ppt * PICKS, row, half, ppt * PICKS), asked, at)
    return pos + slots


@cute.jit
def _clear_sums(sm: Sm, pieces: Int32):
    i = sm.thread
    while i < pieces * (PICKS * sm.shape.rows * 4):
        ptx.st_shared_v2_f32(region(sm, "sums") + i * 8, Float32(0.0), Float32(0.0))
        i += CONSUMERS


@cute.jit
def _piece(sm: Sm, f: Fields, pos: Int32, piece: Int32, before: Int32, expert: Int32, tiles: Int32):
    """One piece of an expert, scaled by the weight each batch row gives it, to the place of that pick."""
    rows, r0, ppt, tpp, blocks = f["r1"] - f["r0"], f["r0"], f["ppt"], f["tpp"], f["piece"]
    pick = Int32(NOT_PICKED)
    if sm.group < rows:
        pick = ptx.ld_shared_u8(region(sm, "slot_of") + expert * 8 + sm.group + r0)
    picked = ptx.select(pick != NOT_PICKED, Int32(1), Int32(0))
    step = picked * (128 if sm.shape.mxfp4 else 64)
    at = region(sm, "x") + f["x_at"] + sm.group * f["x_pitch"] + pick * f["group_pad"] * 2 + sm.quad * 16
    weight = ptx.ld_shared_f32(region(sm, "pick_weights") + ((sm.group + r0) * 32 + picked * pick) * 4)
    first = (piece - before) * tpp  # tile and piece of this SM's, pieces counted through
    in_tile = first - ((first * f["magic"]) >> 20) * ppt
    x = ptx.select(picked != 0, at + in_tile * blocks * step, region(sm, "zero"))
    wait_full(sm, pos)
    address = ring_slot(sm, pos) + (piece & 1) * (HALF_SLOT)
    t = Int32(0)
    while (t < tpp) & (first + t < tiles * ppt):
        c0, c1 = multiply(sm, address, x, step, blocks, sm.shape.mxfp4)
        if picked != 0:
            entry = _entry(first + t, in_tile, pick, ppt)
            sums = sums_address(sm, entry) + sm.group * 32 + sm.quad * 8
            ptx.st_shared_v2_f32(sums, weight * c0, weight * c1)
        address = address + blocks * sm.shape.block_bytes
        t += 1
    release(sm, pos)


def _entry(piece: Int32, in_tile: Int32, pick: Int32, ppt: Int32) -> Int32:
    """[tile, pick, piece of the tile]"""
    return (piece - in_tile) * PICKS + pick * ppt + in_tile
