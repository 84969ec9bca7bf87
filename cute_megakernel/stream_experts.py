"""What the streaming warp copies of the experts, once the router has decided which: their tiles for moe_gate_up, this
SM's outputs of all of them for moe_down. bfloat16 row by row, MXFP4 in its blocks."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_megakernel import ptx
from cute_megakernel.core import Fields, Sm, address_of, region, ring_slot, wait_barrier
from cute_megakernel.stages.moe_down import served_experts, serves
from cute_megakernel.stages.moe_gate_up import share
from cute_megakernel.stream_slots import Rows, copy_rows, full_barrier, further, most_slots, reserve, wait_turn


@cute.jit
def gate_up(sm: Sm, f: Fields, pos: Int32, cap: Int32) -> Int32:
    """This SM's tiles of the picked experts, two pieces a slot; where an expert ends, the next piece is another's."""
    wait_barrier(sm, region(sm, "ids_ready"), (f["sub"] - sm.batch["first_moe"]) & 1)
    low, high = share(sm, ptx.ld_shared_b32(region(sm, "ids")), f["total"])
    if low < high:
        place = low // f["total"]
        if cutlass.const_expr(sm.shape.mxfp4):
            pos = _gate_up_blocks(sm, f, pos, place, low - place * f["total"], high - low, cap)
        else:
            pos = _gate_up_rows(sm, f, pos, place, low - place * f["total"], high - low, cap)
    return pos


@cute.jit
def _gate_up_blocks(sm: Sm, f: Fields, pos: Int32, place: Int32, tile: Int32, tiles: Int32, cap: Int32) -> Int32:
    nbytes, last = f["piece"] * sm.shape.block_bytes, f["total"] * f["ppt"]
    left, inside = tiles * f["ppt"], tile * f["ppt"]  # piece of the expert
    most, weight, stride = most_slots(sm, cap, 2 * nbytes), address_of(f, "weight"), address_of(f, "expert_stride")
    while left > 0:
        count = ptx.smaller(left, Int32(2))
        reserve(sm, pos, count * nbytes, most)
        for side in range(count):
            if inside == last:
                place, inside = place + 1, Int32(0)
            source = weight + Int64(inside) * Int64(nbytes)
            _put_piece(sm, pos, side * nbytes, source, stride, place, nbytes)
            inside += 1
        left -= count
        pos += 1
    return pos


@cute.jit
def _gate_up_rows(sm: Sm, f: Fields, pos: Int32, place: Int32, tile: Int32, tiles: Int32, cap: Int32) -> Int32:
    rows, total, stride = Rows(f), f["total"], address_of(f, "expert_stride")
    left, inside, together = tiles * rows.ppt, Int32(0), side_by_side(rows)
    most = most_slots(sm, cap, 16 * rows.piece)
    while left > 0:
        count = ptx.smaller(left, Int32(2))
        reserve(sm, pos, count * 8 * rows.piece, most)
        side = Int32(0)
        while side < count:
            if tile == total:
                place, tile = place + 1, Int32(0)
            weight = rows.weight + Int64(expert_at(sm, place)) * stride
            copy_rows(sm, rows, pos, side * 8 * rows.pitch, weight, tile, inside, together)
            tile, inside = further(rows, tile, inside, together)
            side += together
        left -= count
        pos += 1
    return pos


def side_by_side(rows: Rows) -> Int32:
    """Pieces that one call of `_copy_rows` puts into a slot."""
    return ptx.select(rows.copy > rows.piece, Int32(2), Int32(1))


def expert_at(sm: Sm, place: Int32) -> Int32:
    """The expert at a place of the list."""
    return ptx.ld_shared_b32(region(sm, "ids") + 16 + place * 4)


@cute.jit
def _put_piece(sm: Sm, pos: Int32, at: Int32, source: Int64, stride: Int64, place: Int32, nbytes: Int32):
    """Copies a piece of the expert at `place` of the list, which the first expert has at `source`, to `at` bytes of the
    slot."""
    if sm.lane == 0:
        source = source + Int64(expert_at(sm, place)) * stride
        ptx.bulk_copy(ring_slot(sm, pos) + at, source, nbytes, full_barrier(sm, pos))


@cute.jit
def down(sm: Sm, f: Fields, pos: Int32, first: Int32, end: Int32, cap: Int32) -> Int32:
    wait_barrier(sm, region(sm, "ids_ready"), (f["sub"] - sm.batch["first_moe"]) & 1)
    if first < end:
        pos = _down_experts(sm, f, pos, first, end, cap)
    if f["local"] != 0:
        ptx.sync_warp()
        if sm.lane == 0:
            ptx.mbarrier_arrive(region(sm, "ids_free"))
    return pos


@cute.jit
def _down_experts(sm: Sm, f: Fields, pos: Int32, first: Int32, end: Int32, cap: Int32) -> Int32:
    """This SM's outputs of every expert that its batch rows picked, cut into pieces, two a slot."""
    rows, block = Rows(f), f["piece"] * sm.shape.block_bytes
    units, together, r0, r1 = (end - first) * rows.ppt, Int32(1), f["r0"], f["r1"]
    if cutlass.const_expr(not sm.shape.mxfp4):
        together = side_by_side(rows)
    step = together * rows.tpp
    left, side = served_experts(sm, r0, r1) * ((units + step - 1) // step), Int32(0)
    slots = most_slots(sm, cap, (3 - together) * ptx.smaller(units, step) * block)
    for place in range(ptx.ld_shared_b32(region(sm, "ids"))):
        wanted = Int32(1)
        if r1 - r0 != sm.shape.rows:
            wanted = serves(sm, place, r0, r1)
        done, tile, inside = ptx.select(wanted != 0, Int32(0), units), first, Int32(0)
        while done < units:
            count = ptx.smaller(units - done, step)
            if side == 0:
                wait_turn(sm, pos, slots)
            last = (side == 1) | (left == 1) | (together == 2)
            if sm.lane == 0:
                ptx.mbarrier_expect_part(full_barrier(sm, pos), count * block, last)
            ptx.sync_warp()
            _down_piece(sm, f, rows, pos, side * f["second"], place, tile, inside, count)
            tile, inside = further(rows, tile, inside, count)
            done, left, side = done + step, left - 1, side + together
            if last:
                pos, side = pos + 1, Int32(0)
    return pos


@cute.jit
def _down_piece(
    sm: Sm, f: Fields, rows: Rows, pos: Int32, at: Int32, place: Int32, tile: Int32, inside: Int32, count: Int32
):
    stride = address_of(f, "expert_stride")
    if cutlass.const_expr(sm.shape.mxfp4):
        nbytes = f["piece"] * sm.shape.block_bytes
        source = rows.weight + Int64(tile * rows.ppt + inside) * Int64(nbytes)
        _put_piece(sm, pos, at, source, stride, place, count * nbytes)
    else:
        copy_rows(sm, rows, pos, at, rows.weight + Int64(expert_at(sm, place)) * stride, tile, inside, count)
