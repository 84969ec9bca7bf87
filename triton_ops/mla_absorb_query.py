"""Folds the key up-projection into the MLA query, per head, so that it scores latent cache rows; before `mla_decode`.

    q_latent[r, h] = [act(w_uk[h]^T . q[r, h, :NOPE]) | q[r, h, NOPE:]]        fp32 sums; the extra part bit for bit

Layout   q         [R, H, NOPE+P] act, any strides but the last                     read
         w_uk      [H, NOPE, L] act, any strides but the last (a slice of kv_b)     read
         q_latent  [R, H, L+P] act                                                  written
Work     grid (L blocks, H, row blocks); a program owns BLOCK_L latent channels of one head for BLOCK_R rows; the first
         L block also copies the extra channels
Bytes    H*NOPE*L*act + R*H*(NOPE+L+2*P)*act
Error    one rounding to act; float32 sums of NOPE exact products (bf16), tensor cores pad the rows to 16
Source   DESIGN.md section 5
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kimi_kernels.checks import validate


@dataclass(frozen=True)
class MlaAbsorbQueryConfig:
    block_r: int
    block_n: int
    block_l: int
    num_warps: int


def pick_mla_absorb_query_config(
    rows: int, nope: int, latent: int, dtype: torch.dtype = torch.bfloat16
) -> MlaAbsorbQueryConfig:
    block_r = 16 if rows <= 16 else 32  # 16 is the smallest tile of the tensor cores; 32 halve the reads of the weights
    # all of a weight column at once, so that every load is under way; float32 dots hold their operands in registers
    block_n = max(16, triton.next_power_of_2(nope)) if dtype == torch.bfloat16 else 16
    block_l = min(32, triton.next_power_of_2(latent))  # 16 blocks a head: 12 heads start more blocks than there are SMs
    return MlaAbsorbQueryConfig(block_r, block_n, block_l, 2)


@triton.jit(do_not_specialize=["R"])
def _mla_absorb_query_kernel(
    q_ptr,
    w_uk_ptr,
    out_ptr,
    R,
    stride_q_r,
    stride_q_h,
    stride_w_h,
    stride_w_n,
    H: tl.constexpr,
    NOPE: tl.constexpr,
    L: tl.constexpr,
    P: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    pid_l = tl.program_id(0)
    pid_h = tl.program_id(1)
    offs_r = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_l = pid_l * BLOCK_L + tl.arange(0, BLOCK_L)
    mask_r = (offs_r < R)[:, None]
    mask_l = (offs_l < L)[None, :]
    q_ptrs = q_ptr + offs_r[:, None] * stride_q_r + pid_h * stride_q_h
    w_ptrs = w_uk_ptr + pid_h * stride_w_h + offs_l[None, :]
    acc = tl.zeros((BLOCK_R, BLOCK_L), tl.float32)
    for start in range(0, NOPE, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask_n = offs_n < NOPE
        w_uk = tl.load(w_ptrs + offs_n[:, None] * stride_w_n, mask=mask_n[:, None] & mask_l, other=0.0).to(DOT_DTYPE)
        q = tl.load(q_ptrs + offs_n[None, :], mask=mask_r & mask_n[None, :], other=0.0).to(DOT_DTYPE)
        acc = tl.dot(q, w_uk, acc, input_precision="ieee")
    out_ptrs = out_ptr + (offs_r[:, None] * H + pid_h) * (L + P)
    tl.store(out_ptrs + offs_l[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask_r & mask_l)
    if pid_l == 0:
        offs_p = tl.arange(0, BLOCK_P)
        mask_p = mask_r & (offs_p < P)[None, :]
        extra = tl.load(q_ptrs + NOPE + offs_p[None, :], mask=mask_p, other=0.0)
        tl.store(out_ptrs + L + offs_p[None, :], extra, mask=mask_p)


def mla_absorb_query(q: torch.Tensor, w_uk: torch.Tensor) -> torch.Tensor:
    """Returns q_latent [R, H, L+P] in the dtype of q. Raises ValueError as `checks.validate` does."""
    dims = validate("mla_absorb_query", q=q, w_uk=w_uk)
    return _launch(pick_mla_absorb_query_config(dims["R"], dims["NOPE"], dims["L"], q.dtype), q, w_uk)


def _launch(config, q, w_uk) -> torch.Tensor:
    rows, heads, width = q.shape
    nope, latent = w_uk.shape[1:]
    extra = width - nope
    q_latent = torch.empty(rows, heads, latent + extra, dtype=q.dtype, device=q.device)
    if rows == 0:
        return q_latent
    _mla_absorb_query_kernel[(triton.cdiv(latent, config.block_l), heads, triton.cdiv(rows, config.block_r))](
        q,
        w_uk,
        q_latent,
        rows,
        *q.stride()[:2],
        *w_uk.stride()[:2],
        H=heads,
        NOPE=nope,
        L=latent,
        P=extra,
        DOT_DTYPE=tl.float32 if q.dtype == torch.float32 or triton.knobs.runtime.interpret else tl.bfloat16,
        BLOCK_R=config.block_r,
        BLOCK_N=config.block_n,
        BLOCK_L=config.block_l,
        BLOCK_P=triton.next_power_of_2(max(1, extra)),
        num_warps=config.num_warps,
    )
    return q_latent
