"""moe_down and moe_down_mxfp4: this SM's outputs, over all picked experts.

    y[r] = sum over picks of topk_weights * (w2[expert] . m[r, pick])

The experts of the step come one after the other in ascending order; a warp multiplies its blocks of one expert, scales by
the weight that the batch row gives that expert, and adds to its sums in shared memory. Rows that did not pick an expert
read zeros for it. Several experts share a ring slot where their pieces are small.

Rounding   float32 sums and weights, one rounding to bfloat16 at the end
"""

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_megakernel import ptx
from cute_megakernel.core import (Fields, Sm, advance, finish_segment, region, sync, word_address)
from cute_megakernel.shape import SLOT_BYTES
from cute_megakernel.stages.moe_router import NOT_PICKED
from cute_megakernel.stages.tiles import add_sums, multiply_tile, sums_address, unit_of_thread


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
def moe_down(sm: Sm, f: Fields, pos: Int32, low: Int32, high: Int32) -> Int32:
    kb, tiles, r0, r1 = f["kb"], high - low, f["r0"], f["r1"]
    per_slot = SLOT_BYTES // sm.shape.block_bytes
    blocks = tiles * kb
    packed = pieces_in_slot(blocks, per_slot)
    _clear_sums(sm, tiles)
    experts = ptx.ld_shared_b32(region(sm, "ids"))
    held, inside = Int32(-1), Int32(0)  # slot of the run of packed pieces, pieces used up in it
    slot = Int32(0)
    for expert in range(experts):
        if serves(sm, expert, r0, r1) != 0:
            if packed > 0:
                if inside == packed:
                    slot, inside = slot + 1, Int32(0)
                held = advance(sm, pos, held, slot)
                held = _expert(sm, f, pos, held, slot * per_slot + inside * blocks, expert, low, high)
                inside += 1
            else:
                done = _expert(sm, f, pos, Int32(-1), Int32(0), expert, low, high)
                pos = finish_segment(sm, pos, done, (blocks + per_slot - 1) // per_slot)
    if inside > 0:
        pos = finish_segment(sm, pos, held, slot + 1)
    sync(sm)
    place, row, half, mine = unit_of_thread(sm, tiles)
    if mine & (row < r1 - r0):
        v0, v1, v2, v3 = add_sums(sm, Int32(0), place, row, half)
        at = f["dst"] + (row + r0) * f["dst_pitch"] + 4 * (low + place) + 2 * half
        ptx.st_word_pair(word_address(sm, at), ptx.pack_bf16(v0, v1), ptx.pack_bf16(v2, v3), sm.tag)
    return pos


@cute.jit
def _clear_sums(sm: Sm, tiles: Int32):
    for place in range(tiles):
        if sm.group < sm.shape.rows:
            at = sums_address(sm, Int32(0), place) + (sm.warp * sm.shape.rows + sm.group) * 32 + sm.quad * 8
            ptx.st_shared_v2_f32(at, Float32(0.0), Float32(0.0))


@cute.jit
def _expert(sm: Sm, f: Fields, pos: Int32, held: Int32, first_block: Int32, expert: Int32, low: Int32, high: Int32):
    """All tiles of this SM for one expert; their blocks start at `first_block` of the segment at `pos`."""
    kb, rows = f["kb"], f["r1"] - f["r0"]
    block_inputs = 64 if sm.shape.mxfp4 else 32
    pick = Int32(NOT_PICKED)
    if sm.group < rows:
        pick = ptx.ld_shared_u8(region(sm, "slot_of") + expert * 8 + sm.group + f["r0"])
    picked = pick != NOT_PICKED
    at = region(sm, "x") + sm.group * f["x_pitch"] + pick * f["group_pad"] * 2 + sm.quad * 16
    x = ptx.select(picked, at, region(sm, "zero"))
    step = ptx.select(picked, Int32(2 * block_inputs), Int32(0))
    weight = Float32(0.0)
    if picked:
        weight = ptx.ld_shared_f32(region(sm, "pick_weights") + ((sm.group + f["r0"]) * 32 + pick) * 4)
    for place in range(high - low):
        held, c0, c1 = multiply_tile(
            sm, pos, held, first_block + place * kb, low + place, kb, x, step, sm.shape.mxfp4,
            sm.shape.down_chunk,
        )
        if picked:
            sums = sums_address(sm, Int32(0), place) + (sm.warp * sm.shape.rows + sm.group) * 32 + sm.quad * 8
            s0, s1 = ptx.ld_shared_v2_b32(sums)
            ptx.st_shared_v2_f32(sums, ptx.bits_float(s0) + weight * c0, ptx.bits_float(s1) + weight * c1)
    return held
