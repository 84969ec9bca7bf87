"""The streaming warp: copies what the rows of this SM will consume into the ring, in their order, as far ahead as slots
are free. It waits for nothing that is being computed, but for the router's choice of experts.

No more full slots are on their way at a time than the cap of the row and SM, or as many bytes in slots that hold less:
what the memory system has queued for an SM delays the words that it asks for. An SM that has more to read than others
before the next hand-over has a higher cap, and so a larger share of the bandwidth (`schedule.caps`).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_megakernel import ptx
from cute_megakernel.core import (
    Fields,
    Sm,
    address_of,
    fetch_row,
    region,
    ring_slot,
    slot_index,
    wait_barrier,
    wait_empty,
    wait_full,
)
from cute_megakernel.rows import Code
from cute_megakernel.shape import FIELD_WORDS, SLOT_BYTES, SLOT_TOKENS, STATE_BYTES
from cute_megakernel.stages.causal_conv1d import step_bytes, window_at
from cute_megakernel.stages.kda_head import is_new, slot_of_row
from cute_megakernel.stages.mla_cache import page_at, unit_of, units
from cute_megakernel.stages.moe_down import served_experts, serves
from cute_megakernel.stages.moe_gate_up import share


@cute.jit
def stream(sm: Sm, fields: Int64, work: Int64):
    pos, row, rows = Int32(0), sm.batch["first_row"], sm.batch["end_row"]
    low, high, first, end, cap = fetch_row(sm, fields, work, row)
    while row < rows:
        following = ptx.select(row + 1 < rows, row + 1, row)
        next_low, next_high, next_first, next_end, next_cap = fetch_row(sm, fields, work, following)
        if first != end:  # an SM without outputs of moe_down has (1, 0): it passes the list of experts on
            f = Fields(region(sm, "row") + 8 * FIELD_WORDS, row)
            ptx.sync_warp()
            ptx.st_shared_v2_b32(region(sm, "row") + 8 * FIELD_WORDS + sm.lane * 8, low, high)
            ptx.sync_warp()
            pos = _stream_row(sm, f, pos, first, end, cap)
        low, high, first, end, cap = next_low, next_high, next_first, next_end, next_cap
        row += 1


@cute.jit
def _stream_row(sm: Sm, f: Fields, pos: Int32, first: Int32, end: Int32, cap: Int32) -> Int32:
    code = f["code"]
    if code == Code.LINEAR:
        pos = _linear(sm, f, pos, first, end, cap)
    elif code == Code.MOE_GATE_UP:
        pos = _gate_up(sm, f, pos, cap)
    elif code == Code.MOE_DOWN:
        pos = _down(sm, f, pos, first, end, cap)
    elif code == Code.KDA_HEAD:
        pos = _head(sm, f, pos, first, cap)
    elif code == Code.MLA_DECODE:
        pos = _latents(sm, f, pos, cap)
    elif code == Code.MIX:
        _prefetch(sm, f)
    return pos


@cute.jit
def _prefetch(sm: Sm, f: Fields):
    """The weights of a norm that is to come, for all SMs: one of them asks."""
    if (f["kind"] != 0) & (f.number % sm.shape.sms == sm.block) & (sm.lane == 0):
        if address_of(f, "norm") != 0:
            ptx.prefetch(address_of(f, "norm"), f["width"] * 2)
        if f["n_bank"] > 0:
            ptx.prefetch(address_of(f, "weight2"), f["width"] * 4)


@cute.jit
def _head(sm: Sm, f: Fields, pos: Int32, item: Int32, cap: Int32) -> Int32:
    """The state of an item, unless it starts from zeros, and the tiles of its head."""
    K, H = sm.shape.kda_head_dim, sm.shape.kda_heads
    r, h = item // H, item % H
    slot = slot_of_row(sm, f, r)
    old = (slot >= 0) & (is_new(sm, r) == 0)
    _prefetch_head(sm, f, h, slot, old)
    if old:
        source = address_of(f, "pool") + Int64(slot) * address_of(f, "pool_stride") + Int64(h) * (4 * K * K)
        pos = _copy(sm, pos, source, Int32(4 * K * K), Int32(STATE_BYTES), cap)
    for i in cutlass.range_constexpr(2 if sm.shape.low_rank_gate else 1):
        source = address_of(f, ("f_b", "g_b")[i]) + Int64(h) * (2 * K * K)
        pos = _copy(sm, pos, source, Int32(2 * K * K), Int32(STATE_BYTES), cap)
    return pos


@cute.jit
def _prefetch_head(sm: Sm, f: Fields, h: Int32, slot: Int32, old):
    """What the row loads from memory by itself, on its way to the cache: each lane has a contiguous piece of it."""
    K, H = sm.shape.kda_head_dim, sm.shape.kda_heads
    channel = (sm.lane % 3 * H + h) * K  # the first of q, k or v
    if sm.lane < 9:
        if old:
            ptx.prefetch(window_at(sm, f, channel, slot) + sm.lane // 3 * step_bytes(sm), Int32(2 * K))
    elif sm.lane < 12:
        ptx.prefetch(address_of(f, "weight") + Int64(channel) * 16, Int32(16 * K))
    elif sm.lane == 12:
        ptx.prefetch(address_of(f, "weight2") + Int64(h) * (4 * K), Int32(4 * K))
    elif sm.lane == 13:
        ptx.prefetch(address_of(f, "norm"), Int32(4 * K))
    elif sm.lane == 14:
        ptx.prefetch_line(address_of(f, "A_log") + Int64(h) * 4)
    ptx.sync_warp()


@cute.jit
def _copy(sm: Sm, pos: Int32, source: Int64, nbytes: Int32, per_slot: Int32, cap: Int32) -> Int32:
    """A contiguous piece of memory into as many slots as it takes, `per_slot` bytes each."""
    done, most = Int32(0), _most_slots(sm, cap, per_slot)
    while done < nbytes:
        size = ptx.select(nbytes - done < per_slot, nbytes - done, per_slot)
        _reserve(sm, pos, size, most)
        if sm.lane == 0:
            ptx.bulk_copy(ring_slot(sm, pos), source + Int64(done), size, _full(sm, pos))
        pos += 1
        done += per_slot
    return pos


@cute.jit
def _latents(sm: Sm, f: Fields, pos: Int32, cap: Int32) -> Int32:
    """The cached rows of this SM's units of mla_decode, but for the newest of a sequence, which is still being made."""
    unit = sm.block
    while unit < units(sm.shape):
        r, _, _, start, end, newest = unit_of(sm, unit)
        if start < end - newest:
            pos = _copy_tokens(sm, f, pos, r, start, end - newest, cap)
        unit += sm.shape.sms
    return pos


