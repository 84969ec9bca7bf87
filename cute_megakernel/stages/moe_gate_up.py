"""moe_gate_up and moe_gate_up_mxfp4 with the activation behind them: this SM's share of all tiles of the picked experts.

The tiles of all distinct experts of the step, `total` an expert, are dealt out in equal ranges; which they are, is known
once the router has decided, to the streaming warp as well. Each run of tiles of one expert is one segment of the ring.

Rounding   float32 sums; gate and up to bfloat16, the activation to bfloat16
"""

import cutlass.cute as cute
from cutlass import Int32

from cute_megakernel import ptx
from cute_megakernel.core import (Fields, Sm, finish_segment, region, sync)
from cute_megakernel.shape import SLOT_BYTES
from cute_megakernel.stages.linear import activated
from cute_megakernel.stages.moe_router import NOT_PICKED
from cute_megakernel.stages.tiles import add_sums, multiply_tile, put_sums, unit_of_thread, x_address


def share(sm: Sm, experts: Int32, total: Int32):
    """First and end of this SM's tiles among `experts * total`."""
    tiles = experts * total
    return sm.block * tiles // sm.shape.sms, (sm.block + 1) * tiles // sm.shape.sms


@cute.jit
def moe_gate_up(sm: Sm, f: Fields, pos: Int32) -> Int32:
    kb, total = f["kb"], f["total"]
    rows = f["r1"] - f["r0"]
    x = x_address(sm, f["x_pitch"], rows)
    block_inputs = 64 if sm.shape.mxfp4 else 32
    step = ptx.select(sm.group < rows, Int32(2 * block_inputs), Int32(0))
    tile, end = share(sm, ptx.ld_shared_b32(region(sm, "ids")), total)
    turn = Int32(0)
    per_slot = SLOT_BYTES // sm.shape.block_bytes
    while tile < end:
        expert = tile // total
        stop = ptx.select(end < (expert + 1) * total, end, (expert + 1) * total)
        first, held = tile, Int32(-1)
        while tile < stop:
            count = ptx.select(stop - tile < sm.shape.tiles_in_group, stop - tile, Int32(sm.shape.tiles_in_group))
            for place in range(count):
                local = tile + place - expert * total
                held, c0, c1 = multiply_tile(
                    sm, pos, held, (tile + place - first) * kb, local, kb, x, step, sm.shape.mxfp4,
                    sm.shape.up_chunk,
                )
                put_sums(sm, turn, place, c0, c1)
            sync(sm)
            place, row, half, mine = unit_of_thread(sm, count)
            if mine & (row < rows):
                r = row + f["r0"]
                pick = ptx.ld_shared_u8(region(sm, "slot_of") + expert * 8 + r)
                if pick != NOT_PICKED:
                    values = add_sums(sm, turn, place, row, half)
                    at = f["dst"] + r * f["dst_pitch"] + pick * (f["n_valid"] // 4)
                    tap = f["tap"] + r * f["tap_pitch"] + pick * (f["n_valid"] // 2)
                    n = 8 * (tile + place - expert * total) + 4 * half
                    activated(sm, f, at, tap, f["n_valid"], n, values)
            turn = turn ^ 1
            tile += count
        pos = finish_segment(sm, pos, held, ((stop - first) * kb + per_slot - 1) // per_slot)
    return pos
