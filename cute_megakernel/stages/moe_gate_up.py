"""moe_gate_up and moe_gate_up_mxfp4 with the activation behind them: this SM's share of the tiles of picked experts.

The tiles of all distinct experts of the step, `total` an expert, are dealt out in equal ranges; which they are is known
once the router has decided, to the streaming warp as well.

Rounding   float32 sums; gate and up to bfloat16, the activation to bfloat16
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

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
from cute_megakernel.stages.linear import activated
from cute_megakernel.stages.moe_router import NOT_PICKED
from cute_megakernel.stages.tiles import add_sums, lane_weights, multiply, put_sums, unit_of_thread, x_address


def share(sm: Sm, experts: Int32, total: Int32):
    """First and end of this SM's tiles among `experts * total`."""
    tiles = experts * total
    return sm.block * tiles // sm.shape.sms, (sm.block + 1) * tiles // sm.shape.sms


@cute.jit
def moe_gate_up(sm: Sm, f: Fields, pos: Int32) -> Int32:
    rows, ppt = f["r1"] - f["r0"], f["ppt"]
    low, high = share(sm, ptx.ld_shared_b32(region(sm, "ids")), f["total"])
    pieces, end = (high - low) * ppt, Int32(0)
    piece, phase = first_piece(sm, pos), first_phase(sm, pos)
    start, turn = low, Int32(0)
    while start < high:
        count = ptx.smaller(high - start, f["group_tiles"])
        end = ptx.smaller(end + f["group_pieces"], pieces)
        while piece < end:
            _piece(sm, f, phase, piece, turn * sm.shape.sums - (start - low) * ppt)
            piece, phase = piece + 2 * sm.shape.slots, phase ^ 1
        sync(sm)
        place, row, half = unit_of_thread(sm)
        if (place < count) & (row < rows):
            _finish(sm, f, turn * sm.shape.sums + place * ppt, start + place, row, half)
        turn = turn ^ 1
        start += count
    slots = (pieces + 1) >> 1
    pass_by(sm, phase, piece, slots)
    return pos + slots


@cute.jit
def _piece(sm: Sm, f: Fields, phase: Int32, piece: Int32, entry: Int32):
    """One piece of this SM's tiles; its sums go to `entry` + piece."""
    blocks = f["piece"]
    in_tile = piece - ((piece * f["magic"]) >> 20) * f["ppt"]
    x, second = x_address(sm, f, f["r1"] - f["r0"], sm.shape.mxfp4)
    x = x + in_tile * blocks * (128 if sm.shape.mxfp4 else 64)
    wait_own(sm, phase)
    address = own_slot(sm) + (sm.warp & 1) * f["second"]
    if cutlass.const_expr(not sm.shape.mxfp4):
        address = address + lane_weights(sm, f["pitch"])
    put_sums(sm, entry + piece, multiply(sm, address, x, second, blocks, sm.shape.mxfp4))
    release_own(sm)


@cute.jit
def _finish(sm: Sm, f: Fields, entry: Int32, tile: Int32, row: Int32, half: Int32):
    """Two outputs of the activation, where the batch row picked the tile's expert."""
    expert, r = tile // f["total"], row + f["r0"]
    pick = ptx.ld_shared_u8(region(sm, "slot_of") + expert * 8 + r)
    if pick != NOT_PICKED:
        values = add_sums(sm, entry, row, half, f["ppt"])
        dst = f["dst"] + r * f["dst_pitch"] + pick * (f["n_valid"] // 4)
        tap = f["tap"] + r * f["tap_pitch"] + pick * (f["n_valid"] // 2)
        activated(sm, f, dst, tap, f["n_valid"], 8 * (tile - expert * f["total"]) + 4 * half, values)
