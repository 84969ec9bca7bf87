"""Norms the latent of the new tokens and writes their rows into the paged cache; before the attention of an MLA layer.

    row = [act(ckv[:L] / sqrt(mean(ckv[:L]^2) + eps) * norm_weight) | ckv[L:]]        the last P channels bit for bit
    latent_cache[page_table[b, j // PAGE], j % PAGE] <- row      j = seq_lens[b] - T + t; no write where j < 0

Layout   ckv           [R, LP] act, any row stride; row b*T + t          read
         norm_weight   [L] act                                           read
         latent_cache  [PAGES, PAGE, LP] act, any page and row stride    written, R rows
         page_table    [B, MAX_PAGES] int32, seq_lens [B] int32          read
Work     grid (R); a program owns one row
Bytes    2*R*LP*act + L*act
Error    one rounding to act; rsqrt
Source   DESIGN.md section 5 (kv_a_layernorm, no rotary), section 2 (page layout)
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kimi_kernels.checks import validate


@dataclass(frozen=True)
class MlaKvAppendConfig:
    num_warps: int


def pick_mla_kv_append_config(latent: int) -> MlaKvAppendConfig:
    # one warp holds 512 channels in 16 registers a lane and sums them without shared memory
    return MlaKvAppendConfig(1 if latent <= 512 else 4)


@triton.jit(
    do_not_specialize=["MAX_PAGES", "PAGES", "stride_table_b", "stride_lens"],
    do_not_specialize_on_alignment=["page_table_ptr", "seq_lens_ptr"],
)
def _mla_kv_append_kernel(
    ckv_ptr,
    weight_ptr,
    cache_ptr,
    page_table_ptr,
    seq_lens_ptr,
    eps,
    T,
    MAX_PAGES,
    PAGES,
    stride_ckv_r,
    stride_weight,
    stride_cache_p,
    stride_cache_s,
    stride_table_b,
    stride_lens,
    L: tl.constexpr,
    LP: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    pid_r = tl.program_id(0)
    b = pid_r // T
    position = tl.load(seq_lens_ptr + b * stride_lens) - T + pid_r % T
    # a position past the table or a page past the pool must not write over another sequence
    live = (position >= 0) & (position < MAX_PAGES * PAGE)
    page = tl.load(page_table_ptr + b.to(tl.int64) * stride_table_b + position // PAGE, mask=live, other=0).to(tl.int64)
    live &= (page >= 0) & (page < PAGES)
    offs_l = tl.arange(0, BLOCK_L)
    offs_p = L + tl.arange(0, BLOCK_P)
    mask_l = offs_l < L
    mask_p = offs_p < LP
    row_ptr = ckv_ptr + pid_r * stride_ckv_r
    latent = tl.load(row_ptr + offs_l, mask=mask_l, other=0.0).to(tl.float32)
    extra = tl.load(row_ptr + offs_p, mask=mask_p, other=0.0)
    weight = tl.load(weight_ptr + offs_l * stride_weight, mask=mask_l, other=0.0).to(tl.float32)
    latent *= tl.rsqrt(tl.sum(latent * latent) / L + eps) * weight
    out_ptr = cache_ptr + page * stride_cache_p + (position % PAGE) * stride_cache_s
    tl.store(out_ptr + offs_l, latent.to(cache_ptr.dtype.element_ty), mask=mask_l & live)
    tl.store(out_ptr + offs_p, extra, mask=mask_p & live)


def mla_kv_append(
    ckv: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """Writes the rows of this step into `latent_cache` in place; `seq_lens` counts them, 0 marks a padded sequence.

    Raises ValueError as `checks.validate` does.
    """
    dims = validate(
        "mla_kv_append",
        ckv=ckv,
        norm_weight=norm_weight,
        eps=eps,
        latent_cache=latent_cache,
        page_table=page_table,
        seq_lens=seq_lens,
    )
    _launch(pick_mla_kv_append_config(dims["L"]), ckv, norm_weight, eps, latent_cache, page_table, seq_lens)


def _launch(config, ckv, norm_weight, eps, latent_cache, page_table, seq_lens) -> None:
    (rows, width), latent = ckv.shape, norm_weight.shape[0]
    if rows == 0:
        return
    _mla_kv_append_kernel[(rows,)](
        ckv,
        norm_weight,
        latent_cache,
        page_table,
        seq_lens,
        eps,
        rows // seq_lens.shape[0],
        page_table.shape[1],
        latent_cache.shape[0],
        ckv.stride(0),
        norm_weight.stride(0),
        *latent_cache.stride()[:2],
        page_table.stride(0),
        seq_lens.stride(0),
        L=latent,
        LP=width,
        PAGE=latent_cache.shape[1],
        BLOCK_L=triton.next_power_of_2(latent),
        BLOCK_P=triton.next_power_of_2(max(1, width - latent)),
        num_warps=config.num_warps,
    )
