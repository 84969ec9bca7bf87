"""Applies the value up-projection to the attended latent, per head; between `mla_decode` and the output gate of MLA.

    o[r, h] = act(w_uv[h] . o_latent[r, h])        fp32 sums, one rounding

Layout   o_latent  [R, H, L] act, any strides but the last                      read
         w_uv      [H, V, L] act, any strides but the last (a slice of kv_b)    read
         o         [R, H, V] act                                                written
Work     grid (V blocks, H, row blocks); a program owns BLOCK_V value channels of one head for BLOCK_R rows and runs
         over L in pipelined steps
Bytes    H*V*L*act + R*H*(L+V)*act
Error    one rounding to act; float32 sums of L exact products (bf16), tensor cores pad the rows to 16
Source   DESIGN.md section 5
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kimi_kernels.checks import validate


@dataclass(frozen=True)
class MlaExpandValueConfig:
    block_r: int
    block_v: int
    block_l: int
    num_warps: int
    num_stages: int


def pick_mla_expand_value_config(rows: int, latent: int) -> MlaExpandValueConfig:
    block_r = 16 if rows <= 16 else 32  # 16 is the smallest tile of the tensor cores; 32 halve the reads of the weights
    # four stages of 128 channels: at L = 512 all loads of a program are under way at once
    block_l = min(128, max(16, triton.next_power_of_2(latent)))
    return MlaExpandValueConfig(block_r, 16, block_l, 2, 4)


@triton.jit(do_not_specialize=["R"])
def _mla_expand_value_kernel(
    latent_ptr,
    w_uv_ptr,
    o_ptr,
    R,
    stride_latent_r,
    stride_latent_h,
    stride_w_h,
    stride_w_v,
    H: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_L: tl.constexpr,
    STAGES: tl.constexpr,
):
    pid_h = tl.program_id(1)
    offs_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    offs_r = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_v = offs_v < V
    mask_r = offs_r < R
    w_ptrs = w_uv_ptr + pid_h * stride_w_h + offs_v[:, None] * stride_w_v
    latent_ptrs = latent_ptr + offs_r[:, None] * stride_latent_r + pid_h * stride_latent_h
    acc = tl.zeros((BLOCK_R, BLOCK_V), tl.float32)
    for start in tl.range(0, L, BLOCK_L, num_stages=STAGES):
        offs_l = start + tl.arange(0, BLOCK_L)
        mask_l = (offs_l < L)[None, :]
        w_uv = tl.load(w_ptrs + offs_l[None, :], mask=mask_v[:, None] & mask_l, other=0.0).to(DOT_DTYPE)
        latent = tl.load(latent_ptrs + offs_l[None, :], mask=mask_r[:, None] & mask_l, other=0.0).to(DOT_DTYPE)
        acc = tl.dot(latent, tl.trans(w_uv), acc, input_precision="ieee")
    o_ptrs = o_ptr + (offs_r[:, None] * H + pid_h) * V + offs_v[None, :]
    tl.store(o_ptrs, acc.to(o_ptr.dtype.element_ty), mask=mask_r[:, None] & mask_v[None, :])


def mla_expand_value(o_latent: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
    """Returns o [R, H, V] in the dtype of o_latent. Raises ValueError as `checks.validate` does."""
    dims = validate("mla_expand_value", o_latent=o_latent, w_uv=w_uv)
    return _launch(pick_mla_expand_value_config(dims["R"], dims["L"]), o_latent, w_uv)


def _launch(config, o_latent, w_uv) -> torch.Tensor:
    rows, heads, latent = o_latent.shape
    value_dim = w_uv.shape[1]
    o = torch.empty(rows, heads, value_dim, dtype=o_latent.dtype, device=o_latent.device)
    if rows == 0:
        return o
    _mla_expand_value_kernel[(triton.cdiv(value_dim, config.block_v), heads, triton.cdiv(rows, config.block_r))](
        o_latent,
        w_uv,
        o,
        rows,
        *o_latent.stride()[:2],
        *w_uv.stride()[:2],
        H=heads,
        V=value_dim,
        L=latent,
        DOT_DTYPE=tl.float32 if o.dtype == torch.float32 or triton.knobs.runtime.interpret else tl.bfloat16,
        BLOCK_R=config.block_r,
        BLOCK_V=config.block_v,
        BLOCK_L=config.block_l,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
    )
    return o
