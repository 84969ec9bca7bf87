"""The MXFP4 codec in torch, exact: E2M1 codes, two a byte, one E8M0 scale for 32 inputs of a row.

    byte j of a row holds input 2j in its low nibble and input 2j+1 in its high nibble
    code   bit 3 sign, low bits index {0, 0.5, 1, 1.5, 2, 3, 4, 6}; code 8 is -0
    scale  byte s is 2^(s-127); 0 is 2^-127, 255 is NaN for its block
    value  code * scale, exact in bfloat16 and wider for every scale that the dtype can hold

Source   OCP Microscaling Formats 1.0; compressed-tensors format `mxfp4-pack-quantized` (quantization_config of Kimi
K3).
"""

import torch

Tensor = torch.Tensor
GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def unpack(packed: Tensor) -> Tensor:
    """Codes of `packed` [..., C/2] uint8, in column order. -> [..., C] uint8"""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def pack(codes: Tensor) -> Tensor:
    """Inverse of `unpack`: [..., C] uint8 codes -> [..., C/2] uint8."""
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4)


def scale_value(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """2^(s-127) in `dtype`, NaN for 255."""
    value = torch.ldexp(torch.ones_like(scale, dtype=torch.float64), scale.to(torch.int32) - 127)
    return torch.where(scale == 255, torch.nan, value).to(dtype)


def dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights of `packed` [..., C/2] and `scale` [..., C/32], both uint8, in `dtype`. -> [..., C]"""
    table = torch.tensor(E2M1, dtype=torch.float64, device=packed.device)
    groups = table[unpack(packed).long()].unflatten(-1, (-1, GROUP))
    return (groups * scale_value(scale, torch.float64).unsqueeze(-1)).flatten(-2).to(dtype)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest MXFP4 weights of `weight` [..., C]: packed [..., C/2] and scale [..., C/32], uint8.

    The scale of a group is the power of two that brings its largest magnitude to at most 6; ties go to the smaller
    magnitude.
    """
    groups = weight.double().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=2.0**-120)
    exponent = torch.ceil(torch.log2(largest / 6)).clamp(-127, 127)
    magnitudes = torch.tensor(E2M1[:8], dtype=torch.float64, device=weight.device)
    boundaries = (magnitudes[1:] + magnitudes[:-1]) / 2
    codes = torch.bucketize((groups.abs() / torch.exp2(exponent)).contiguous(), boundaries).to(torch.uint8)
    codes = codes | (torch.signbit(groups).to(torch.uint8) << 3)
    return pack(codes.flatten(-2)), (exponent.squeeze(-1) + 127).to(torch.uint8)
