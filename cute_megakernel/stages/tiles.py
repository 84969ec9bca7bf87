"""Rows of weights times rows of activations, piece by piece out of the ring.

A tile is 8 outputs; its inputs come in blocks:

    bfloat16   32 inputs of 8 rows in a slot: lane (g, t) of a warp takes inputs 8t ... 8t+7 of row g, 16 bytes
    MXFP4      64 inputs, 272 bytes: lane (g, t) finds 8 codes of either half at its 8 bytes; behind them 8 pairs of
               scales, one pair an output

One `mma.m16n8k16` multiplies 16 rows of 16 weights by 8 columns of activations. The 8 outputs are there twice, with two
sets of inputs, the even ones and the odd ones of the block's words or its two halves; so are the batch rows, in pairs
of columns. What either set of outputs makes of the other's inputs is dropped: lane (g, t) holds output g of column
pair t in the first and the last of its four results. A pair without a batch row repeats another and is dropped too.

    bfloat16   pair p is batch row p, and p + 4 in a second product where there are more than 4
    MXFP4      with 1 or 2 batch rows, the pairs left over hold the blocks behind this one: 4 or 2 blocks of activations
               and of scales in one load

A piece is up to half a slot of a tile, or a few whole tiles, and one warp does it. Where a tile is cut into pieces
depends on its width alone, and its pieces are added up in their order, as are the blocks of a piece: an output has the
same bits whichever warp and SM did it and however many batch rows there are, and a batch row does not depend on the
others.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_megakernel import ptx
from cute_megakernel.core import Fields, Sm, region
from cute_megakernel.shape import KernelShape

CODES = 0x81C081C0 - (1 << 32)  # sign and magnitude of a code in both halves, as a bfloat16
HALF_VALUE = 0x7E007E00  # 2^125: a code as a bfloat16 is its value times 2^-126, and becomes half its value
BLOCK, SCALES_AT = 272, 256  # bytes of MXFP4
TURN = 4  # blocks of one turn of the loops
FEW_ROWS = 2  # single words of that many rows lie in banks of their own, of more rows up to four in one bank
ZEROS = (Float32(0.0),) * 4


def lane_weights(sm: Sm, pitch: Int32) -> Int32:
    """Bytes from a bfloat16 tile in a slot to the weights of this lane."""
    return ptx.opaque(sm.group) * pitch + ptx.opaque(sm.quad) * 16


def products(shape: KernelShape) -> int:
    """Products for a block of weights: each is of 4 batch rows."""
    return 2 if shape.rows > 4 else 1


def side_by_side(shape: KernelShape) -> int:
    """Column pairs that the batch rows take in a product with MXFP4, a power of two."""
    return 1 if shape.rows == 1 else 2 if shape.rows == 2 else 4


def lane_row(sm: Sm, mxfp4: bool) -> Int32:
    """Batch row whose activations this lane loads; the second product's is 4 more."""
    pair = ptx.opaque(sm.lane) >> 3
    return pair & (side_by_side(sm.shape) - 1) if mxfp4 else pair


def lane_inputs(sm: Sm, mxfp4: bool) -> Int32:
    """Bytes from the activations of a block to those that this lane loads."""
    lane = ptx.opaque(sm.lane)  # here and below: computed where it is used, not kept through the launch
    odd, quad = (lane >> 2) & 1, lane & 3
    if mxfp4:
        return (lane >> 3) // side_by_side(sm.shape) * 128 + odd * 64 + quad * 16
    return quad * 16 + (odd * 4 if sm.shape.rows <= FEW_ROWS else 0)


def x_address(sm: Sm, f: Fields, rows: Int32, mxfp4: bool) -> tuple[Int32, Int32]:
    """Where this lane reads activations, and how many bytes behind that for the second product."""
    row, pitch = lane_row(sm, mxfp4), f["x_pitch"]
    first = region(sm, "x") + f["x_at"] + ptx.select(row < rows, row, Int32(0)) * pitch + lane_inputs(sm, mxfp4)
    return first, ptx.select(row + 4 < rows, 4 * pitch, Int32(0))


