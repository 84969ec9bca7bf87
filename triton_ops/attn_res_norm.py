"""Attention residual: the normed softmax mixture of residual bank and running prefix; the input of K3 sublayers.

    v_j   = bank rows, oldest first, then the prefix                         j = 0 .. N
    s_j   = sum_d(v_j[d] * score_weight[d]) / sqrt(mean_d(v_j^2) + eps)
    mix   = sum_j softmax(s)_j * v_j                                         the raw rows; fp32, not rounded
    h[d]  = act(mix[d] / sqrt(mean_d(mix^2) + eps) * norm_weight[d])

Layout   prefix        [R, D] act, any row stride                 read
         bank          N tensors [R, D] act, any row strides      read
         score_weight  [D] float32, any stride                    read
         norm_weight   [D] act, any stride                        read
         h             [R, D] act                                 written
Work     grid (R); a program owns one row of all N+1 tensors. All loads are issued first; all sums of the scores are one
         reduction over the program. KEEP rows stay in registers for the mixture, the others are loaded again, from L1:
         nine rows of 7168 do not fit
Bytes    (N + 2)*R*D*act + D*(act + 4)
Error    one rounding to act; rsqrt twice, exp, one division
Source   DESIGN.md section 5; `attn_res_block_size` of the Kimi K3 config
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kimi_kernels.checks import validate


@dataclass(frozen=True)
class AttnResNormConfig:
    num_warps: int
    keep: int  # rows of the mixture that stay in registers


def pick_attn_res_norm_config(width: int) -> AttnResNormConfig:
    # 32 elements of a row a thread: 6 rows in float32 are 192 registers of 255, a seventh would spill
    return AttnResNormConfig(max(1, triton.next_power_of_2(width) // 1024), keep=6)


@triton.jit
def _stack(tensors, LEVELS: tl.constexpr):
    """2^LEVELS tensors [X] as one tensor [X, 2, ..., 2], the bits of the list index in the order of the dims."""
    for level in tl.static_range(LEVELS):
        pairs = ()
        for i in tl.static_range(2 ** (LEVELS - 1 - level)):
            pairs += (tl.join(tensors[i], tensors[i + 2 ** (LEVELS - 1 - level)]),)
        tensors = pairs
    return tensors[0]


@triton.jit
def _sum_per_thread(x, BLOCK_D: tl.constexpr, THREADS: tl.constexpr):
    """Partial sums [THREADS] of the elements that one thread loads: no exchange between threads."""
    return tl.sum(tl.sum(x.reshape(BLOCK_D // (8 * THREADS), THREADS, 8), axis=2), axis=0)


@triton.jit
def _attn_res_norm_kernel(
    prefix_ptr,
    bank_ptrs,
    score_weight_ptr,
    norm_weight_ptr,
    h_ptr,
    eps,
    stride_prefix_r,
    strides_bank_r,
    stride_score_weight,
    stride_norm_weight,
    D: tl.constexpr,
    N: tl.constexpr,
    LEVELS: tl.constexpr,
    KEEP: tl.constexpr,
    THREADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    pointers = ()
    for j in tl.static_range(N):
        pointers += (bank_ptrs[j] + row * strides_bank_r[j] + offs_d,)
    pointers += (prefix_ptr + row * stride_prefix_r + offs_d,)
    rows = ()
    for j in tl.static_range(N + 1):
        rows += (tl.load(pointers[j], mask=mask_d, other=0.0),)
    score_weight = tl.load(score_weight_ptr + offs_d * stride_score_weight, mask=mask_d, other=0.0)

    terms = ()
    for j in tl.static_range(2**LEVELS):
        v = rows[j].to(tl.float32) if j <= N else tl.zeros((BLOCK_D,), tl.float32)
        terms += (_sum_per_thread(v * v, BLOCK_D, THREADS), _sum_per_thread(v * score_weight, BLOCK_D, THREADS))
    square, product = tl.sum(_stack(terms, LEVELS + 1), axis=0).reshape(2**LEVELS, 2).split()
    candidate = tl.arange(0, 2**LEVELS)
    score = tl.where(candidate <= N, tl.rsqrt(square / D + eps) * product, float("-inf"))
    weight = tl.exp(score - tl.max(score, axis=0))
    weight = weight / tl.sum(weight, axis=0)

    mix = tl.zeros((BLOCK_D,), tl.float32)
    for j in tl.static_range(N + 1):
        if j < KEEP:
            v = rows[j]
        else:
            # another eviction policy keeps the compiler from merging this load with the first one
            v = tl.load(pointers[j], mask=mask_d, other=0.0, eviction_policy="evict_first")
        mix += v.to(tl.float32) * tl.sum(tl.where(candidate == j, weight, 0.0), axis=0)
    norm_weight = tl.load(norm_weight_ptr + offs_d * stride_norm_weight, mask=mask_d, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(mix * mix, axis=0) / D + eps)
    tl.store(h_ptr + row * D + offs_d, mix * scale * norm_weight, mask=mask_d)


def attn_res_norm(
    prefix: torch.Tensor,
    bank: list[torch.Tensor],
    score_weight: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Returns h [R, D] in the dtype of `prefix`; `bank` is oldest first. Raises as `checks.validate` does."""
    dims = validate(
        "attn_res_norm",
        prefix=prefix,
        bank=bank,
        score_weight=score_weight,
        norm_weight=norm_weight,
        eps=eps,
    )
    return _launch(pick_attn_res_norm_config(dims["D"]), prefix, bank, score_weight, norm_weight, eps)


def _launch(config: AttnResNormConfig, prefix, bank, score_weight, norm_weight, eps) -> torch.Tensor:
    rows, width = prefix.shape
    h = torch.empty(rows, width, dtype=prefix.dtype, device=prefix.device)
    if rows == 0:
        return h
    threads = 32 * config.num_warps
    _attn_res_norm_kernel[(rows,)](
        prefix,
        tuple(bank),
        score_weight,
        norm_weight,
        h,
        eps,
        prefix.stride(0),
        tuple(b.stride(0) for b in bank),
        score_weight.stride(0),
        norm_weight.stride(0),
        D=width,
        N=len(bank),
        LEVELS=len(bank).bit_length(),
        KEEP=config.keep,
        THREADS=threads,
        BLOCK_D=max(8 * threads, triton.next_power_of_2(width)),
        num_warps=config.num_warps,
    )
    return h
