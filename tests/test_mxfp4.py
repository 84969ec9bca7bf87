"""The MXFP4 codec, exhaustively: 16 codes, 256 scales, 256 bytes; the quantiser; the kernels' decode program in PTX."""

import re

import pytest
import torch
from cases import fills, make, seeds
from hypothesis import given

from kimi_kernels import mxfp4

U8 = torch.uint8
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
ALL_CODES, ALL_SCALES = torch.arange(16, dtype=U8), torch.arange(256, dtype=U8)


def exact(code: int, scale: int) -> float:
    """OCP Microscaling: sign, two exponent bits with bias 1, one mantissa bit; the scale is a power of two."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    magnitude = (2 + mantissa) * 2.0 ** (exponent - 2) if exponent else mantissa * 0.5
    return (-1.0) ** sign * magnitude * 2.0 ** (scale - 127)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_at_every_scale(dtype):
    """Faults N18, N20: byte 0 is 2^-127, 0.5 there is 2^-128 (bfloat16 0x0020); 255 is NaN; overflow is infinite."""
    codes = torch.cat([ALL_CODES, ALL_CODES]).expand(256, 32)
    got = mxfp4.dequantize(mxfp4.pack(codes), ALL_SCALES[:, None], dtype)
    want = torch.tensor([[exact(c, s) for c in range(16)] for s in range(255)], dtype=torch.float64).to(dtype)
    assert got[255].isnan().all()
    for half in got[:255, :16], got[:255, 16:]:
        assert torch.equal(half, want) and torch.equal(half.signbit(), want.signbit())
    if dtype == torch.bfloat16:
        assert got[0, 1].view(torch.int16).item() == 0x0020
        assert got[254, 4].isinf() and got[254, 3].isfinite()


def test_low_nibble_is_the_even_column():
    """Fault N21: byte i holds code i in its low nibble and 15 - i in its high nibble."""
    packed = ALL_CODES | (15 - ALL_CODES << 4)
    w = mxfp4.dequantize(packed, torch.tensor([127], dtype=U8), torch.float32)
    assert w[0::2].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert w[1::2].tolist() == w[0::2].flip(0).tolist()


def test_pack_and_unpack_are_inverse_for_every_byte():
    assert torch.equal(mxfp4.pack(mxfp4.unpack(ALL_SCALES)), ALL_SCALES)
    assert mxfp4.unpack(torch.tensor([0xA5], dtype=U8)).tolist() == [5, 10]


def test_scale_of_one_group_does_not_reach_the_next():
    """Fault N18: groups are 32 columns of one row, 16 bytes."""
    packed = torch.full((2, 48), 0x22, dtype=U8)
    w = mxfp4.dequantize(packed, torch.tensor([[127, 255, 128], [126, 127, 0]], dtype=U8), torch.float32)
    assert w[0, :32].eq(1).all() and w[0, 32:64].isnan().all() and w[0, 64:].eq(2).all()
    assert w[1, :32].eq(0.5).all() and w[1, 64:].eq(2.0**-127).all()


@given(fills, seeds)
def test_quantize_takes_the_nearest_code(fill, seed):
    """No other code of the group's scale is nearer; in that scale the largest magnitude is at most 6 and above 3."""
    weight = make(3, 96, fill=fill, seed=seed, dtype=torch.float32)
    packed, scale = mxfp4.quantize(weight)
    got = mxfp4.dequantize(packed, scale, torch.float64)
    groups, unit = weight.double().unflatten(-1, (-1, 32)), mxfp4.scale_value(scale, torch.float64)[..., None]
    nearest = (groups[..., None] - torch.tensor(mxfp4.E2M1, dtype=torch.float64) * unit[..., None]).abs().amin(-1)
    assert torch.equal((groups - got.unflatten(-1, (-1, 32))).abs(), nearest)
    top = groups.abs().amax(-1, keepdim=True) / unit
    assert (top <= 6).all() and ((top > 3) | (top == 0)).all()


def test_quantize_keeps_what_mxfp4_holds():
    """Every scale that a bfloat16 weight can need, with a 6 in each group: quantize is the inverse of dequantize."""
    codes = torch.cat([ALL_CODES, ALL_CODES.flip(0)]).expand(246, 32)
    packed, scale = mxfp4.pack(codes), torch.arange(6, 252, dtype=U8)[:, None]
    again, same = mxfp4.quantize(mxfp4.dequantize(packed, scale, torch.bfloat16))
    assert torch.equal(again, packed) and torch.equal(same, scale)


def test_decode_program_of_the_kernels_is_exact():
    """The PTX that decodes a word, run by a small interpreter: all codes in all places, every scale with one factor."""
    from triton_ops._mxfp4 import DECODE_PTX

    scale = torch.arange(129, dtype=torch.int64)
    factor = scale * 0x00800080 + 0x3F003F00
    for code in range(16):
        for place in range(8):
            pairs = run_ptx(DECODE_PTX.value, word=torch.full_like(scale, code << 4 * place), factor=factor)
            for output, value in enumerate(pairs):
                at = output // 2 + 4 * (output % 2)  # $0 ... $7 are the nibbles 0, 4, 1, 5, 2, 6, 3, 7
                want = [exact(code, s) if at == place else 0.0 for s in scale.tolist()]
                assert torch.equal(value.double(), torch.tensor(want, dtype=torch.float64)), (code, place, output)


def run_ptx(text: str, word: torch.Tensor, factor: torch.Tensor) -> list[torch.Tensor]:
    """Bfloat16 outputs $0 ... $7 of straight-line PTX on 32-bit registers held in int64 tensors."""
    registers = {"$8": word, "$9": factor}
    outputs: dict[int, torch.Tensor] = {}
    halves = lambda r: [(r >> shift & 0xFFFF).to(torch.int32) for shift in (0, 16)]  # noqa: E731
    value = lambda h: (h << 16).view(torch.float32)  # noqa: E731

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        # both are bfloat16: the product is exact in float64 and rounds once
        rounded = [
            (value(x).double() * value(y).double()).bfloat16() for x, y in zip(halves(a), halves(b), strict=True)
        ]
        low, high = (r.view(torch.int16).long() & 0xFFFF for r in rounded)
        return low | high << 16

    run = {
        "mov.b32": lambda a: a,
        "and.b32": lambda a, b: a & b,
        "shr.u32": lambda a, b: a >> b,
        "mul.lo.u32": lambda a, b: a * b & 0xFFFFFFFF,
        "mul.rn.bf16x2": product,
    }
    for statement in text.replace("{ .reg .b32 word, pair;", "").rstrip("}").split(";"):
        if not statement.strip():
            continue
        name, operands = statement.split(maxsplit=1)
        if unpack := re.match(r"\{\$(\d), \$(\d)\}, (\w+)", operands):
            low, high = halves(registers[unpack[3]])
            outputs[int(unpack[1])], outputs[int(unpack[2])] = value(low).bfloat16(), value(high).bfloat16()
            continue
        target, *sources = operands.replace(",", "").split()
        registers[target] = run[name](*(registers[s] if s in registers else int(s) for s in sources))
    return [outputs[i] for i in range(8)]
