"""RMSNorm of each row: before the first sublayer, on the query latent of MLA, and on the summed latent of the experts.

    h[d] = act(x[d] / sqrt(mean_d(x^2) + eps) * weight[d])      fp32 inside, one rounding

Layout   x       [R, D] act, any row stride     read
         weight  [D] act, any stride            read
         h       [R, D] act                     written
Work     grid (R); a program owns one row and keeps it in registers between the sum and the product
Bytes    (2*R + 1)*D*act
Error    one rounding to act; rsqrt
Source   DESIGN.md section 5; the second rounding of the HF module (before the weight) is left out, as fused kernels do
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kimi_kernels.checks import validate


@dataclass(frozen=True)
class RmsNormConfig:
    num_warps: int


def pick_rms_norm_config(width: int) -> RmsNormConfig:
    # 16 elements a thread (two 16-byte loads of bfloat16): the row is in flight at once, the sum needs few shuffles
    return RmsNormConfig(min(16, max(1, triton.next_power_of_2(width) // 512)))


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    h_ptr,
    eps,
    stride_x_r,
    stride_weight,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    x = tl.load(x_ptr + row * stride_x_r + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + offs_d * stride_weight, mask=mask_d, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
    tl.store(h_ptr + row * D + offs_d, x * scale * weight, mask=mask_d)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns h [R, D] in the dtype of `x`. Raises ValueError as `checks.validate` does."""
    dims = validate("rms_norm", x=x, weight=weight, eps=eps)
    return _launch(pick_rms_norm_config(dims["D"]), x, weight, eps)


def _launch(config: RmsNormConfig, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    rows, width = x.shape
    h = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows == 0:
        return h
    _rms_norm_kernel[(rows,)](
        x,
        weight,
        h,
        eps,
        x.stride(0),
        weight.stride(0),
        D=width,
        BLOCK_D=triton.next_power_of_2(width),
        num_warps=config.num_warps,
    )
    return h
