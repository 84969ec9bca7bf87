"""MXFP4 weights inside a kernel: packed words and scale bytes in checkpoint layout, contracted with activations.

    w[n, c]   = E2M1[code[n, c]] * 2^(scale[n, c // 32] - 127)      exact for 16 codes and 256 scales; 255 is NaN
    acc[n, r] = sum_c w[n, c] * x[r, c]                             products exact, sums in float32

A word holds the codes of inputs 8w ... 8w+7, lowest bits first. Nibbles p and p+4 lie 16 bits apart, so one masked word
is a pair of weights; x is split the same way into four parts (inputs p and p+4 of every word), and each part is one
tensor-core dot. Nothing is interleaved, and no weight moves between threads after it was loaded.

A weight must be finite and keep all its bits. In bfloat16 one factor per pair of weights is enough for scales up to 2.
A block that meets a larger scale is computed again (SCALED), in two parts: the weights of its largest scales times
2^-64, then all others.
"""

import torch
import triton
import triton.language as tl

GROUP = tl.constexpr(32)  # inputs per scale
ONE_FACTOR = tl.constexpr(128)  # last scale byte whose factor 2^(byte - 1) is a bfloat16
LARGEST = tl.constexpr(1)  # part of the scales above FINITE
FINITE = tl.constexpr(250)  # last scale byte whose weights are finite with room to spare


def _decode_ptx() -> str:
    """One word ($8) and a factor twice in bfloat16 ($9) to the pairs (0, 4), (1, 5), (2, 6), (3, 7) in $0 ... $7.

    The magnitude bits e1 e0 m at bits 8 ... 6 of a bfloat16 are the value times 2^-126, 0.5 included (a subnormal, and
    mul.bf16x2 keeps those). One multiply puts a nibble there and its sign at bit 15; a mask clears the bits in between.
    """
    lines = ["{ .reg .b32 word, pair;", "mov.b32 word, $8;"]
    for p in range(4):
        if p == 2:
            lines.append("shr.u32 word, word, 8;")
        lines += [
            f"and.b32 pair, word, {0x000F000F << 4 * (p % 2)};",
            f"mul.lo.u32 pair, pair, {(2**6 + 2**12) >> 4 * (p % 2)};",
            f"and.b32 pair, pair, {0x81C081C0};",
            "mul.rn.bf16x2 pair, pair, $9;",
            f"mov.b32 {{${2 * p}, ${2 * p + 1}}}, pair;",
        ]
    return "\n".join([*lines, "}"])


DECODE_PTX = tl.constexpr(_decode_ptx())
DECODE_CONSTRAINTS = tl.constexpr(",".join(["=h"] * 8 + ["r"] * 2))


@triton.jit
def _spread(scale, TIMES: tl.constexpr):
    """[S, N, G] -> [S, N, G * TIMES], each value TIMES in a row."""
    S: tl.constexpr = scale.shape[0]
    N: tl.constexpr = scale.shape[1]
    G: tl.constexpr = scale.shape[2]
    return tl.reshape(tl.broadcast_to(scale[:, :, :, None], (S, N, G, TIMES)), (S, N, G * TIMES))


