"""y = W x over this SM's tiles, with what follows it: rounding, an activation, a gate, the argmax.

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
    first_own,
    float_of,
    pass_by,
    poll_pair,
    release,
    ring_slot,
    sync,
    wait_full,
    word_address,
)
from cute_megakernel.rows import Epilogue
from cute_megakernel.stages.argmax import NO_INDEX, better, publish_best
from cute_megakernel.stages.output_gate import output_gate
from cute_megakernel.stages.situ import situ
from cute_megakernel.stages.swiglu import swiglu
from cute_megakernel.stages.tiles import add_sums, multiply, put_sums, unit_of_thread, x_address

MINUS_INF = float("-inf")


@cute.jit
def linear(sm: Sm, f: Fields, pos: Int32, low: Int32, high: Int32) -> Int32:
    """Each warp does its pieces of a group of tiles; then threads add up the pieces of an output and finish it."""
    rows, ppt, tpp = f["r1"] - f["r0"], f["ppt"], f["tpp"]
    pieces = ((high - low) * ppt + tpp - 1) // tpp
    slots = (pieces + 1) // 2
    own, start, turn = first_own(sm, pos), low, Int32(0)
    best, best_at = Float32(MINUS_INF), Int32(NO_INDEX)
    while start < high:
        count = ptx.select(high - start < f["group_tiles"], high - start, f["group_tiles"])
        end = ((start + count - low) * ppt + tpp - 1) // tpp
        while 2 * own + (sm.warp & 1) < end:
            _piece(sm, f, pos + own, 2 * own + (sm.warp & 1), low, start, count, turn)
            own += sm.shape.slots
        sync(sm)
        place, row, half, mine = unit_of_thread(sm, count)
        if mine & (row < rows):
            values = add_sums(sm, turn * sm.shape.sums + place * ppt, row, half, ppt)
            best, best_at = _finish(sm, f, start + place, row + f["r0"], half, values, best, best_at)
        turn = turn ^ 1
        start += count
    if f["epilogue"] == Epilogue.LOGITS:
        publish_best(sm, f, low, best, best_at)
    pass_by(sm, pos, own, slots)
    return pos + slots


@cute.jit
def _piece(sm: Sm, f: Fields, pos: Int32, piece: Int32, low: Int32, start: Int32, count: Int32, turn: Int32):
    """Piece `piece` of the tiles from `low` on: blocks of one tile, or `tpp` whole tiles."""
    rows, ppt, tpp, blocks = f["r1"] - f["r0"], f["ppt"], f["tpp"], f["piece"]
    inside = ptx.select(sm.group < rows, Int32(1), Int32(0))
    x = x_address(sm, f["x_pitch"], rows)
    x_batch, in_tile, tile = inside * f["x_batch"], Int32(0), low + piece * tpp
    if ppt > 1:
        tile = (piece * f["magic"]) >> 20
        in_tile = piece - tile * ppt
        tile = tile + low
    wait_full(sm, pos)
    address = ring_slot(sm, pos) + (piece & 1) * (blocks * tpp * 512)
    t = Int32(0)
    while (t < tpp) & (tile < start + count):
        xs = x + inside * in_tile * blocks * 64
        if x_batch != 0:
            xs = xs + (tile // f["batch_tiles"] - f["local"] * (low // f["batch_tiles"])) * x_batch
        c0, c1 = multiply(sm, address, xs, inside * 64, blocks, False)
        put_sums(sm, turn * sm.shape.sums + (tile - start) * ppt + in_tile, c0, c1)
        address = address + blocks * 512
        tile += 1
        t += 1
    release(sm, pos)


@cute.jit
def _finish(sm: Sm, f: Fields, tile: Int32, r: Int32, half: Int32, v: tuple, best: Float32, best_at: Int32):
    """Four sums of batch row r, outputs 8 * tile + 4 * half and on."""
    kind = f["epilogue"]
    n = 8 * tile + 4 * half
    if kind == Epilogue.FLOAT:
        for copy in range(f["copies"]):
            at = f["dst"] + r * f["dst_pitch"] + n + copy * f["copy_stride"]
            ptx.st_word_pair(word_address(sm, at), ptx.float_bits(v[0]), ptx.float_bits(v[1]), sm.tag)
            ptx.st_word_pair(word_address(sm, at + 2), ptx.float_bits(v[2]), ptx.float_bits(v[3]), sm.tag)
    elif kind == Epilogue.LOGITS:
        best, best_at = _logits(sm, f, r, n, v, best, best_at)
    elif (kind == Epilogue.SITU) | (kind == Epilogue.SWIGLU):
        activated(sm, f, f["dst"] + r * f["dst_pitch"], f["tap"] + r * f["tap_pitch"], f["n_valid"], n, v)
    else:
        low, high = ptx.pack_bf16(v[0], v[1]), ptx.pack_bf16(v[2], v[3])
        if kind == Epilogue.OUTPUT_GATE:
            if f["tap"] >= 0:
                ptx.st_word_pair(word_address(sm, f["tap"] + r * f["tap_pitch"] + n // 2), low, high, sm.tag)
            g0, g1 = poll_pair(sm, f.number, f["gate"] + r * f["gate_pitch"] + n // 2, sm.tag)
            low, high = output_gate(low, g0), output_gate(high, g1)
        for copy in range(f["copies"]):
            at = f["dst"] + r * f["dst_pitch"] + n // 2 + copy * f["copy_stride"]
            ptx.st_word_pair(word_address(sm, at), low, high, sm.tag)
    return best, best_at


@cute.jit
def activated(sm: Sm, f: Fields, dst: Int32, tap: Int32, width: Int32, n: Int32, v: tuple):
    """Gate and up alternate in a tile: two outputs of the activation from four sums."""
    gate, up = ptx.pack_bf16(v[0], v[2]), ptx.pack_bf16(v[1], v[3])
    if f["tap"] >= 0:
        ptx.st_word(word_address(sm, tap + n // 4), gate, sm.tag)
        ptx.st_word(word_address(sm, tap + width // 4 + n // 4), up, sm.tag)
    word = Int32(0)
    if f["epilogue"] == Epilogue.SITU:
        word = situ(gate, up, float_of(f, "p0"), float_of(f, "p1"))
    else:
        word = swiglu(gate, up)
    ptx.st_word(word_address(sm, dst + n // 4), word, sm.tag)


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
        words = ptx.ld_shared_v4_b32(address + sm.lane * 16 + i * 512)
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
        c = ptx.mma_bf16_full(c, a[i], (tile[4 * i], tile[4 * i + 1]))
        d = ptx.mma_bf16_full(d, a[i], (tile[4 * i + 2], tile[4 * i + 3]))
    return c[0] + d[2], c[1] + d[3]