@cute.jit
def _copy_tokens(sm: Sm, f: Fields, pos: Int32, r: Int32, first: Int32, end: Int32, cap: Int32) -> Int32:
    """Cached rows of tokens [first, end), two slots at a time, a row a lane, which knows its next page by then."""
    nbytes, size = Int32(sm.shape.latent_bytes), f["page_size"]
    page = (first + sm.lane) // size
    inside, pages = first + sm.lane - page * size, 32 // size
    rest, pool, most = 32 - pages * size, address_of(f, "pool"), _most_slots(sm, cap, SLOT_TOKENS * nbytes)
    token, last = first + sm.lane, (end - 1) // size
    entry = page_at(sm, f, r, ptx.smaller(page, last))
    while first < end:
        source = pool + (Int64(entry) * Int64(size) + Int64(inside)) * nbytes
        page, inside = page + pages, inside + rest
        over = ptx.select(inside >= size, Int32(1), Int32(0))
        page, inside = page + over, inside - over * size
        entry = page_at(sm, f, r, ptx.smaller(page, last))
        for side in cutlass.range_constexpr(2):
            if first < end:
                _reserve(sm, pos, ptx.smaller(end - first, Int32(SLOT_TOKENS)) * nbytes, most)
                if ((sm.lane >> 4) == side) & (token < end):
                    at = ring_slot(sm, pos) + (sm.lane & (SLOT_TOKENS - 1)) * sm.shape.latent_pitch
                    ptx.bulk_copy(at, source, nbytes, _full(sm, pos))
                pos += 1
                first += SLOT_TOKENS
        token += 2 * SLOT_TOKENS
    return pos


def _full(sm: Sm, pos: Int32) -> Int32:
    return region(sm, "full") + slot_index(sm, pos) * 8


