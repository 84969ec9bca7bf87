"""y = W x over this SM's tiles, with what follows it: rounding, residual sums, an activation, a gate, the argmax.

linear, router_logits, mla_absorb_query and mla_expand_value are all rows of this code; the last two are one small
projection a head, whose tiles read their own part of x (`batch_tiles`, `x_batch`). The small ones of a KDA head are
part of its row: a warp takes a whole tile (`load_tile`, `multiply_tile`).

Rounding   float32 sums; bfloat16 at each op boundary, as the ops one by one
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_megakernel import ptx
from cute_megakernel.core import (
    Fields,
    Sm,
    address_of,
    first_phase,
    first_piece,
    float_of,
    own_slot,
    pass_by,
    poll_pair,
    release_own,
    sync,
    wait_own,
    word_address,
)
from cute_megakernel.rows import Epilogue
from cute_megakernel.stages.argmax import NO_INDEX, better, publish_best
from cute_megakernel.stages.output_gate import output_gate
from cute_megakernel.stages.residual_add import ask_addends, residual_add
from cute_megakernel.stages.situ import situ
from cute_megakernel.stages.swiglu import swiglu
from cute_megakernel.stages.tiles import (
    add_sums,
    copy_of_thread,
    lane_weights,
    multiply,
    put_sums,
    unit_of_thread,
    x_address,
)

MINUS_INF = float("-inf")


class Work:
    """What stays the same over the pieces of a row."""

    def __init__(self, sm: Sm, f: Fields, low: Int32, high: Int32):
        self.low, self.tiles = low, high - low
        self.ppt, self.tpp, self.blocks, self.magic = f["ppt"], f["tpp"], f["piece"], f["magic"]
        self.pieces = pieces_of(self.tiles, self.ppt, self.tpp, self.magic)
        self.weights = (sm.warp & 1) * f["second"] + lane_weights(sm, f["pitch"])  # where in a slot this lane begins
        self.tile_bytes = 8 * f["pitch"]
        rows = f["r1"] - f["r0"]
        self.x, self.second = x_address(sm, f, rows, False)
        self.step, self.x_batch = self.blocks * 64, f["x_batch"]


@cute.jit
def pieces_of(tiles: Int32, ppt: Int32, tpp: Int32, magic: Int32) -> Int32:
    """Pieces of so many tiles: a few of a tile, or a few tiles in one."""
    pieces = tiles * ppt
    if tpp > 1:
        pieces = ((tiles + tpp - 1) * magic) >> 20
    return pieces


@cute.jit
def linear(sm: Sm, f: Fields, pos: Int32, low: Int32, high: Int32) -> Int32:
    """Each warp does its pieces of a group of tiles; then threads add up the pieces of an output and finish it."""
    work = Work(sm, f, low, high)
    rows, ppt, piece, phase = f["r1"] - f["r0"], work.ppt, first_piece(sm, pos), first_phase(sm, pos)
    kind, start, end, turn = f["epilogue"], low, Int32(0), Int32(0)
    best, best_at = Float32(MINUS_INF), Int32(NO_INDEX)
    while start < high:
        count = ptx.smaller(high - start, f["group_tiles"])
        place, row, half = unit_of_thread(sm)
        place, copy, mine = copy_of_thread(place, count, f["copies"])
        mine = mine & (row < rows)
        at = (row + f["r0"]) * f["dst_pitch"] + 4 * (start + place) + 2 * half + copy * f["copy_stride"]
        asked = ask_addends(sm, f, mine & (kind == Epilogue.ACT), at)
        end = ptx.smaller(end + f["group_pieces"], work.pieces)
        entry = turn * sm.shape.sums - (start - low) * ppt
        while piece < end:
            _piece(sm, f, work, phase, piece, entry)
            piece, phase = piece + 2 * sm.shape.slots, phase ^ 1
        sync(sm)
        if mine:
            values = add_sums(sm, turn * sm.shape.sums + place * ppt, row, half, ppt)
            if kind == Epilogue.ACT:
                finish(sm, f, values, asked, at)
            else:
                best, best_at = _finish(sm, f, start + place, row + f["r0"], half, copy, values, best, best_at)
        turn = turn ^ 1
        start += count
    if kind == Epilogue.LOGITS:
        publish_best(sm, f, low, best, best_at)
    slots = (work.pieces + 1) >> 1
    pass_by(sm, phase, piece, slots)
    return pos + slots


@cute.jit
def _piece(sm: Sm, f: Fields, work: Work, phase: Int32, piece: Int32, entry: Int32):
    """One piece of a tile, or a few whole tiles; the sums of a piece go to `entry` and its number."""
    x, first, left = work.x, piece, Int32(1)
    if work.ppt > 1:
        x = x + (piece - ((piece * work.magic) >> 20) * work.ppt) * work.step
    else:
        first = piece * work.tpp
        left = ptx.smaller(work.tiles - first, work.tpp)
    wait_own(sm, phase)
    address = own_slot(sm) + work.weights
    while left > 0:
        xs = x
        if work.x_batch != 0:
            xs = x + _head(f, work, first) * work.x_batch
        put_sums(sm, entry + first, multiply(sm, address, xs, work.second, work.blocks, False))
        address = address + work.tile_bytes
        first += 1
        left -= 1
    release_own(sm)


@cute.jit
def _head(f: Fields, work: Work, first: Int32) -> Int32:
    """Which part of x the tile of a per-head projection reads."""
    tile = first
    if work.ppt > 1:
        tile = (first * work.magic) >> 20
    head = (work.low + tile) // f["batch_tiles"]
    if f["local"] != 0:  # x holds the heads of this SM's tiles only
        head = head - work.low // f["batch_tiles"]
    return head


@cute.jit
def finish(sm: Sm, f: Fields, v: tuple, asked: tuple, at: Int32):
    """Four outputs, rounded, with the residual sums, to `at` words behind the first of `dst`."""
    low, high = ptx.pack_bf16(v[0], v[1]), ptx.pack_bf16(v[2], v[3])
    if f["tap"] >= 0:
        ptx.st_word_pair(word_address(sm, f["tap"] + at), low, high, sm.tag)
    low, high = residual_add(sm, f, low, high, asked, at)
    ptx.st_word_pair(word_address(sm, f["dst"] + at), low, high, sm.tag)


@cute.jit
def _finish(
    sm: Sm, f: Fields, tile: Int32, r: Int32, half: Int32, copy: Int32, v: tuple, best: Float32,
    best_at: Int32,
):  # fmt: skip
    """Four sums of batch row r, outputs 8 * tile + 4 * half and on."""
    kind = f["epilogue"]
    n = 8 * tile + 4 * half
    if kind == Epilogue.FLOAT:
        at = f["dst"] + r * f["dst_pitch"] + n + copy * f["copy_stride"]
        ptx.st_word_pair(word_address(sm, at), ptx.float_bits(v[0]), ptx.float_bits(v[1]), sm.tag)
        ptx.st_word_pair(word_address(sm, at + 2), ptx.float_bits(v[2]), ptx.float_bits(v[3]), sm.tag)
    elif kind == Epilogue.LOGITS:
        best, best_at = _logits(sm, f, r, n, v, best, best_at)
    elif (kind == Epilogue.SITU) | (kind == Epilogue.SWIGLU):
        activated(sm, f, f["dst"] + r * f["dst_pitch"], f["tap"] + r * f["tap_pitch"], f["n_valid"], n, v)
    elif kind == Epilogue.OUTPUT_GATE:
        low, high = ptx.pack_bf16(v[0], v[1]), ptx.pack_bf16(v[2], v[3])
        if f["tap"] >= 0:
            ptx.st_word_pair(word_address(sm, f["tap"] + r * f["tap_pitch"] + (n >> 1)), low, high, sm.tag)
        g0, g1 = poll_pair(sm, f.number, f["gate"] + r * f["gate_pitch"] + (n >> 1), sm.tag)
        at = f["dst"] + r * f["dst_pitch"] + (n >> 1)
        ptx.st_word_pair(word_address(sm, at), output_gate(low, g0), output_gate(high, g1), sm.tag)
    return best, best_at


@cute.jit
def activated(sm: Sm, f: Fields, dst: Int32, tap: Int32, width: Int32, n: Int32, v: tuple):
    """Gate and up alternate in a tile: two outputs of the activation from four sums."""
    gate, up = ptx.pack_bf16(v[0], v[2]), ptx.pack_bf16(v[1], v[3])
    if f["tap"] >= 0:
        ptx.st_word(word_address(sm, tap + (n >> 2)), gate, sm.tag)
        ptx.st_word(word_address(sm, tap + (width >> 2) + (n >> 2)), up, sm.tag)
    word = Int32(0)
    if f["epilogue"] == Epilogue.SITU:
        word = situ(gate, up, float_of(f, "p0"), float_of(f, "p1"))
    else:
        word = swiglu(gate, up)
    ptx.st_word(word_address(sm, dst + (n >> 2)), word, sm.tag)


@cute.jit
def _logits(sm: Sm, f: Fields, r: Int32, n: Int32, v: tuple, best: Float32, best_at: Int32):
    """Rounded logits to the output tensor; the best of this thread so far."""
    low, high = ptx.pack_bf16(v[0], v[1]), ptx.pack_bf16(v[2], v[3])
    ptx.st_global_v2_b32(address_of(f, "out") + (Int64(r) * Int64(f["n_valid"]) + Int64(n)) * 2, low, high)
    rounded = ptx.low_bf16(low), ptx.high_bf16(low), ptx.low_bf16(high), ptx.high_bf16(high)
    for i in cutlass.range_constexpr(4):
        best, best_at = better(best, best_at, rounded[i], n + i)
    return best, best_at


@cute.jit
def load_tile(sm: Sm, address: Int32, tile: cute.Tensor, blocks: cutlass.Constexpr):
    """A whole tile into registers."""
    for i in cutlass.range_constexpr(blocks):
        words = ptx.ld_shared_v4_b32(address + lane_weights(sm, 64 * blocks) + i * 64)
        for j in cutlass.range_constexpr(4):
            tile[4 * i + j] = words[j]


def row_place(index: Int32) -> Int32:
    """Where `multiply_tile` looks for pair `index` of its row, in words: the middle two of four change places."""
    return (index & -4) | ((index & 1) << 1) | ((index >> 1) & 1)


@cute.jit
def multiply_tile(sm: Sm, x: Int32, tile: cute.Tensor, blocks: cutlass.Constexpr):
    """A tile from registers times the one row at `x`, added up as `multiply` does. -> two outputs, in each group

    What would be rows 8 to 15 of the activations are the second halves of the row, and so are the sums.
    """
    ptx.sync_warp()  # the products need the whole warp
    c = d = (Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0))
    a = []
    for i in cutlass.range_constexpr(blocks):
        a.append(ptx.ld_shared_v4_b32(x + sm.quad * 16 + i * 64))
    for i in cutlass.range_constexpr(blocks):
        c = ptx.mma_bf16(c, a[i], (tile[4 * i], tile[4 * i + 1]))
        d = ptx.mma_bf16(d, a[i], (tile[4 * i + 2], tile[4 * i + 3]))
    return c[0] + d[2], c[1] + d[3]