@cute.jit
def multiply(sm: Sm, address: Int32, x: Int32, second: Int32, blocks: Int32, mxfp4: cutlass.Constexpr) -> tuple:
    """Blocks from `address` on (bfloat16: of this lane) times activations from `x` on, and `second` behind that for
    more than 4 batch rows.
    -> output `group` of batch rows `quad` and `quad` + 4"""
    ptx.sync_warp()  # the products need the whole warp
    if cutlass.const_expr(mxfp4):
        sums = _mxfp4(sm, address, x, second, blocks)
    else:
        sums = _bf16(sm, address, x, second, blocks)
    return sums


@cute.jit
def _bf16(sm: Sm, address: Int32, x: Int32, second: Int32, blocks: Int32) -> tuple:
    n, left, w = products(sm.shape), blocks, address
    sums = ZEROS * (2 * n)  # two chains of each product
    while left >= TURN:
        sums = _bf16_blocks(sm, w, x, second, TURN, sums)
        w, x = w + TURN * 64, x + TURN * 64
        left -= TURN
    while left > 0:
        sums = _bf16_blocks(sm, w, x, second, 1, sums)
        w, x = w + 64, x + 64
        left -= 1
    return tuple((sums[8 * p] + sums[8 * p + 3]) + (sums[8 * p + 4] + sums[8 * p + 7]) for p in range(n))


def _bf16_blocks(sm: Sm, w: Int32, x: Int32, second: Int32, count: int, sums: tuple) -> tuple:
    """32 inputs each; all loads before the first product."""
    n, sums = products(sm.shape), list(sums)
    weights, inputs = [], []
    for i in range(count):
        weights.append(ptx.ld_shared_v4_b32(w + i * 64))
        for p in range(n):
            inputs.append(_bf16_inputs(sm, x + (p * second + i * 64)))
    for i in range(count):
        for p in range(n):
            chain = 8 * p + 4 * (i % 2)
            sums[chain : chain + 4] = ptx.mma_bf16(tuple(sums[chain : chain + 4]), weights[i], inputs[n * i + p])
    return tuple(sums)


def _bf16_inputs(sm: Sm, at: Int32) -> tuple[Int32, Int32]:
    """Words 0 and 2 of this lane's inputs, or 1 and 3."""
    if sm.shape.rows <= FEW_ROWS:
        return ptx.ld_shared_b32(at), ptx.ld_shared_b32(at + 8)
    odd, words = (sm.lane & 4) != 0, ptx.ld_shared_v4_b32(at)
    return ptx.select(odd, words[1], words[0]), ptx.select(odd, words[3], words[2])


@cute.jit
def _mxfp4(sm: Sm, address: Int32, x: Int32, second: Int32, blocks: Int32) -> tuple:
    side, n, left = side_by_side(sm.shape), products(sm.shape), blocks
    ahead = ptx.opaque(sm.quad) // side
    codes, scales = address + ptx.opaque(sm.lane) * 8, address + (SCALES_AT + ptx.opaque(sm.group) * 2 + ahead * BLOCK)
    sums = (Float32(0.0),) * (2 * n * side)  # of the blocks of a turn that do not lie side by side
    while left >= TURN:
        sums = _mxfp4_blocks(sm, codes, scales, x, second, 0, TURN, left, sums)
        codes, scales, x = codes + TURN * BLOCK, scales + TURN * BLOCK, x + TURN * 128
        left -= TURN
    if left > 0:
        sums = _mxfp4_blocks(sm, codes, scales, x, second, 0, 2, left, sums)
    if left > 2:
        sums = _mxfp4_blocks(sm, codes, scales, x, second, 2, 2, left, sums)
    return tuple(_add_blocks(sums, side, n, p) for p in range(n))


