"""Attention of the absorbed MLA queries over the paged latent cache, split over tokens and merged; no rotary anywhere.

    s[j] = scale * q_latent . latent_cache[j]            j < seq_lens[b] - T + t + 1: causal within the step
    p    = softmax(s)                                    fp32
    o_latent = act(sum_j p[j] * latent_cache[j, :L])     L = kv_lora_rank, the other channels only score

Layout   q_latent      [R, H, LP] act, any strides but the last                read
         latent_cache  [PAGES, PAGE, LP] act, any page and row stride          read, once per query block
         page_table    [B, MAX_PAGES] int32, seq_lens [B] int32                read
         partial       [B, SPLITS, T*H, L], stats [.., 2] float32              written and read: sums; maximum, weight
         o_latent      [R, H, L] act                                           written
Work     split: grid (query blocks, SPLITS, B); a program takes BLOCK_Q of the T*H queries of a sequence, the small side
         of both products, over its share of the tokens and keeps their L x BLOCK_Q sums in registers
         merge: grid (L blocks, H, R); a program rescales and adds the parts in the order of the splits
Bytes    B*S*LP*act + R*H*(LP+L)*act + 8*R*H*(L+2)*min(SPLITS, S/BLOCK_S)
Error    one rounding to act; exp2, float32 sums. bf16: p goes through the tensor cores as two bf16 parts, 2^-18 of p
Source   DESIGN.md section 5; T. Dao et al., Flash-Decoding (2023) for the split
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kimi_kernels.checks import validate

LOG2_E = 1.4426950408889634
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)  # in place of -inf, whose difference to itself is NaN


@dataclass(frozen=True)
class MlaDecodeConfig:
    splits: int
    block_q: int
    block_s: int
    num_warps: int
    num_stages: int
    merge_splits: int
    merge_l: int


def pick_mla_decode_config(
    batch: int, queries: int, capacity: int, latent: int, dtype: torch.dtype = torch.bfloat16
) -> MlaDecodeConfig:
    """`queries` is T*H of one sequence, `capacity` the tokens that a page table row can hold."""
    block_q = 16 if queries <= 16 else 32  # 32 already fill the registers with their sums
    block_s = 32 if dtype == torch.bfloat16 else 16  # two stages of 36 KiB: two programs share an SM
    blocks = batch * triton.cdiv(queries, block_q)
    # two programs for each of 132 SMs; a split costs the merge 2 KiB a query, which only long contexts repay past 128
    splits = min(264 // blocks, 128 if capacity <= 2**14 else 256, triton.cdiv(capacity, block_s))
    # 8 KiB of parts a step of the merge; two tile shapes, so that few kernels cover all batches
    merge_splits = 64 if splits > 16 else 16
    merge_l = min(2048 // merge_splits, triton.next_power_of_2(latent))
    return MlaDecodeConfig(max(1, splits), block_q, block_s, 4, 3, merge_splits, merge_l)


@triton.jit
def _split_tokens(seq_len, splits, BLOCK_S: tl.constexpr):
    """Tokens per split: whole tiles, so the last splits of a short sequence stay empty."""
    return tl.cdiv(tl.cdiv(seq_len, BLOCK_S), splits) * BLOCK_S


@triton.jit(
    do_not_specialize=["splits", "stride_table_b", "stride_lens"],
    do_not_specialize_on_alignment=["page_table_ptr", "seq_lens_ptr"],
)
def _mla_decode_split_kernel(
    q_ptr,
    cache_ptr,
    page_table_ptr,
    seq_lens_ptr,
    partial_ptr,
    stats_ptr,
    T,
    splits,
    scale_log2,
    stride_q_r,
    stride_q_h,
    stride_cache_p,
    stride_cache_s,
    stride_table_b,
    stride_lens,
    H: tl.constexpr,
    L: tl.constexpr,
    LP: tl.constexpr,
    PAGE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr,
    STAGES: tl.constexpr,
):
    pid_s = tl.program_id(1)
    pid_b = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + pid_b * stride_lens)
    share = _split_tokens(seq_len, splits, BLOCK_S)
    begin = pid_s * share
    end = tl.minimum(begin + share, seq_len)
    if begin >= end:
        return
    offs_q = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)  # query t*H + h of this sequence
    offs_s = tl.arange(0, BLOCK_S)
    offs_l = tl.arange(0, BLOCK_L)
    offs_p = L + tl.arange(0, BLOCK_P)
    mask_q = offs_q < T * H
    mask_l = offs_l < L
    mask_p = offs_p < LP
    q_ptrs = q_ptr + ((pid_b * T + offs_q // H) * stride_q_r + offs_q % H * stride_q_h)[None, :]
    q_latent = tl.load(q_ptrs + offs_l[:, None], mask=mask_l[:, None] & mask_q[None, :], other=0.0).to(DOT_DTYPE)
    q_extra = tl.load(q_ptrs + offs_p[:, None], mask=mask_p[:, None] & mask_q[None, :], other=0.0).to(DOT_DTYPE)
    visible = seq_len - T + offs_q // H + 1
    table_ptr = page_table_ptr + pid_b.to(tl.int64) * stride_table_b
    # one page id serves a tile where pages hold whole tiles
    offs_page = 0 if PAGE % BLOCK_S == 0 else offs_s
    acc = tl.zeros((BLOCK_L, BLOCK_Q), tl.float32)
    top = tl.full((BLOCK_Q,), LOWEST, tl.float32)
    weight = tl.zeros((BLOCK_Q,), tl.float32)
    # page ids are read a tile ahead by hand: as loads of the same tile they would take a pipeline stage from the rows
    page = tl.load(table_ptr + (begin + offs_page) // PAGE, mask=begin + offs_page < end, other=0)
    for start in tl.range(begin, end, BLOCK_S, num_stages=STAGES):
        tokens = start + offs_s
        row_in_page = (start + offs_page) % PAGE + (offs_s - offs_page)
        row_ptrs = cache_ptr + (page.to(tl.int64) * stride_cache_p + row_in_page * stride_cache_s)[:, None]
        following = start + BLOCK_S + offs_page
        page = tl.load(table_ptr + following // PAGE, mask=following < end, other=0)
        cached = (tokens < end)[:, None]
        latent = tl.load(row_ptrs + offs_l[None, :], mask=cached & mask_l[None, :], other=0.0).to(DOT_DTYPE)
        extra = tl.load(row_ptrs + offs_p[None, :], mask=cached & mask_p[None, :], other=0.0).to(DOT_DTYPE)
        scores = tl.dot(latent, q_latent, input_precision="ieee")
        scores = tl.dot(extra, q_extra, scores, input_precision="ieee") * scale_log2  # [BLOCK_S, BLOCK_Q]
        seen = cached & (tokens[:, None] < visible[None, :])
        new_top = tl.maximum(top, tl.max(tl.where(seen, scores, LOWEST), axis=0))
        p = tl.where(seen, tl.exp2(scores - new_top[None, :]), 0.0)
        rescale = tl.exp2(top - new_top)
        weight = weight * rescale + tl.sum(p, axis=0)
        values = tl.trans(latent)  # [L, BLOCK_S]
        high = p.to(DOT_DTYPE)
        acc = tl.dot(values, high, acc * rescale[None, :], input_precision="ieee")
        if DOT_DTYPE == tl.bfloat16:
            # p rounded once would cost more than the rounding of the output
            acc = tl.dot(values, (p - high.to(tl.float32)).to(DOT_DTYPE), acc)
        top = new_top
    part = (pid_b * splits + pid_s) * T * H + offs_q
    tl.store(partial_ptr + part[None, :] * L + offs_l[:, None], acc, mask=mask_l[:, None] & mask_q[None, :])
    tl.store(stats_ptr + part * 2, top, mask=mask_q)
    tl.store(stats_ptr + part * 2 + 1, weight, mask=mask_q)


@triton.jit(do_not_specialize=["splits", "stride_lens"], do_not_specialize_on_alignment=["seq_lens_ptr"])
def _mla_decode_merge_kernel(
    partial_ptr,
    stats_ptr,
    seq_lens_ptr,
    o_ptr,
    T,
    splits,
    stride_lens,
    H: tl.constexpr,
    L: tl.constexpr,
    BLOCK_S: tl.constexpr,
    MERGE_SPLITS: tl.constexpr,
    MERGE_L: tl.constexpr,
):
    pid_h = tl.program_id(1)
    pid_r = tl.program_id(2)
    pid_b = pid_r // T
    offs_l = tl.program_id(0) * MERGE_L + tl.arange(0, MERGE_L)
    mask_l = offs_l < L
    seq_len = tl.load(seq_lens_ptr + pid_b * stride_lens)
    share = tl.maximum(_split_tokens(seq_len, splits, BLOCK_S), BLOCK_S)
    used = tl.cdiv(seq_len, share)
    first = pid_b * splits * T * H + pid_r % T * H + pid_h
    acc = tl.zeros((MERGE_L,), tl.float32)
    top = tl.full((), LOWEST, tl.float32)
    weight = tl.zeros((), tl.float32)
    for start in range(0, used, MERGE_SPLITS):
        offs_s = start + tl.arange(0, MERGE_SPLITS)
        mask_s = offs_s < used
        part = first + offs_s * T * H
        tops = tl.load(stats_ptr + part * 2, mask=mask_s, other=LOWEST)
        weights = tl.load(stats_ptr + part * 2 + 1, mask=mask_s, other=0.0)
        mask = mask_s[:, None] & mask_l[None, :]
        partial = tl.load(partial_ptr + part[:, None] * L + offs_l[None, :], mask=mask, other=0.0)
        new_top = tl.maximum(top, tl.max(tops, axis=0))
        scale = tl.exp2(tops - new_top)
        rescale = tl.exp2(top - new_top)
        acc = acc * rescale + tl.sum(partial * scale[:, None], axis=0)
        weight = weight * rescale + tl.sum(weights * scale, axis=0)
        top = new_top
    o = tl.where(weight == 0.0, 0.0, acc / weight)  # a NaN weight stays NaN
    tl.store(o_ptr + (pid_r * H + pid_h) * L + offs_l, o.to(o_ptr.dtype.element_ty), mask=mask_l)


def mla_decode(
    q_latent: torch.Tensor,
    latent_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    kv_lora_rank: int,
) -> torch.Tensor:
    """Returns o_latent [R, H, kv_lora_rank] in the dtype of q_latent; a row that sees no token is zero.

    Tokens past `seq_lens` never reach a result. With T > 1 a NaN latent of a later token of the step does: 0 * NaN.
    Raises ValueError as `checks.validate` does.
    """
    dims = validate(
        "mla_decode",
        q_latent=q_latent,
        latent_cache=latent_cache,
        page_table=page_table,
        seq_lens=seq_lens,
        scale=scale,
        kv_lora_rank=kv_lora_rank,
    )
    queries = dims["R"] // max(1, dims["B"]) * dims["H"]
    capacity = dims["MAX_PAGES"] * dims["PAGE"]
    config = pick_mla_decode_config(max(1, dims["B"]), max(1, queries), capacity, kv_lora_rank, q_latent.dtype)
    return _launch(config, q_latent, latent_cache, page_table, seq_lens, scale, kv_lora_rank)


def _launch(config, q_latent, latent_cache, page_table, seq_lens, scale, kv_lora_rank) -> torch.Tensor:
    rows, heads, width = q_latent.shape
    batch, device = seq_lens.shape[0], q_latent.device
    o_latent = torch.empty(rows, heads, kv_lora_rank, dtype=q_latent.dtype, device=device)
    if rows == 0:
        return o_latent
    steps = rows // batch
    partial = torch.empty(batch, config.splits, steps * heads, kv_lora_rank, dtype=torch.float32, device=device)
    stats = torch.empty(batch, config.splits, steps * heads, 2, dtype=torch.float32, device=device)
    float32 = q_latent.dtype == torch.float32 or triton.knobs.runtime.interpret
    _mla_decode_split_kernel[(triton.cdiv(steps * heads, config.block_q), config.splits, batch)](
        q_latent,
        latent_cache,
        page_table,
        seq_lens,
        partial,
        stats,
        steps,
        config.splits,
        scale * LOG2_E,
        *q_latent.stride()[:2],
        *latent_cache.stride()[:2],
        page_table.stride(0),
        seq_lens.stride(0),
        H=heads,
        L=kv_lora_rank,
        LP=width,
        PAGE=latent_cache.shape[1],
        DOT_DTYPE=tl.float32 if float32 else tl.bfloat16,
        BLOCK_Q=config.block_q,
        BLOCK_S=config.block_s,
        BLOCK_L=max(16, triton.next_power_of_2(kv_lora_rank)),
        BLOCK_P=max(16, triton.next_power_of_2(width - kv_lora_rank)),
        STAGES=config.num_stages,
        num_warps=config.num_warps,
    )
    _mla_decode_merge_kernel[(triton.cdiv(kv_lora_rank, config.merge_l), heads, rows)](
        partial,
        stats,
        seq_lens,
        o_latent,
        steps,
        config.splits,
        seq_lens.stride(0),
        H=heads,
        L=kv_lora_rank,
        BLOCK_S=config.block_s,
        MERGE_SPLITS=config.merge_splits,
        MERGE_L=config.merge_l,
        num_warps=4,
    )
    return o_latent
