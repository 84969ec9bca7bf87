"""Decay and beta gates of KDA in the bounded form (Kimi K3), before the recurrence.

    log_decay[h, d] = lower_bound * sigmoid(min(exp(A_log[h]), FLT_MAX) * (raw_decay[h, d] + dt_bias[h, d]))      fp32
    beta[h]         = sigmoid(raw_beta[h])                                                                       fp32

Layout   raw_decay [R, H, K] act, raw_beta [R, H] act, any row stride    read
         A_log [H], dt_bias [H, K] float32                               read
         log_decay [R, H, K], beta [R, H] float32                        written
Work     grid (R, head blocks); a program owns BLOCK_H heads of one row
Bytes    R*H*(K+1)*(act + 4) + H*(K+1)*4
Error    exp of A_log and of the sigmoids, their divisions; no output rounding. The clamp keeps 0 * inf from a NaN
Source   DESIGN.md section 5; `gate_lower_bound` of the Kimi K3 config
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kimi_kernels.checks import validate

FLT_MAX = tl.constexpr(torch.finfo(torch.float32).max)


@dataclass(frozen=True)
class KdaGateConfig:
    block_h: int
    num_warps: int


def pick_kda_gate_config(rows: int, heads: int) -> KdaGateConfig:
    # one warp a head while that fits on the device in one wave, then four heads a program to start fewer of them
    return KdaGateConfig(1, 1) if rows * heads <= 2048 else KdaGateConfig(4, 4)


@triton.jit
def _kda_gate_bounded_kernel(
    raw_decay_ptr,
    raw_beta_ptr,
    A_log_ptr,
    dt_bias_ptr,
    log_decay_ptr,
    beta_ptr,
    lower_bound,
    stride_decay_r,
    stride_decay_h,
    stride_beta_r,
    stride_A,
    stride_bias_h,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    pid_r = tl.program_id(0)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_k = tl.arange(0, BLOCK_K)
    mask_h = offs_h < H
    mask = mask_h[:, None] & (offs_k < K)[None, :]
    decay_ptrs = raw_decay_ptr + pid_r * stride_decay_r + offs_h[:, None] * stride_decay_h + offs_k[None, :]
    raw_decay = tl.load(decay_ptrs, mask=mask, other=0.0).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + offs_h[:, None] * stride_bias_h + offs_k[None, :], mask=mask, other=0.0)
    rate = tl.minimum(tl.exp(tl.load(A_log_ptr + offs_h * stride_A, mask=mask_h, other=0.0)), FLT_MAX)
    log_decay = lower_bound * tl.sigmoid(rate[:, None] * (raw_decay + dt_bias))
    tl.store(log_decay_ptr + (pid_r * H + offs_h[:, None]) * K + offs_k[None, :], log_decay, mask=mask)
    raw_beta = tl.load(raw_beta_ptr + pid_r * stride_beta_r + offs_h, mask=mask_h, other=0.0).to(tl.float32)
    tl.store(beta_ptr + pid_r * H + offs_h, tl.sigmoid(raw_beta), mask=mask_h)


def kda_gate_bounded(
    raw_decay: torch.Tensor, raw_beta: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns log_decay [R, H, K] and beta [R, H], both float32. Raises ValueError as `checks.validate` does."""
    dims = validate(
        "kda_gate_bounded",
        raw_decay=raw_decay,
        raw_beta=raw_beta,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
    )
    config = pick_kda_gate_config(dims["R"], dims["H"])
    return _launch(config, raw_decay, raw_beta, A_log, dt_bias, lower_bound)


def _launch(config, raw_decay, raw_beta, A_log, dt_bias, lower_bound) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads, channels = raw_decay.shape
    log_decay = torch.empty(rows, heads, channels, dtype=torch.float32, device=raw_decay.device)
    beta = torch.empty(rows, heads, dtype=torch.float32, device=raw_decay.device)
    if rows == 0:
        return log_decay, beta
    _kda_gate_bounded_kernel[(rows, triton.cdiv(heads, config.block_h))](
        raw_decay,
        raw_beta,
        A_log,
        dt_bias,
        log_decay,
        beta,
        lower_bound,
        raw_decay.stride(0),
        raw_decay.stride(1),
        raw_beta.stride(0),
        A_log.stride(0),
        dt_bias.stride(0),
        H=heads,
        K=channels,
        BLOCK_H=config.block_h,
        BLOCK_K=triton.next_power_of_2(channels),
        num_warps=config.num_warps,
    )
    return log_decay, beta