def _most_slots(sm: Sm, cap: Int32, per_slot: Int32) -> Int32:
    """Slots of `per_slot` bytes that may be on their way at a time."""
    return ptx.smaller(cap * SLOT_BYTES // per_slot, Int32(sm.shape.slots))


@cute.jit
def _wait_turn(sm: Sm, pos: Int32, most: Int32):
    """Until the slot is free and fewer than `most` are on their way."""
    wait_empty(sm, pos)
    if pos >= most:
        wait_full(sm, pos - most)


@cute.jit
def _reserve(sm: Sm, pos: Int32, nbytes: Int32, most: Int32):
    """Waits for the slot's turn and announces `nbytes`."""
    _wait_turn(sm, pos, most)
    if sm.lane == 0:
        ptx.mbarrier_expect(_full(sm, pos), nbytes)
    ptx.sync_warp()


class Rows:
    """How a bfloat16 weight of a row lies in memory and in the slots."""

    def __init__(self, f: Fields):
        self.weight, self.row_bytes, self.pair = address_of(f, "weight"), f["row_bytes"], f["pair"]
        self.ppt, self.tpp, self.piece = f["ppt"], f["tpp"], f["piece"] * 64
        self.copy, self.pitch = f["copy"], f["pitch"]


@cute.jit
def _linear(sm: Sm, f: Fields, pos: Int32, first: Int32, end: Int32, cap: Int32) -> Int32:
    """Tiles [first, end): pieces of them, or a few whole ones, two in a slot."""
    rows = Rows(f)
    tile, inside, left = first, Int32(0), (end - first) * rows.ppt
    most = _most_slots(sm, cap, 16 * rows.tpp * rows.piece)
    while left > 0:
        count = ptx.smaller(left, 2 * rows.tpp)
        _reserve(sm, pos, count * 8 * rows.piece, most)
        _copy_rows(sm, rows, pos, Int32(0), rows.weight, tile, inside, count)
        tile, inside = _further(rows, tile, inside, count)
        left -= count
        pos += 1
    return pos


@cute.jit
def _further(rows: Rows, tile: Int32, inside: Int32, count: Int32):
    """The piece `count` behind piece `inside` of `tile`; two pieces at most, where a tile has several."""
    if rows.ppt == 1:
        tile = tile + count
    else:
        inside = inside + count
        if inside >= rows.ppt:
            tile, inside = tile + 1, inside - rows.ppt
    return tile, inside


@cute.jit
def _copy_rows(
    sm: Sm, rows: Rows, pos: Int32, at: Int32, weight: Int64, tile: Int32, inside: Int32, count: Int32
):  # fmt: skip
    """`count` pieces from piece `inside` of `tile` on, to `at` bytes of the slot; each lane copies rows of its own."""
    copies = count * 8
    if rows.copy > rows.piece:  # the two pieces of a slot side by side
        copies = Int32(8)
    j = sm.lane
    while j < copies:
        t, column = _further(rows, tile, inside, j >> 3)
        row = 8 * t + (j & 7)
        if rows.pair > 0:
            row = 4 * t + ((j & 7) >> 1) + (j & 1) * rows.pair
        source = weight + Int64(row) * Int64(rows.row_bytes) + Int64(column * rows.piece)
        ptx.bulk_copy(ring_slot(sm, pos) + at + j * rows.pitch, source, rows.copy, _full(sm, pos))
        j += 32


@cute.jit
def _gate_up(sm: Sm, f: Fields, pos: Int32, cap: Int32) -> Int32:
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
    most, weight, stride = _most_slots(sm, cap, 2 * nbytes), address_of(f, "weight"), address_of(f, "expert_stride")
    while left > 0:
        count = ptx.smaller(left, Int32(2))
        _reserve(sm, pos, count * nbytes, most)
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
    most = _most_slots(sm, cap, 16 * rows.piece)
    while left > 0:
        count = ptx.smaller(left, Int32(2))
        _reserve(sm, pos, count * 8 * rows.piece, most)
        side = Int32(0)
        while side < count:
            if tile == total:
                place, tile = place + 1, Int32(0)
            weight = rows.weight + Int64(expert_at(sm, place)) * stride
            _copy_rows(sm, rows, pos, side * 8 * rows.pitch, weight, tile, inside, together)
            tile, inside = _further(rows, tile, inside, together)
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
        ptx.bulk_copy(ring_slot(sm, pos) + at, source, nbytes, _full(sm, pos))


@cute.jit
def _down(sm: Sm, f: Fields, pos: Int32, first: Int32, end: Int32, cap: Int32) -> Int32:
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
    slots = _most_slots(sm, cap, (3 - together) * ptx.smaller(units, step) * block)
    for place in range(ptx.ld_shared_b32(region(sm, "ids"))):
        wanted = Int32(1)
        if r1 - r0 != sm.shape.rows:
            wanted = serves(sm, place, r0, r1)
        done, tile, inside = ptx.select(wanted != 0, Int32(0), units), first, Int32(0)
        while done < units:
            count = ptx.smaller(units - done, step)
            if side == 0:
                _wait_turn(sm, pos, slots)
            last = (side == 1) | (left == 1) | (together == 2)
            if sm.lane == 0:
                ptx.mbarrier_expect_part(_full(sm, pos), count * block, last)
            ptx.sync_warp()
            _down_piece(sm, f, rows, pos, side * f["second"], place, tile, inside, count)
            tile, inside = _further(rows, tile, inside, count)
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
        _copy_rows(sm, rows, pos, at, rows.weight + Int64(expert_at(sm, place)) * stride, tile, inside, count)
