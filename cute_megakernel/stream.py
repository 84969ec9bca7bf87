"""The streaming warp: copies what the rows of this SM will consume into the ring, in their order, as far ahead as slots
are free. It waits for nothing that is being computed, but for the router's choice of experts.

No more than `in_flight` copies are on their way at a time: what the memory system has queued for an SM delays the words
that it asks for. Caps of 3 to 8 copies differ by 1 % (MEASURED.md, megakernel).
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
from cute_megakernel.shape import FIELD_WORDS, SLOT_BYTES, STATE_BYTES
from cute_megakernel.stages.causal_conv1d import step_bytes, window_at
from cute_megakernel.stages.kda_head import is_new, slot_of_row
from cute_megakernel.stages.moe_down import serves
from cute_megakernel.stages.moe_gate_up import share


@cute.jit
def stream(sm: Sm, fields: Int64, work: Int64):
    pos, row, rows = Int32(0), sm.batch["first_row"], sm.batch["end_row"]
    low, high, first, end = fetch_row(sm, fields, work, row)
    while row < rows:
        following = ptx.select(row + 1 < rows, row + 1, row)
        next_low, next_high, next_first, next_end = fetch_row(sm, fields, work, following)
        if first != end:  # an SM without outputs of moe_down has (1, 0): it passes the list of experts on
            f = Fields(region(sm, "row") + 8 * FIELD_WORDS, row)
            ptx.sync_warp()
            ptx.st_shared_v2_b32(region(sm, "row") + 8 * FIELD_WORDS + sm.lane * 8, low, high)
            ptx.sync_warp()
            pos = _stream_row(sm, f, pos, first, end)
        low, high, first, end = next_low, next_high, next_first, next_end
        row += 1


@cute.jit
def _stream_row(sm: Sm, f: Fields, pos: Int32, first: Int32, end: Int32) -> Int32:
    code = f["code"]
    if code == Code.LINEAR:
        tile_bytes = f["kb"] * 512
        source = address_of(f, "weight") + Int64(first % f["total"]) * Int64(tile_bytes)
        pos = _copy(sm, pos, source, (end - first) * tile_bytes, f["piece"] * f["tpp"] * 1024)
    elif code == Code.MOE_GATE_UP:
        pos = _gate_up(sm, f, pos)
    elif code == Code.MOE_DOWN:
        pos = _down(sm, f, pos, first, end)
    elif code == Code.KDA_HEAD:
        pos = _head(sm, f, pos, first)
    return pos


@cute.jit
def _head(sm: Sm, f: Fields, pos: Int32, item: Int32) -> Int32:
    """The state of an item, unless it starts from zeros, and the tiles of its head."""
    K, H = sm.shape.kda_head_dim, sm.shape.kda_heads
    r, h = item // H, item % H
    slot = slot_of_row(sm, f, r)
    old = (slot >= 0) & (is_new(sm, r) == 0)
    _prefetch_head(sm, f, h, slot, old)
    if old:
        source = address_of(f, "pool") + Int64(slot) * address_of(f, "pool_stride") + Int64(h) * (4 * K * K)
        pos = _copy(sm, pos, source, Int32(4 * K * K), Int32(STATE_BYTES))
    for i in cutlass.range_constexpr(2 if sm.shape.low_rank_gate else 1):
        source = address_of(f, ("f_b", "g_b")[i]) + Int64(h) * (2 * K * K)
        pos = _copy(sm, pos, source, Int32(2 * K * K), Int32(STATE_BYTES))
    return pos


@cute.jit
def _prefetch_head(sm: Sm, f: Fields, h: Int32, slot: Int32, old):
    """What the row loads from memory by itself, on its way to the cache: each lane has a contiguous piece of it."""
    K, H = sm.shape.kda_head_dim, sm.shape.kda_heads
    channel = (sm.lane % 3 * H + h) * K  # the first of q, k or v
    if sm.lane < 9:
        if old:
            ptx.prefetch_bulk(window_at(sm, f, channel, slot) + sm.lane // 3 * step_bytes(sm), Int32(2 * K))
    elif sm.lane < 12:
        ptx.prefetch_bulk(address_of(f, "weight") + Int64(channel) * 16, Int32(16 * K))
    elif sm.lane == 12:
        ptx.prefetch_bulk(address_of(f, "weight2") + Int64(h) * (4 * K), Int32(4 * K))
    elif sm.lane == 13:
        ptx.prefetch_bulk(address_of(f, "norm"), Int32(4 * K))
    elif sm.lane == 14:
        ptx.prefetch(address_of(f, "A_log") + Int64(h) * 4)
    ptx.sync_warp()


@cute.jit
def _copy(sm: Sm, pos: Int32, source: Int64, nbytes: Int32, per_slot: Int32) -> Int32:
    """A contiguous piece of memory into as many slots as it takes, `per_slot` bytes each."""
    done = Int32(0)
    while done < nbytes:
        size = ptx.select(nbytes - done < per_slot, nbytes - done, per_slot)
        _reserve(sm, pos, size)
        if sm.lane == 0:
            ptx.bulk_copy(ring_slot(sm, pos), source + Int64(done), size, _full(sm, pos))
        pos += 1
        done += per_slot
    return pos


def _full(sm: Sm, pos: Int32) -> Int32:
    return region(sm, "full") + slot_index(sm, pos) * 8


@cute.jit
def _reserve(sm: Sm, pos: Int32, nbytes: Int32):
    """Waits until the slot is free and not too much is on its way, and announces `nbytes`."""
    wait_empty(sm, pos)
    if pos >= sm.batch["in_flight"]:
        wait_full(sm, pos - sm.batch["in_flight"])
    if sm.lane == 0:
        ptx.mbarrier_expect(_full(sm, pos), nbytes)
    ptx.sync_warp()


@cute.jit
def _gate_up(sm: Sm, f: Fields, pos: Int32) -> Int32:
    """Two pieces a slot; where a tile of the next expert begins, the second comes from elsewhere."""
    wait_barrier(sm, region(sm, "ids_ready"), (f["sub"] - sm.batch["first_moe"]) & 1)
    total, ppt = f["total"], f["ppt"]
    nbytes = f["piece"] * sm.shape.block_bytes
    low, high = share(sm, ptx.ld_shared_b32(region(sm, "ids")), total)
    left, place = (high - low) * ppt, low // total
    inside = (low - place * total) * ppt  # piece of the expert
    while left > 0:
        _reserve(sm, pos, ptx.select(left < 2, nbytes, 2 * nbytes))
        for side in range(ptx.select(left < 2, left, Int32(2))):
            if inside == total * ppt:
                place, inside = place + 1, Int32(0)
            _put_piece(sm, f, pos, side * nbytes, place, inside, nbytes)
            inside += 1
        left -= 2
        pos += 1
    return pos


@cute.jit
def _put_piece(sm: Sm, f: Fields, pos: Int32, at: Int32, place: Int32, piece: Int32, nbytes: Int32):
    """Copies piece `piece` of the expert at `place` of the list to `at` bytes of the slot."""
    if sm.lane == 0:
        expert = ptx.ld_shared_b32(region(sm, "ids") + 16 + place * 4)
        source = address_of(f, "weight") + Int64(expert) * address_of(f, "expert_stride") + Int64(piece) * Int64(nbytes)
        ptx.bulk_copy(ring_slot(sm, pos) + at, source, nbytes, _full(sm, pos))


@cute.jit
def _down(sm: Sm, f: Fields, pos: Int32, first: Int32, end: Int32) -> Int32:
    wait_barrier(sm, region(sm, "ids_ready"), (f["sub"] - sm.batch["first_moe"]) & 1)
    if first < end:
        pos = _pieces(sm, f, pos, first, end)
    if f["local"] != 0:
        ptx.sync_warp()
        if sm.lane == 0:
            ptx.mbarrier_arrive(region(sm, "ids_free"))
    return pos


@cute.jit
def _pieces(sm: Sm, f: Fields, pos: Int32, first: Int32, end: Int32) -> Int32:
    """This SM's outputs of every expert, cut into pieces, two a slot."""
    tpp, r0, r1 = f["tpp"], f["r0"], f["r1"]
    most, block_bytes = f["piece"] * tpp, sm.shape.block_bytes
    blocks = (end - first) * f["kb"]
    experts, side, left = ptx.ld_shared_b32(region(sm, "ids")), Int32(0), Int32(0)
    for place in range(experts):
        left += serves(sm, place, r0, r1)
    left = left * ((blocks + most - 1) // most)
    for place in range(experts):
        if serves(sm, place, r0, r1) != 0:
            done = Int32(0)
            while done < blocks:
                size = ptx.select(blocks - done < most, blocks - done, most)
                if side == 0:
                    wait_empty(sm, pos)
                    if pos >= sm.batch["in_flight"]:
                        wait_full(sm, pos - sm.batch["in_flight"])
                if sm.lane == 0:
                    expert = ptx.ld_shared_b32(region(sm, "ids") + 16 + place * 4)
                    source = address_of(f, "weight") + Int64(expert) * address_of(f, "expert_stride")
                    source = source + Int64(first * f["kb"] + done) * Int64(block_bytes)
                    last = (side == 1) | (left == 1)
                    ptx.mbarrier_expect_part(_full(sm, pos), size * block_bytes, last)
                    ptx.bulk_copy(
                        ring_slot(sm, pos) + side * (SLOT_BYTES // 2), source, size * block_bytes, _full(sm, pos)
                    )
                ptx.sync_warp()
                left -= 1
                done += most
                side = side ^ 1
                if (side == 0) | (left == 0):
                    pos += 1
                    side = Int32(0)
    return pos
