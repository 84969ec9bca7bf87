"""Sum of two activations: prefix plus sublayer output, routed plus shared experts.

    y = act(x + delta)      added in fp32, one rounding

Layout   x, delta  [R, D] act, any row stride     read
         y         [R, D] act                     written
Work     grid (R, column blocks); a program owns one block of one row
Bytes    3*R*D*act
Error    one rounding to act
Source   DESIGN.md section 5
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kimi_kernels.checks import validate


@dataclass(frozen=True)
class ResidualAddConfig:
    block_d: int
    num_warps: int


def pick_residual_add_config(width: int) -> ResidualAddConfig:
    # 16 bytes of bfloat16 a thread: one load of each input, as many programs as that allows
    return ResidualAddConfig(min(1024, triton.next_power_of_2(width)), 4)


@triton.jit
def _residual_add_kernel(
    x_ptr,
    delta_ptr,
    y_ptr,
    stride_x_r,
    stride_delta_r,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    x = tl.load(x_ptr + row * stride_x_r + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    delta = tl.load(delta_ptr + row * stride_delta_r + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * D + offs_d, x + delta, mask=mask_d)


def residual_add(x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Returns y [R, D] in the dtype of `x`. Raises ValueError as `checks.validate` does."""
    dims = validate("residual_add", x=x, delta=delta)
    return _launch(pick_residual_add_config(dims["D"]), x, delta)


def _launch(config: ResidualAddConfig, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    rows, width = x.shape
    y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows == 0:
        return y
    _residual_add_kernel[(rows, triton.cdiv(width, config.block_d))](
        x,
        delta,
        y,
        x.stride(0),
        delta.stride(0),
        D=width,
        BLOCK_D=config.block_d,
        num_warps=config.num_warps,
    )
    return y
