"""Rows of weights times rows of activations, piece by piece out of the ring.

A tile is 8 outputs; its inputs come in blocks, each a contiguous piece of the ring:

    bfloat16   32 inputs, 512 bytes: lane (g, t) of a warp finds output g, inputs 8t ... 8t+7 at its 16 bytes
    MXFP4      64 inputs, 272 bytes: lane (g, t) finds 8 codes of either half at its 8 bytes; behind them 8 pairs of
               scales, one pair an output

One `mma.m16n8k16` multiplies 16 inputs of 8 outputs by up to 8 batch rows. A piece is up to half a slot of a tile, or
a few whole tiles, and one warp does it. Where a tile is cut into pieces depends on its width alone, and its pieces are
added up in their order: an output has the same bits whichever warp and SM did it, and a batch row does not depend on
the others.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_megakernel import ptx
from cute_megakernel.core import Fields, Sm, region

CODES = 0x81C081C0 - (1 << 32)  # sign and magnitude of a code in both halves, as a bfloat16
BF16_TURN, MXFP4_TURN = 4, 2  # blocks of one turn of the loop


def x_address(sm: Sm, f: Fields, rows: Int32) -> Int32:
    """Where this lane reads activations: its batch row, or the zeros where there is no such row."""
    at = region(sm, "x") + f["x_at"] + sm.group * f["x_pitch"] + sm.quad * 16
    return ptx.select(sm.group < rows, at, region(sm, "zero"))


@cute.jit
def multiply(sm: Sm, address: Int32, x: Int32, step: Int32, blocks: Int32, mxfp4: cutlass.Constexpr):
    """Blocks from `address` on times activations from `x` on. -> outputs 2 * quad and 2 * quad + 1 of row `group`

    `step` is the bytes of activations of a block, 0 for a lane without a batch row: it loads none.
    """
    turn, nbytes = (MXFP4_TURN, 272) if mxfp4 else (BF16_TURN, 512)
    ptx.sync_warp()  # the products need the whole warp
    sums = (Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0))
    left = blocks
    while left >= turn:
        sums = _blocks(sm, address, x, step, turn, sums, mxfp4)
        address, x = address + turn * nbytes, x + turn * step
        left -= turn
    while left > 0:
        sums = _blocks(sm, address, x, step, 1, sums, mxfp4)
        address, x = address + nbytes, x + step
        left -= 1
    return sums[0] + sums[2], sums[1] + sums[3]


@cute.jit
def _blocks(
    sm: Sm, address: Int32, x: Int32, inside: Int32, count: cutlass.Constexpr, sums: tuple, mxfp4: cutlass.Constexpr
):
    if cutlass.const_expr(mxfp4):
        sums = _mxfp4_blocks(sm, address, x, inside, count, sums)
    else:
        sums = _bf16_blocks(sm, address, x, inside, count, sums)
    return sums


@cute.jit
def _bf16_blocks(sm: Sm, address: Int32, x: Int32, inside: Int32, count: cutlass.Constexpr, sums: tuple):
    """32 inputs each; all loads before the first product."""
    c0, c1, d0, d1 = sums
    w, a = [], []
    for i in cutlass.range_constexpr(count):
        w.append(ptx.ld_shared_v4_b32(address + sm.lane * 16 + i * 512))
        a.append(ptx.ld_shared_v4_b32_if(inside, x + i * 64))
    for i in cutlass.range_constexpr(count):
        c0, c1 = ptx.mma_bf16(c0, c1, a[i][0], a[i][1], w[i][0], w[i][1])
        d0, d1 = ptx.mma_bf16(d0, d1, a[i][2], a[i][3], w[i][2], w[i][3])
    return c0, c1, d0, d1


@cute.jit
def _mxfp4_blocks(sm: Sm, address: Int32, x: Int32, inside: Int32, count: cutlass.Constexpr, sums: tuple):
    """64 inputs each: codes become bfloat16 values times 2^-126, the scale times 2^126 brings them back, exactly."""
    c0, c1, d0, d1 = sums
    words, scales, a = [], [], []
    for i in cutlass.range_constexpr(count):
        words.append(ptx.ld_shared_v2_b32(address + sm.lane * 8 + i * 272))
        scales.append(ptx.ld_shared_u16(address + sm.group * 2 + i * 272 + 256))
        for half in cutlass.range_constexpr(2):
            a.append(ptx.ld_shared_v4_b32_if(inside, x + i * 128 + half * 64))
    for i in cutlass.range_constexpr(count):
        for half in cutlass.range_constexpr(2):
            exponent = ((scales[i] >> 8) if half else (scales[i] & 0xFF)) + 126
            p0, p1, p2, p3 = decode_codes(words[i][half], exponent)
            a0, a1, a2, a3 = a[2 * i + half]
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


def sums_address(sm: Sm, entry: Int32) -> Int32:
    """Partial sums of 8 outputs. [entry, row, 8] float32"""
    return region(sm, "sums") + entry * (sm.shape.rows * 32)


@cute.jit
def put_sums(sm: Sm, entry: Int32, c0: Float32, c1: Float32):
    if sm.group < sm.shape.rows:
        ptx.st_shared_v2_f32(sums_address(sm, entry) + sm.group * 32 + sm.quad * 8, c0, c1)


@cute.jit
def add_sums(sm: Sm, entry: Int32, row: Int32, half: Int32, count: Int32):
    """Outputs 4 * half ... 4 * half + 3 of a batch row, over `count` entries in their order, four loads at a time."""
    address = sums_address(sm, entry) + row * 32 + half * 16
    v = (Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0))
    left = count
    while left >= 4:
        v = _add_entries(sm, address, v, 4)
        address, left = address + 4 * (sm.shape.rows * 32), left - 4
    while left > 0:
        v = _add_entries(sm, address, v, 1)
        address, left = address + sm.shape.rows * 32, left - 1
    return v


@cute.jit
def _add_entries(sm: Sm, address: Int32, v: tuple, count: cutlass.Constexpr):
    parts = [ptx.ld_shared_v4_f32(address + i * (sm.shape.rows * 32)) for i in range(count)]
    for p in parts:
        v = (v[0] + p[0], v[1] + p[1], v[2] + p[2], v[3] + p[3])
    return v


@cute.jit
def copy_of_thread(place: Int32, tiles: Int32, copies: Int32):
    """Where outputs are stored several times, each copy has threads of its own. -> tile, copy, whether there are such"""
    copy = Int32(0)
    if copies > 1:
        copy = place // tiles
        place = place - copy * tiles
    return place, copy, (place < tiles) & (copy < copies)


def unit_of_thread(sm: Sm) -> tuple[Int32, Int32, Int32]:
    """The sums a thread adds up: tile of the group, batch row, half of the tile."""
    half, unit, rows = sm.thread & 1, sm.thread >> 1, sm.shape.rows
    if rows & (rows - 1) == 0:
        return unit >> rows.bit_length() - 1, unit & (rows - 1), half
    return unit // rows, unit % rows, half
