"""moe_down and moe_down_mxfp4: this SM's outputs, over all picked experts.

    y[r] = sum over picks of topk_weights * (w2[expert] . m[r, pick])

The experts of the step come one after the other in ascending order. A warp does a tile of one expert, scales it by the
weight that each batch row gives that expert, and leaves it at the row's pick; at the end the picks of a row are added in
their own order, so a row does not depend on what its neighbours picked. Rows that did not pick an expert read zeros for
it. Several experts share a ring slot where their pieces are small.

Rounding   float32 sums and weights, one rounding to bfloat16 at the end
"""

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_megakernel import ptx
from cute_megakernel.core import Fields, Sm, finish_segment, region, sync, word_address
from cute_megakernel.shape import CONSUMER_WARPS, CONSUMERS
from cute_megakernel.stages.moe_router import NOT_PICKED
from cute_megakernel.stages.tiles import add_sums, multiply_chunks, unit_of_thread, unit_place

PICKS = 16  # of a batch row at most


@cute.jit
def pieces_in_slot(blocks: Int32, per_slot: Int32) -> Int32:
    """How many experts' pieces of `blocks` blocks one slot takes; 0 where a piece takes several slots."""
    return per_slot // blocks


@cute.jit
def serves(sm: Sm, expert: Int32, r0: Int32, r1: Int32) -> Int32:
    """Whether any batch row of [r0, r1) picked the expert at this place of the list."""
    found = Int32(0)
    for r in range(r0, r1):
        if ptx.ld_shared_u8(region(sm, "slot_of") + expert * 8 + r) != NOT_PICKED:
            found = Int32(1)
    return found


@cute.jit
def moe_down(sm: Sm, f: Fields, cursor: Int32, low: Int32, high: Int32) -> Int32:
    kb, tiles, r0, r1 = f["kb"], high - low, f["r0"], f["r1"]
    per_slot = sm.shape.slot_blocks(sm.shape.down_chunk)
    blocks = tiles * kb
    packed = pieces_in_slot(blocks, per_slot)
    piece_slots = (blocks + per_slot - 1) // per_slot
    _clear_sums(sm, tiles)
    sync(sm)
    experts = ptx.ld_shared_b32(region(sm, "ids"))
    held, done = Int32(-1), Int32(0)  # slot of the row that this warp holds, experts before this one
    slot, inside = Int32(0), Int32(0)  # where the piece at hand is
    for expert in range(experts):
        if serves(sm, expert, r0, r1) != 0:
            place = (sm.warp - done * tiles) & (CONSUMER_WARPS - 1)
            while place < tiles:
                first_block = slot * per_slot + inside * blocks + place * kb
                cursor, held = _expert_tile(sm, f, cursor, held, first_block, expert, place)
                place += CONSUMER_WARPS
            done += 1
            inside += 1
            if packed == 0:
                slot, inside = slot + piece_slots, Int32(0)
            elif inside == packed:
                slot, inside = slot + 1, Int32(0)
    cursor = finish_segment(sm, cursor, held, slot + ptx.select(inside > 0, Int32(1), Int32(0)))
    sync(sm)
    place, row, half, mine = unit_of_thread(sm, tiles)
    if mine & (row < r1 - r0):
        v0, v1, v2, v3 = add_sums(sm, _picked_sums(sm, place) + unit_place(row, half), PICKS)
        at = f["dst"] + (row + r0) * f["dst_pitch"] + 4 * (low + place) + 2 * half
        ptx.st_word_pair(word_address(sm, at), ptx.pack_bf16(v0, v1), ptx.pack_bf16(v2, v3), sm.tag)
    return cursor


def _picked_sums(sm: Sm, place: Int32) -> Int32:
    """Weighted sums of a tile, by pick. [tile, pick, row, 8] float32"""
    return region(sm, "sums") + place * (PICKS * sm.shape.rows * 32)


@cute.jit
def _clear_sums(sm: Sm, tiles: Int32):
    i = sm.thread
    while i < tiles * (PICKS * sm.shape.rows * 4):
        ptx.st_shared_v2_f32(region(sm, "sums") + i * 8, Float32(0.0), Float32(0.0))
        i += CONSUMERS


@cute.jit
def _expert_tile(
    sm: Sm, f: Fields, cursor: Int32, held: Int32, first_block: Int32, expert: Int32, place: Int32
):
    """One warp: a tile of one expert, scaled by the weight each batch row gives it, to the place of that pick."""
    kb, rows, r0 = f["kb"], f["r1"] - f["r0"], f["r0"]
    pick = Int32(NOT_PICKED)
    if sm.group < rows:
        pick = ptx.ld_shared_u8(region(sm, "slot_of") + expert * 8 + sm.group + r0)
    picked = pick != NOT_PICKED
    at = region(sm, "x") + sm.group * f["x_pitch"] + pick * f["group_pad"] * 2 + sm.quad * 16
    x = ptx.select(picked, at, region(sm, "zero"))
    step = ptx.select(picked, Int32(128 if sm.shape.mxfp4 else 64), Int32(0))
    chunk = sm.shape.down_chunk
    cursor, held, c0, c1 = multiply_chunks(
        sm, cursor, held, first_block, Int32(0), 1, kb // chunk, x, step, sm.shape.mxfp4, chunk
    )
    if picked:
        weight = ptx.ld_shared_f32(region(sm, "pick_weights") + ((sm.group + r0) * 32 + pick) * 4)
        sums = _picked_sums(sm, place) + (pick * sm.shape.rows + sm.group) * 32 + sm.quad * 8
        ptx.st_shared_v2_f32(sums, weight * c0, weight * c1)
    return cursor, held

