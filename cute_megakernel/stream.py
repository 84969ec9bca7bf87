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
)
from cute_megakernel.rows import Code
from cute_megakernel.shape import FIELD_WORDS, SLOT_TOKENS, STATE_BYTES
from cute_megakernel.stages.causal_conv1d import step_bytes, window_at
from cute_megakernel.stages.kda_head import is_new, slot_of_row
from cute_megakernel.stages.mla_cache import page_at, unit_of, units
from cute_megakernel.stream_experts import down, gate_up
from cute_megakernel.stream_slots import Rows, copy, copy_rows, full_barrier, further, most_slots, reserve


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
        pos = linear(sm, f, pos, first, end, cap)
    elif code == Code.MOE_GATE_UP:
        pos = gate_up(sm, f, pos, cap)
    elif code == Code.MOE_DOWN:
        pos = down(sm, f, pos, first, end, cap)
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
        pos = copy(sm, pos, source, Int32(4 * K * K), Int32(STATE_BYTES), cap)
    for i in cutlass.range_constexpr(2 if sm.shape.low_rank_gate else 1):
        source = address_of(f, ("f_b", "g_b")[i]) + Int64(h) * (2 * K * K)
        pos = copy(sm, pos, source, Int32(2 * K * K), Int32(STATE_BYTES), cap)
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
    rest, pool, most = 32 - pages * size, address_of(f, "pool"), most_slots(sm, cap, SLOT_TOKENS * nbytes)
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
                reserve(sm, pos, ptx.smaller(end - first, Int32(SLOT_TOKENS)) * nbytes, most)
                if ((sm.lane >> 4) == side) & (token < end):
                    at = ring_slot(sm, pos) + (sm.lane & (SLOT_TOKENS - 1)) * sm.shape.latent_pitch
                    ptx.bulk_copy(at, source, nbytes, full_barrier(sm, pos))
                pos += 1
                first += SLOT_TOKENS
        token += 2 * SLOT_TOKENS
    return pos


@cute.jit
def linear(sm: Sm, f: Fields, pos: Int32, first: Int32, end: Int32, cap: Int32) -> Int32:
    """Tiles [first, end): pieces of them, or a few whole ones, two in a slot."""
    rows = Rows(f)
    tile, inside, left = first, Int32(0), (end - first) * rows.ppt
    most = most_slots(sm, cap, 16 * rows.tpp * rows.piece)
    while left > 0:
        count = ptx.smaller(left, 2 * rows.tpp)
        reserve(sm, pos, count * 8 * rows.piece, most)
        copy_rows(sm, rows, pos, Int32(0), rows.weight, tile, inside, count)
        tile, inside = further(rows, tile, inside, count)
        left -= count
        pos += 1
    return pos
