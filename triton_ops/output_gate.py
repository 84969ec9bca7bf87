"""Sigmoid gate on the attention output of MLA, before its output projection.

    y[n] = act(o[n] * sigmoid(out_gate[n]))      fp32 inside, one rounding

Layout   o, out_gate  [R, N] act, any row stride     read
         y            [R, N] act                     written
Work     grid (R, column blocks); a program owns one block of one row
Bytes    3*R*N*act
Error    one rounding to act; exp and the division of the sigmoid. The HF module rounds the sigmoid to bfloat16 first
Source   DESIGN.md section 5; `mla_use_output_gate` of the Kimi K3 config
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kimi_kernels.checks import validate


@dataclass(frozen=True)
class OutputGateConfig:
    block_n: int
    num_warps: int


def pick_output_gate_config(width: int) -> OutputGateConfig:
    # 16 bytes of bfloat16 a thread; two warps, because a rank has as few as 384 channels
    return OutputGateConfig(min(512, triton.next_power_of_2(width)), 2)


@triton.jit
def _output_gate_kernel(
    o_ptr,
    gate_ptr,
    y_ptr,
    stride_o_r,
    stride_gate_r,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    o = tl.load(o_ptr + row * stride_o_r + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * stride_gate_r + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * N + offs_n, o * tl.sigmoid(gate), mask=mask_n)


def output_gate(o: torch.Tensor, out_gate: torch.Tensor) -> torch.Tensor:
    """Returns y [R, N] in the dtype of `o`. Raises ValueError as `checks.validate` does."""
    dims = validate("output_gate", o=o, out_gate=out_gate)
    return _launch(pick_output_gate_config(dims["N"]), o, out_gate)


def _launch(config: OutputGateConfig, o: torch.Tensor, out_gate: torch.Tensor) -> torch.Tensor:
    rows, width = o.shape
    y = torch.empty(rows, width, dtype=o.dtype, device=o.device)
    if rows == 0:
        return y
    _output_gate_kernel[(rows, triton.cdiv(width, config.block_n))](
        o,
        out_gate,
        y,
        o.stride(0),
        out_gate.stride(0),
        N=width,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
    )
    return y
