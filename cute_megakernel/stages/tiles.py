"""Rows of weights times rows of activations, tile by tile out of the ring.

A tile is 8 outputs; its inputs come in blocks, each a contiguous piece of the ring:

    bfloat16   32 inputs, 512 bytes: lane (g, t) of a warp finds output g, inputs 8t ... 8t+7 at its 16 bytes
    MXFP4      64 inputs, 272 bytes: lane (g, t) finds 8 codes of either half at its 8 bytes; behind them 8 pairs of
               scales, one pair an output

One `mma.m16n8k16` multiplies 16 inputs of 8 outputs by up to 8 batch rows. A warp takes a few blocks in a row, a chunk;
chunk c of a tile belongs to warp (c + tile * chunks) % 16, wherever the tile lies in the ring and whichever SM has it,
and the sums of the warps are added in the order of the warps: an output has the same bits in every schedule, and a
batch row does not depend on the others.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_megakernel import ptx
from cute_megakernel.core import (Sm, advance, region, ring_slot)
from cute_megakernel.shape import CONSUMER_WARPS, SLOT_BYTES

CODES = 0x81C081C0 - (1 << 32)  # sign and magnitude of a code in both halves, as a bfloat16


def x_address(sm: Sm, pitch: Int32, rows: Int32) -> Int32:
    """Where this lane reads activations: its batch row, or the zeros where there is no such row."""
    inside = sm.group < rows
    return ptx.select(inside, region(sm, "x") + sm.group * pitch + sm.quad * 16, region(sm, "zero"))


@cute.jit
def multiply_tile(
    sm: Sm, pos: Int32, held: Int32, first_block: Int32, tile: Int32, kb: Int32, x: Int32, step: Int32,
    mxfp4: cutlass.Constexpr, chunk: cutlass.Constexpr,
):  # fmt: skip
    """This warp's share of one tile whose blocks start at `first_block` of the segment. -> held slot, two sums

    `chunk` blocks in a row belong to one warp; kb is a multiple of it. `x` is the address of the tile's first input for
    this lane, `step` the bytes between blocks (0 on zeros). The lane ends up with outputs 2 * quad and 2 * quad + 1 of
    batch row `group`.
    """
    nbytes = 272 if mxfp4 else 512
    in_slot = SLOT_BYTES // nbytes // chunk
    inputs = (128 if mxfp4 else 64) * chunk
    chunks, first = kb // chunk, first_block // chunk
    sums = (Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0))
    k = (sm.warp - tile * chunks) & (CONSUMER_WARPS - 1)
    stride = ptx.select(step > 0, Int32(inputs), Int32(0))
    base = ring_slot(sm, pos + held)
    while k < chunks:
        slot = (first + k) // in_slot
        if slot != held:
            held = advance(sm, pos, held, slot)
            base = ring_slot(sm, pos + held)
        address = base + (first + k - slot * in_slot) * (nbytes * chunk)
        if cutlass.const_expr(mxfp4):
            sums = _mxfp4_blocks(sm, address, x + k * stride, chunk, sums)
        else:
            sums = _bf16_blocks(sm, address, x + k * stride, chunk, sums)
        k += CONSUMER_WARPS
    return held, sums[0] + sums[2], sums[1] + sums[3]


@cute.jit
def _bf16_blocks(sm: Sm, address: Int32, x: Int32, chunk: cutlass.Constexpr, sums: tuple):
    """32 inputs each; all loads before the first product."""
    c0, c1, d0, d1 = sums
    w, a = [], []
    for i in cutlass.range_constexpr(chunk):
        w.append(ptx.ld_shared_v4_b32(address + sm.lane * 16 + i * 512))
        a.append(ptx.ld_shared_v4_b32(x + i * 64))
    for i in cutlass.range_constexpr(chunk):
        c0, c1 = ptx.mma_bf16(c0, c1, a[i][0], a[i][1], w[i][0], w[i][1])
        d0, d1 = ptx.mma_bf16(d0, d1, a[i][2], a[i][3], w[i][2], w[i][3])
    return c0, c1, d0, d1


@cute.jit
def _mxfp4_blocks(sm: Sm, address: Int32, x: Int32, chunk: cutlass.Constexpr, sums: tuple):
    """64 inputs each: codes become bfloat16 values times 2^-126, the scale times 2^126 brings them back, exactly."""
    c0, c1, d0, d1 = sums
    words, scales = [], []
    for i in cutlass.range_constexpr(chunk):
        words.append(ptx.ld_shared_v2_b32(address + sm.lane * 8 + i * 272))
        scales.append(ptx.ld_shared_u16(address + sm.group * 2 + i * 272 + 256))
    for i in cutlass.range_constexpr(chunk):
        for half in cutlass.range_constexpr(2):
            a0, a1, a2, a3 = ptx.ld_shared_v4_b32(x + i * 128 + half * 64)
            exponent = ((scales[i] >> 8) if half else (scales[i] & 0xFF)) + 126
            p0, p1, p2, p3 = decode_codes(words[i][half], exponent)
            c0, c1 = ptx.mma_bf16(c0, c1, a0, a1, p0, p1)
            d0, d1 = ptx.mma_bf16(d0, d1, a2, a3, p2, p3)
    return c0, c1, d0, d1


def decode_codes(word: Int32, exponent: Int32):
    """Eight codes in the order of `images.mxfp4_words` -> four bfloat16 pairs, scaled by 2^(exponent - 127)."""
    factor = (exponent << 7) | (exponent << 23)
    sign = (word << 1) & (0x80008000 - (1 << 32))
    last = sign | ((word >> 5) & 0x01000100) | ((word >> 4) & 0x00C000C0)
    pairs = word & CODES, (word << 3) & CODES, (word << 6) & CODES, last
    return tuple(ptx.mul_bf16x2(pair, factor) for pair in pairs)


def sums_address(sm: Sm, turn: Int32, place: Int32) -> Int32:
    """Sums of tile `place` of a group; `turn` alternates two areas. [tile, warp, row, 8] float32"""
    rows = sm.shape.rows
    tile_bytes = CONSUMER_WARPS * rows * 32
    return region(sm, "sums") + (turn * sm.shape.tiles_in_group + place) * tile_bytes


@cute.jit
def put_sums(sm: Sm, turn: Int32, place: Int32, c0: Float32, c1: Float32):
    rows = sm.shape.rows
    if sm.group < rows:
        address = sums_address(sm, turn, place) + (sm.warp * rows + sm.group) * 32 + sm.quad * 8
        ptx.st_shared_v2_f32(address, c0, c1)


@cute.jit
def add_sums(sm: Sm, turn: Int32, place: Int32, row: Int32, half: Int32):
    """Outputs 4 * half ... 4 * half + 3 of a tile and batch row, over all warps."""
    rows = sm.shape.rows
    address = sums_address(sm, turn, place) + row * 32 + half * 16
    v0, v1, v2, v3 = ptx.ld_shared_v4_f32(address)
    for w in cutlass.range_constexpr(1, CONSUMER_WARPS):
        s0, s1, s2, s3 = ptx.ld_shared_v4_f32(address + w * rows * 32)
        v0, v1, v2, v3 = v0 + s0, v1 + s1, v2 + s2, v3 + s3
    return v0, v1, v2, v3


def unit_of_thread(sm: Sm, tiles: Int32) -> tuple[Int32, Int32, Int32, Boolean]:
    """The sums a thread adds up: tile of the group, batch row, half of the tile, and whether there are such."""
    rows = sm.shape.rows
    place = sm.thread // (2 * rows)
    rest = sm.thread - place * (2 * rows)
    return place, rest // 2, rest % 2, place < tiles