def _add_blocks(sums: tuple, side: int, n: int, p: int) -> Float32:
    """(block 0 + block 1) + (block 2 + block 3) of the turns, whichever of them lie side by side."""
    parts = [sums[2 * (n * v + p)] + sums[2 * (n * v + p) + 1] for v in range(side)]
    for step in (side, 2 * side):
        parts = [part + ptx.shfl_xor(part, step) for part in parts] if step < TURN else parts
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _mxfp4_blocks(
    sm: Sm, codes: Int32, scales: Int32, x: Int32, second: Int32, first: int, count: int, left: Int32, sums: tuple
) -> tuple:
    """Blocks `first` and on of a turn, 64 inputs each, all of it or those below `left`. Scales apply to the products,
    as floats 2^(s - 127) times 2: the weights were halved, so that the least scale is no subnormal number."""
    side, n, sums = side_by_side(sm.shape), products(sm.shape), list(sums)
    window, whole = TURN // side, count == TURN
    ahead = ptx.opaque(sm.quad) // side
    windows = sorted({i // window for i in range(first, first + count)})
    words, pairs, inputs = [], {}, {}
    for i in range(first, first + count):
        at = i * BLOCK if whole or i == first else ptx.select(i < left, Int32(i * BLOCK), Int32(first * BLOCK))
        words.append(ptx.ld_shared_v2_b32(codes + at))
    for v in windows:
        at = v * window * BLOCK if whole else ptx.select(ahead + v * window < left, v * window * BLOCK, -ahead * BLOCK)
        pairs[v] = ptx.ld_shared_u16(scales + at)
        for p in range(n):
            inputs[v, p] = ptx.ld_shared_v4_b32(x + (p * second + v * window * 128))
    made = {}
    for i in range(first, first + count):
        a, b = decode_codes(*words[i - first])
        for p in range(n):
            x0, x1, x2, x3 = inputs[i // window, p]
            d = ptx.mma_bf16(ZEROS, (a[0], b[0], a[1], b[1]), (x0, x1))
            made[i, p] = ptx.mma_bf16(d, (a[2], b[2], a[3], b[3]), (x2, x3))
    for v in windows:
        own = [i for i in range(first, first + count) if i // window == v]
        mine = ahead + v * window  # the block whose products this lane has a use for
        for p in range(n):
            d0, d3 = made[own[0], p][0], made[own[0], p][3]
            for i in own[1:]:
                d0 = ptx.select_f32(mine == i, made[i, p][0], d0)
                d3 = ptx.select_f32(mine == i, made[i, p][3], d3)
            at = 2 * (n * v + p)
            even = ptx.fma(ptx.bits_float((pairs[v] << 23) & 0x7F800000), d0, sums[at])
            odd = ptx.fma(ptx.bits_float((pairs[v] << 15) & 0x7F800000), d3, sums[at + 1])
            if not whole:
                wanted = (mine >= own[0]) & (mine <= own[-1]) & (mine < left)
                even, odd = ptx.select_f32(wanted, even, sums[at]), ptx.select_f32(wanted, odd, sums[at + 1])
            sums[at], sums[at + 1] = even, odd
    return tuple(sums)


def decode_codes(first: Int32, last: Int32) -> tuple[tuple, tuple]:
    """Eight codes of either half, in the order of `images.mxfp4_words` -> four bfloat16 pairs of each, half values."""
    mixed = ((first << 1) & (0x90009000 - (1 << 32))) | ((last >> 6) & 0x01B001B0) | ((first >> 7) & 0x00480048)
    a = first & CODES, (first << 3) & CODES, (first << 6) & CODES, mixed & CODES
    b = last & CODES, (last << 3) & CODES, (last << 6) & CODES, (mixed << 3) & CODES
    return tuple(ptx.mul_bf16x2(pair, HALF_VALUE) for pair in a), tuple(ptx.mul_bf16x2(pair, HALF_VALUE) for pair in b)


def sums_address(sm: Sm, entry: Int32) -> Int32:
    """Partial sums of 8 outputs. [entry, row, 8] float32"""
    return region(sm, "sums") + entry * (sm.shape.rows * 32)


@cute.jit
def put_sums(sm: Sm, entry: Int32, sums: tuple):
    at = sums_address(sm, entry) + ptx.opaque(sm.quad) * 32 + ptx.opaque(sm.group) * 4
    for p in cutlass.range_constexpr(products(sm.shape)):
        if sm.quad + 4 * p < sm.shape.rows:
            ptx.st_shared_f32(at + 128 * p, sums[p])


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
    """Where outputs are stored several times, each copy has its threads. -> tile, copy, whether there are such"""
    copy = Int32(0)
    if copies > 1:
        copy = place // tiles
        place = place - copy * tiles
    return place, copy, (place < tiles) & (copy < copies)


def unit_of_thread(sm: Sm, share: int = 1) -> tuple[Int32, Int32, Int32]:
    """The sums a thread adds up, or `share` threads, a power of two: tile of the group, batch row, half of the tile."""
    thread, rows = ptx.opaque(sm.thread) >> share.bit_length() - 1, sm.shape.rows
    half, unit = thread & 1, thread >> 1
    if rows & (rows - 1) == 0:
        return unit >> rows.bit_length() - 1, unit & (rows - 1), half
    return unit // rows, unit % rows, half
