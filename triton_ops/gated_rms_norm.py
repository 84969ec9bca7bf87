"""RMSNorm over each head's value channels times the sigmoid output gate; between KDA recurrence and output projection.

    y[h, v] = act(o[h, v] / sqrt(mean_v(o[h]^2) + eps) * weight[v] * sigmoid(out_gate[h, v]))      one rounding

Layout   o         [R, H, V] bf16 or float32, any strides but the last    read
         out_gate  [R, H, V] act, any strides but the last                read
         weight    [V] float32, shared by the heads                       read
         y         [R, H, V] act                                          written
Work     grid (R, head blocks); a program owns BLOCK_H whole heads of one row
Bytes    R*H*V*(o + 2*act) + V*4
Error    one rounding to act; rsqrt, exp and the division of the sigmoid
Source   DESIGN.md section 5; fla-org/flash-linear-attention fla/modules/fused_norm_gate.py
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kimi_kernels.checks import validate


@dataclass(frozen=True)
class GatedRmsNormConfig:
    block_h: int
    num_warps: int


def pick_gated_rms_norm_config(rows: int, heads: int) -> GatedRmsNormConfig:
    # one warp a head while that fits on the device in one wave, then four heads a program to start fewer of them
    return GatedRmsNormConfig(1, 1) if rows * heads <= 2048 else GatedRmsNormConfig(4, 4)


@triton.jit
def _gated_rms_norm_kernel(
    o_ptr,
    gate_ptr,
    weight_ptr,
    y_ptr,
    eps,
    stride_o_r,
    stride_o_h,
    stride_gate_r,
    stride_gate_h,
    stride_weight,
    H: tl.constexpr,
    V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    pid_r = tl.program_id(0)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_v = tl.arange(0, BLOCK_V)
    mask_v = offs_v < V
    mask = (offs_h < H)[:, None] & mask_v[None, :]
    o_ptrs = o_ptr + pid_r * stride_o_r + offs_h[:, None] * stride_o_h + offs_v[None, :]
    gate_ptrs = gate_ptr + pid_r * stride_gate_r + offs_h[:, None] * stride_gate_h + offs_v[None, :]
    o = tl.load(o_ptrs, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + offs_v * stride_weight, mask=mask_v, other=0.0)
    scale = tl.rsqrt(tl.sum(o * o, axis=1) / V + eps)
    y = o * scale[:, None] * weight[None, :] * tl.sigmoid(gate)
    tl.store(y_ptr + (pid_r * H + offs_h[:, None]) * V + offs_v[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


def gated_rms_norm(o: torch.Tensor, out_gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns y [R, H, V] in the dtype of `out_gate`. Raises ValueError as `checks.validate` does."""
    dims = validate("gated_rms_norm", o=o, out_gate=out_gate, weight=weight, eps=eps)
    return _launch(pick_gated_rms_norm_config(dims["R"], dims["H"]), o, out_gate, weight, eps)


def _launch(config, o, out_gate, weight, eps) -> torch.Tensor:
    rows, heads, value_dim = o.shape
    y = torch.empty(rows, heads, value_dim, dtype=out_gate.dtype, device=o.device)
    if rows == 0:
        return y
    _gated_rms_norm_kernel[(rows, triton.cdiv(heads, config.block_h))](
        o,
        out_gate,
        weight,
        y,
        eps,
        *o.stride()[:2],
        *out_gate.stride()[:2],
        weight.stride(0),
        H=heads,
        V=value_dim,
        BLOCK_H=config.block_h,
        BLOCK_V=triton.next_power_of_2(value_dim),
        num_warps=config.num_warps,
    )
    return y