@triton.jit
def _power(exponent):
    """2^(exponent - 127) in float32 for 0 <= exponent < 255."""
    return tl.where(exponent == 0, 0x00400000, exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _pair(low, high):
    """Two [S, N, W] -> [S, N, 2 * W], alternating."""
    S: tl.constexpr = low.shape[0]
    N: tl.constexpr = low.shape[1]
    W: tl.constexpr = low.shape[2]
    return tl.reshape(tl.join(low, high), (S, N, 2 * W))


@triton.jit
def _decode_bf16(words, scale, part, SCALED: tl.constexpr):
    """The four parts of the weights in bfloat16; SCALED, those of scales that belong to `part`, others zero."""
    first = tl.minimum(scale, ONE_FACTOR) if SCALED else scale
    factor = first * 0x00800080 + 0x3F003F00  # 2^(first - 127) * 2^126 in bfloat16, twice
    if SCALED:
        factor = tl.where((scale > FINITE) == (part == LARGEST), factor, 0)
    w0, w4, w1, w5, w2, w6, w3, w7 = tl.inline_asm_elementwise(
        DECODE_PTX, DECODE_CONSTRAINTS, [words, _spread(factor, 4)], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1
    )
    w0, w1, w2, w3 = _pair(w0, w4), _pair(w1, w5), _pair(w2, w6), _pair(w3, w7)
    if SCALED:
        second = _power(tl.maximum(scale, ONE_FACTOR) - ONE_FACTOR + 127 - 64 * part)
        second = _spread(tl.where(scale == 255, float("nan"), second).to(tl.bfloat16), 8)
        w0, w1, w2, w3 = w0 * second, w1 * second, w2 * second, w3 * second
    return w0, w1, w2, w3


@triton.jit
def _decode_nibble(words, scale, P: tl.constexpr):
    # the same placement as in `_decode_ptx`, in float32: magnitude at bits 24 ... 22, sign at bit 31
    bits = (((words >> 4 * P) & 7) << 22) | (((words >> 4 * P) & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 2.0**126 * scale


@triton.jit
def _decode_fp32(words, scale, part, SCALED: tl.constexpr):
    """As `_decode_bf16`, in float32."""
    factor = _power(scale)
    if SCALED:
        factor = tl.where((scale > FINITE) == (part == LARGEST), _power(tl.maximum(scale - 64 * part, 0)), 0.0)
    factor = _spread(tl.where(scale == 255, float("nan"), factor), 4)
    w0 = _pair(_decode_nibble(words, factor, 0), _decode_nibble(words, factor, 4))
    w1 = _pair(_decode_nibble(words, factor, 1), _decode_nibble(words, factor, 5))
    w2 = _pair(_decode_nibble(words, factor, 2), _decode_nibble(words, factor, 6))
    w3 = _pair(_decode_nibble(words, factor, 3), _decode_nibble(words, factor, 7))
    return w0, w1, w2, w3


@triton.jit
def _split_inputs(x):
    """[S, R, 8 * W] -> four [S, 2 * W, R]: inputs p and p+4 of every word, the order of the weights."""
    S: tl.constexpr = x.shape[0]
    R: tl.constexpr = x.shape[1]
    W: tl.constexpr = x.shape[2] // 8
    even, odd = tl.split(tl.reshape(x, (S, R, W, 2, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    x0 = tl.permute(tl.reshape(x0, (S, R, 2 * W)), 0, 2, 1)
    x1 = tl.permute(tl.reshape(x1, (S, R, 2 * W)), 0, 2, 1)
    x2 = tl.permute(tl.reshape(x2, (S, R, 2 * W)), 0, 2, 1)
    x3 = tl.permute(tl.reshape(x3, (S, R, 2 * W)), 0, 2, 1)
    return x0, x1, x2, x3


@triton.jit
def _contract(
    x_ptrs,
    mask_x,
    weights,
    STRIDES: tl.constexpr,
    expert,
    offs_n,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    COMPUTE: tl.constexpr,
    SCALED: tl.constexpr,
    part=0,
):
    """[SPLIT, N, R] float32 and the largest scale byte met, per lane."""
    STEP: tl.constexpr = SPLIT * BLOCK_C
    packed_ptr, scale_ptr = weights
    offs_split = tl.arange(0, SPLIT)[:, None, None]
    offs_c = offs_split * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_w = offs_split * (BLOCK_C // 8) + tl.arange(0, BLOCK_C // 8)
    offs_g = offs_split * (BLOCK_C // GROUP) + tl.arange(0, BLOCK_C // GROUP)
    packed_ptrs = packed_ptr + expert * STRIDES[0] + offs_n[:, None] * STRIDES[1] + offs_w
    scale_ptrs = scale_ptr + expert * STRIDES[2] + offs_n[:, None] * STRIDES[3] + offs_g
    acc = tl.zeros((SPLIT, offs_n.shape[0], x_ptrs.shape[1]), tl.float32)
    largest = tl.zeros((SPLIT, offs_n.shape[0], BLOCK_C // GROUP), tl.int32)
    for c in tl.range(0, C, STEP, num_stages=STAGES):
        if C % STEP == 0:
            words = tl.load(packed_ptrs + c // 8)
            scale = tl.load(scale_ptrs + c // GROUP)
            x = tl.load(x_ptrs + offs_c + c, mask=mask_x, other=0.0)
        else:
            words = tl.load(packed_ptrs + c // 8, mask=offs_w < (C - c) // 8, other=0)
            scale = tl.load(scale_ptrs + c // GROUP, mask=offs_g < (C - c) // GROUP, other=0)
            x = tl.load(x_ptrs + offs_c + c, mask=mask_x & (offs_c < C - c), other=0.0)
        scale = scale.to(tl.int32)
        largest = tl.maximum(largest, scale)
        x0, x1, x2, x3 = _split_inputs(x.to(COMPUTE))
        if COMPUTE == tl.bfloat16:
            w0, w1, w2, w3 = _decode_bf16(words, scale, part, SCALED)
        else:
            w0, w1, w2, w3 = _decode_fp32(words, scale, part, SCALED)
        acc = tl.dot(w0, x0, acc, input_precision="ieee")
        acc = tl.dot(w1, x1, acc, input_precision="ieee")
        acc = tl.dot(w2, x2, acc, input_precision="ieee")
        acc = tl.dot(w3, x3, acc, input_precision="ieee")
    return acc, largest


@triton.jit
def contract_mxfp4(
    x_ptrs,
    mask_x,
    weights,
    STRIDES: tl.constexpr,
    expert,
    offs_n,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Rows `offs_n` of an MXFP4 expert times x. -> [N, R] float32

    `weights` is (packed words, scale bytes); STRIDES are those of expert and row of the two, in elements.
    """
    acc, largest = _contract(
        x_ptrs, mask_x, weights, STRIDES, expert, offs_n, C, BLOCK_C, SPLIT, STAGES, COMPUTE, SCALED=False
    )
    if tl.max(largest) > (ONE_FACTOR if COMPUTE == tl.bfloat16 else FINITE):
        high, largest = _contract(
            x_ptrs, mask_x, weights, STRIDES, expert, offs_n, C, BLOCK_C, SPLIT, 1, COMPUTE, True, LARGEST
        )
        acc, largest = _contract(
            x_ptrs, mask_x, weights, STRIDES, expert, offs_n, C, BLOCK_C, SPLIT, 1, COMPUTE, True, 0
        )
        acc += high * 2.0**64
    return tl.sum(acc, axis=0)


def as_words(op: str, name: str, packed: torch.Tensor) -> torch.Tensor:
    """`packed` [E, N, C/2] uint8 as int32 words [E, N, C/8], without a copy."""
    if packed.storage_offset() % 4 or any(stride % 4 for stride in packed.stride()[:-1]):
        raise ValueError(
            f"{op}: {name} must have rows that start at multiples of 4 bytes, got strides {packed.stride()}"
        )
    return packed.view(torch.int32)
