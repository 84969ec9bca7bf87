"""How the streaming warp fills slots: their turn, their bytes, contiguous pieces and rows of bfloat16 weights."""

import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_megakernel import ptx
from cute_megakernel.core import Fields, Sm, address_of, region, ring_slot, slot_index, wait_empty, wait_full
from cute_megakernel.shape import SLOT_BYTES


def full_barrier(sm: Sm, pos: Int32) -> Int32:
    return region(sm, "full") + slot_index(sm, pos) * 8


def most_slots(sm: Sm, cap: Int32, per_slot: Int32) -> Int32:
    """Slots of `per_slot` bytes that may be on their way at a time."""
    return ptx.smaller(cap * SLOT_BYTES // per_slot, Int32(sm.shape.slots))


@cute.jit
def wait_turn(sm: Sm, pos: Int32, most: Int32):
    """Until the slot is free and fewer than `most` are on their way."""
    wait_empty(sm, pos)
    if pos >= most:
        wait_full(sm, pos - most)


@cute.jit
def reserve(sm: Sm, pos: Int32, nbytes: Int32, most: Int32):
    """Waits for the slot's turn and announces `nbytes`."""
    wait_turn(sm, pos, most)
    if sm.lane == 0:
        ptx.mbarrier_expect(full_barrier(sm, pos), nbytes)
    ptx.sync_warp()


class Rows:
    """How a bfloat16 weight of a row lies in memory and in the slots."""

    def __init__(self, f: Fields):
        self.weight, self.row_bytes, self.pair = address_of(f, "weight"), f["row_bytes"], f["pair"]
        self.ppt, self.tpp, self.piece = f["ppt"], f["tpp"], f["piece"] * 64
        self.copy, self.pitch = f["copy"], f["pitch"]


@cute.jit
def further(rows: Rows, tile: Int32, inside: Int32, count: Int32):
    """The piece `count` behind piece `inside` of `tile`; two pieces at most, where a tile has several."""
    if rows.ppt == 1:
        tile = tile + count
    else:
        inside = inside + count
        if inside >= rows.ppt:
            tile, inside = tile + 1, inside - rows.ppt
    return tile, inside


@cute.jit
def copy_rows(
    sm: Sm, rows: Rows, pos: Int32, at: Int32, weight: Int64, tile: Int32, inside: Int32, count: Int32
):  # fmt: skip
    """`count` pieces from piece `inside` of `tile` on, to `at` bytes of the slot; each lane copies rows of its own."""
    copies = count * 8
    if rows.copy > rows.piece:  # the two pieces of a slot side by side
        copies = Int32(8)
    j = sm.lane
    while j < copies:
        t, column = further(rows, tile, inside, j >> 3)
        row = 8 * t + (j & 7)
        if rows.pair > 0:
            row = 4 * t + ((j & 7) >> 1) + (j & 1) * rows.pair
        source = weight + Int64(row) * Int64(rows.row_bytes) + Int64(column * rows.piece)
        ptx.bulk_copy(ring_slot(sm, pos) + at + j * rows.pitch, source, rows.copy, full_barrier(sm, pos))
        j += 32


@cute.jit
def copy(sm: Sm, pos: Int32, source: Int64, nbytes: Int32, per_slot: Int32, cap: Int32) -> Int32:
    """A contiguous piece of memory into as many slots as it takes, `per_slot` bytes each."""
    done, most = Int32(0), most_slots(sm, cap, per_slot)
    while done < nbytes:
        size = ptx.select(nbytes - done < per_slot, nbytes - done, per_slot)
        reserve(sm, pos, size, most)
        if sm.lane == 0:
            ptx.bulk_copy(ring_slot(sm, pos), source + Int64(done), size, full_barrier(sm, pos))
        pos += 1
        done += per_slot
    return pos
