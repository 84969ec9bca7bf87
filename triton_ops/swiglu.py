"""SwiGLU, the activation of the Kimi-Linear MLPs and experts: between the gate-up and the down projection.

    m[i] = act(gate[i] * sigmoid(gate[i]) * up[i])      gate = gate_up[:I], up = gate_up[I:]; fp32 inside, one rounding

Layout   gate_up  [R, 2*I] act, gate then up, any row stride     read
         m        [R, I] act                                     written
Work     grid (R, column blocks); a program owns one block of one row
Bytes    3*R*I*act
Error    one rounding to act; exp and the division of the sigmoid
Source   DESIGN.md section 5; `hidden_act` silu of the Kimi-Linear config
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kimi_kernels.checks import validate


@dataclass(frozen=True)
class SwigluConfig:
    block_i: int
    num_warps: int


def pick_swiglu_config(width: int) -> SwigluConfig:
    # 16 bytes of bfloat16 a thread; two warps, because an expert has as few as 96 channels on a rank
    return SwigluConfig(min(512, triton.next_power_of_2(width)), 2)


@triton.jit
def _swiglu_kernel(
    gate_up_ptr,
    m_ptr,
    stride_r,
    I: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs_i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    mask_i = offs_i < I
    gate = tl.load(gate_up_ptr + row * stride_r + offs_i, mask=mask_i, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride_r + I + offs_i, mask=mask_i, other=0.0).to(tl.float32)
    tl.store(m_ptr + row * I + offs_i, gate * tl.sigmoid(gate) * up, mask=mask_i)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns m [R, I] in the dtype of `gate_up`. Raises ValueError as `checks.validate` does."""
    dims = validate("swiglu", gate_up=gate_up)
    return _launch(pick_swiglu_config(dims["I"]), gate_up)


def _launch(config: SwigluConfig, gate_up: torch.Tensor) -> torch.Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    m = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if rows == 0:
        return m
    _swiglu_kernel[(rows, triton.cdiv(width, config.block_i))](
        gate_up,
        m,
        gate_up.stride(0),
        I=width,
        BLOCK_I=config.block_i,
        num_warps=config.num_warps,
    )
    return m
