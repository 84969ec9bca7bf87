"""y = W x over this SM's tiles, with what follows it: rounding, an activation, a gate, the argmax.

linear, router_logits, mla_absorb_query and mla_expand_value are all rows of this code; the last two are one small
projection a head, whose tiles read their own part of x (`batch_tiles`, `x_batch`). Per-head rows (LOCAL) keep their
outputs on the SM, for the KDA rows behind them.

Rounding   float32 sums; bfloat16 at each op boundary, as the ops one by one
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_megakernel import ptx
from cute_megakernel.core import (Fields, Sm, address_of, finish_segment, float_of, poll_pair, region, sync, word_address)
from cute_megakernel.rows import Epilogue
from cute_megakernel.shape import CHUNK, SLOT_BYTES
from cute_megakernel.stages.activation import situ, swiglu
from cute_megakernel.stages.argmax import better, publish_best
from cute_megakernel.stages.output_gate import output_gate
from cute_megakernel.stages.tiles import add_sums, multiply_tile, put_sums, unit_of_thread, x_address

MINUS_INF = float("-inf")


@cute.jit
def linear(sm: Sm, f: Fields, pos: Int32, low: Int32, high: Int32) -> Int32:
    kb, total = f["kb"], f["total"]
    rows = f["r1"] - f["r0"]
    x = x_address(sm, f["x_pitch"], rows)
    step = ptx.select(sm.group < rows, Int32(64), Int32(0))
    x_off, x_batch, batch_tiles = f["x_off"], f["x_batch"], f["batch_tiles"]
    held, turn, start = Int32(-1), Int32(0), low
    best, best_at = Float32(MINUS_INF), Int32(0x7FFFFFFF)
    first_batch = f["local"] * (low // batch_tiles)  # x holds the heads of this SM only
    while start < high:
        count = ptx.select(high - start < sm.shape.tiles_in_group, high - start, Int32(sm.shape.tiles_in_group))
        for place in range(count):
            tile = (start + place) % total
            xs = x + (step // 64) * (x_off + (tile // batch_tiles - first_batch) * x_batch)
            first_block = (start + place - low) * kb
            c0, c1 = Float32(0.0), Float32(0.0)
            if kb % CHUNK == 0:
                held, c0, c1 = multiply_tile(sm, pos, held, first_block, tile, kb, xs, step, False, CHUNK)
            else:
                held, c0, c1 = multiply_tile(sm, pos, held, first_block, tile, kb, xs, step, False, 1)
            put_sums(sm, turn, place, c0, c1)
        sync(sm)
        place, row, half, mine = unit_of_thread(sm, count)
        if mine & (row < rows):
            values = add_sums(sm, turn, place, row, half)
            best, best_at = _finish(sm, f, start + place, row + f["r0"], half, values, best, best_at)
        turn = turn ^ 1
        start += count
    if f["epilogue"] == Epilogue.LOGITS:
        publish_best(sm, f, low, best, best_at)
    slots = ((high - low) * kb + SLOT_BYTES // 512 - 1) // (SLOT_BYTES // 512)
    return finish_segment(sm, pos, held, slots)


@cute.jit
def _finish(sm: Sm, f: Fields, tile: Int32, r: Int32, half: Int32, v: tuple, best: Float32, best_at: Int32):
    """Four sums of batch row r, outputs 8 * tile + 4 * half and on."""
    kind = f["epilogue"]
    n = 8 * tile + 4 * half
    if kind == Epilogue.LOCAL:
        _keep(sm, f, tile, r, half, v)
    elif kind == Epilogue.FLOAT:
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
def _keep(sm: Sm, f: Fields, tile: Int32, r: Int32, half: Int32, v: tuple):
    """Outputs of one head for the KDA rows on this SM; tiles count through all (batch row, head) items."""
    if tile // f["total"] == r:
        low, high = ptx.pack_bf16(v[0], v[1]), ptx.pack_bf16(v[2], v[3])
        column = (8 * tile + 4 * half) % sm.shape.kda_head_dim
        at = region(sm, "local") + (f["local_at"] + column) * 4
        ptx.st_shared_v2_f32(at, ptx.low_bf16(low), ptx.high_bf16(low))
        ptx.st_shared_v2_f32(at + 8, ptx.low_bf16(high), ptx.high_bf16(high))
        if f["dst"] >= 0:
            column = (8 * tile + 4 * half) % f["n_valid"]
            ptx.st_word_pair(word_address(sm, f["dst"] + r * f["dst_pitch"] + column // 2), low, high, sm.tag)


@cute.jit
def _logits(sm: Sm, f: Fields, r: Int32, n: Int32, v: tuple, best: Float32, best_at: Int32):
    """Rounded logits to the output tensor; the best of this thread so far."""
    low, high = ptx.pack_bf16(v[0], v[1]), ptx.pack_bf16(v[2], v[3])
    ptx.st_global_v2_b32(address_of(f, "out") + (Int64(r) * Int64(f["n_valid"]) + Int64(n)) * 2, low, high)
    rounded = ptx.low_bf16(low), ptx.high_bf16(low), ptx.low_bf16(high), ptx.high_bf16(high)
    for i in cutlass.range_constexpr(4):
        best, best_at = better(best, best_at, rounded[i], n + i)
    return best, best_at
