"""SiTU, the gated activation of the Kimi K3 MLPs and experts: between the gate-up and the down projection.

    m[i] = act(beta * tanh(gate[i] / beta) * sigmoid(gate[i]) * linear_beta * tanh(up[i] / linear_beta))
    gate = gate_up[:I], up = gate_up[I:]; fp32 inside, one rounding

Layout   gate_up  [R, 2*I] act, gate then up, any row stride     read
         m        [R, I] act                                     written
Work     grid (R, column blocks); a program owns one block of one row
Bytes    3*R*I*act
Error    one rounding to act; tanh within 8 * 2^-24 relative for any input, exp and the division of the sigmoid
Source   DESIGN.md section 5; `activation_situ_beta`, `activation_situ_linear_beta` of the Kimi K3 config
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kimi_kernels.checks import validate


@dataclass(frozen=True)
class SituConfig:
    block_i: int
    num_warps: int


def pick_situ_config(width: int) -> SituConfig:
    # 16 bytes of bfloat16 a thread; two warps, because an expert has as few as 96 channels on a rank
    return SituConfig(min(512, triton.next_power_of_2(width)), 2)


@triton.jit
def _tanh(x):
    """tanh without cancellation near zero and without inf / inf: tanh.approx is off by 2^-11."""
    square = x * x
    # (tanh(x) / x - 1) / x^2 on |x| <= 1/2: a minimax fit in float64, 1.3 * 2^-24 relative after rounding to float32
    series = -0.33333143592 + square * (0.13325878978 + square * (-0.05304548517 + square * 0.01724146865))
    tail = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(tl.abs(x) < 0.5, x + x * square * series, tl.where(x < 0, -tail, tail))


@triton.jit
def _situ_kernel(
    gate_up_ptr,
    m_ptr,
    beta,
    linear_beta,
    stride_r,
    I: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs_i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    mask_i = offs_i < I
    gate = tl.load(gate_up_ptr + row * stride_r + offs_i, mask=mask_i, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride_r + I + offs_i, mask=mask_i, other=0.0).to(tl.float32)
    gated = beta * _tanh(gate / beta) * tl.sigmoid(gate)
    tl.store(m_ptr + row * I + offs_i, gated * (linear_beta * _tanh(up / linear_beta)), mask=mask_i)


def situ(gate_up: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
    """Returns m [R, I] in the dtype of `gate_up`. Raises ValueError as `checks.validate` does."""
    dims = validate("situ", gate_up=gate_up, beta=beta, linear_beta=linear_beta)
    return _launch(pick_situ_config(dims["I"]), gate_up, beta, linear_beta)


def _launch(config: SituConfig, gate_up: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    m = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if rows == 0:
        return m
    _situ_kernel[(rows, triton.cdiv(width, config.block_i))](
        gate_up,
        m,
        float(beta),
        float(linear_beta),
        gate_up.stride(0),
        I=width,
        BLOCK_I=config.block_i,
        num_warps=config.num_warps,
    )
    return m
