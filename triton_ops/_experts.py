"""What the routed-expert ops share: which program serves which picks, the kernel around a contraction, and its launch.

A pick p = r * A + a is one (row, expert) pair. Its output is W[expert] . x for the inputs of the row.

Work     grid (R * A picks * tiles of BLOCK_N outputs). The first pick of an expert, and every BLOCK_R-th after it,
         serves the BLOCK_R picks from itself on, so weights are read once for all of them; the programs of other picks
         end at once. No sorting and no counters: a program reads the ids. Each warp contracts one of SPLIT slices of
         every step of C for all BLOCK_N outputs; the slices are added at the end, in order
Order    the sum over C depends on C, BLOCK_C and SPLIT, never on the rows: a row has the same bits in any batch
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

SMS = 132  # of the H200; only balance depends on it
ROW_BUCKETS = (1, 2, 8, 16, 32, 64)


COMBINE_BLOCK = 256  # outputs of a program of the last sum: 4 a lane


@dataclass(frozen=True)
class ExpertConfig:
    block_n: int  # outputs of a program
    block_c: int  # inputs of a warp and step
    split: int  # warps, each with its own slice of the inputs
    stages: int  # steps in flight
    block_p: int  # ids read at once
    block_r: int = 4  # picks of a program; 8 fill the tensor-core tile and cost a fifth of the time (MEASURED.md)


def pick_block_n(rows: int, top_k: int, outputs: int, split: int, warps_per_sm: int = 8) -> int:
    """64 outputs where every SM still gets its warps, whose loads cover the decoding of others; else fewer."""
    if triton.knobs.runtime.interpret:
        return min(256, triton.next_power_of_2(outputs))  # it runs one program after another at a fixed cost
    picks = row_bucket(rows) * top_k
    enough = (n for n in (64, 32) if picks * triton.cdiv(outputs, n) * split >= warps_per_sm * SMS)
    return next(enough, 16)


def pick_block_p(rows: int, top_k: int) -> int:
    """One warp's width where it holds all ids, else enough for 8 rows of K3 in one step."""
    return 32 if row_bucket(rows) * top_k <= 32 else 128


def row_bucket(rows: int) -> int:
    """`rows` rounded up, so that few configs are compiled."""
    return next((bucket for bucket in ROW_BUCKETS if rows <= bucket), ROW_BUCKETS[-1])


@triton.jit
def _load_ids(topk_ids_ptr, stride_ids_r, offs_p, stop, A: tl.constexpr):
    """Expert ids of picks `offs_p` below `stop`, -1 from there on."""
    return tl.load(topk_ids_ptr + offs_p // A * stride_ids_r + offs_p % A, mask=offs_p < stop, other=-1)


@triton.jit
def _count_before(topk_ids_ptr, stride_ids_r, pick, expert, A: tl.constexpr, BLOCK_P: tl.constexpr):
    """How many picks before `pick` are of the same expert."""
    hits = tl.zeros((BLOCK_P,), tl.int32)
    for start in range(0, pick, BLOCK_P):
        ids = _load_ids(topk_ids_ptr, stride_ids_r, start + tl.arange(0, BLOCK_P), pick, A)
        hits += (ids == expert).to(tl.int32)
    return tl.sum(hits)


@triton.jit
def _picks_from(
    topk_ids_ptr, stride_ids_r, pick, total, expert, A: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr
):
    """`pick` and the next picks of the same expert, -1 where there are fewer than BLOCK_R. -> [BLOCK_R]"""
    picks = tl.where(tl.arange(0, BLOCK_R) == 0, pick, -1)
    found = 1
    start = pick + 1
    while (start < total) & (found < BLOCK_R):
        offs_p = start + tl.arange(0, BLOCK_P)
        ids = _load_ids(topk_ids_ptr, stride_ids_r, offs_p, total, A)
        stop = start + BLOCK_P
        start = tl.min(tl.where(ids == expert, offs_p, stop))
        # the first hit is the next pick, and the search goes on behind it
        hit = start < stop
        picks = tl.where((tl.arange(0, BLOCK_R) == found) & hit, start, picks)
        found += hit.to(tl.int32)
        start += hit.to(tl.int32)
    return picks


@triton.jit
def contract_act(
    x_ptrs,
    mask_x,
    weights,
    STRIDES: tl.constexpr,
    expert,
    offs_n,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Rows `offs_n` of an expert in the activation dtype times x. -> [N, R] float32"""
    STEP: tl.constexpr = SPLIT * BLOCK_C
    offs_c = tl.arange(0, SPLIT)[:, None, None] * BLOCK_C + tl.arange(0, BLOCK_C)
    w_ptrs = weights[0] + expert * STRIDES[0] + offs_n[:, None] * STRIDES[1] + offs_c
    acc = tl.zeros((SPLIT, offs_n.shape[0], x_ptrs.shape[1]), tl.float32)
    for c in tl.range(0, C, STEP, num_stages=STAGES):
        if C % STEP == 0:
            w = tl.load(w_ptrs + c)
            x = tl.load(x_ptrs + offs_c + c, mask=mask_x, other=0.0)
        else:
            w = tl.load(w_ptrs + c, mask=offs_c < C - c, other=0.0)
            x = tl.load(x_ptrs + offs_c + c, mask=mask_x & (offs_c < C - c), other=0.0)
        acc = tl.dot(w.to(COMPUTE), tl.permute(x.to(COMPUTE), 0, 2, 1), acc, input_precision="ieee")
    return tl.sum(acc, axis=0)


@triton.jit(do_not_specialize=["total"], do_not_specialize_on_alignment=["topk_ids_ptr"])
def _experts_kernel(
    x_ptr,
    topk_ids_ptr,
    weights,
    y_ptr,
    total,
    stride_x_r,
    stride_x_a,
    stride_ids_r,
    E: tl.constexpr,
    A: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    STRIDES: tl.constexpr,
    CONTRACT: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    pick = tl.program_id(0) // TILES
    offs_n = tl.program_id(0) % TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    expert = tl.load(topk_ids_ptr + pick // A * stride_ids_r + pick % A)
    if (expert < 0) | (expert >= E):
        zeros = tl.zeros((BLOCK_N,), y_ptr.dtype.element_ty)
        tl.store(y_ptr + pick.to(tl.int64) * N + offs_n, zeros, mask=mask_n)
        return
    if _count_before(topk_ids_ptr, stride_ids_r, pick, expert, A, BLOCK_P) % BLOCK_R != 0:
        return
    picks = _picks_from(topk_ids_ptr, stride_ids_r, pick, total, expert, A, BLOCK_P, BLOCK_R)
    mask_r = picks >= 0
    x_ptrs = x_ptr + (picks // A).to(tl.int64) * stride_x_r + picks % A * stride_x_a
    # rows past the last output read real weights again, so that the loop over C needs no mask for them
    y = CONTRACT(
        x_ptrs[None, :, None],
        mask_r[None, :, None],
        weights,
        STRIDES,
        expert.to(tl.int64),
        offs_n % N,
        C,
        BLOCK_C,
        SPLIT,
        STAGES,
        COMPUTE,
    )
    y_ptrs = y_ptr + picks.to(tl.int64) * N + offs_n[:, None]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask_n[:, None] & mask_r)


@triton.jit
def _combine_kernel(
    partial_ptr,
    topk_ids_ptr,
    topk_weights_ptr,
    y_ptr,
    stride_ids_r,
    stride_weights_r,
    E: tl.constexpr,
    A: tl.constexpr,
    Z: tl.constexpr,
    BLOCK_Z: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    offs_z = tl.program_id(0) * BLOCK_Z + tl.arange(0, BLOCK_Z)
    mask_z = offs_z < Z
    y = tl.zeros((BLOCK_Z,), tl.float32)
    for a in tl.static_range(A):
        expert = tl.load(topk_ids_ptr + row * stride_ids_r + a)
        weight = tl.load(topk_weights_ptr + row * stride_weights_r + a)
        weight = tl.where((expert >= 0) & (expert < E), weight, 0.0)  # whatever the weight of no expert is
        y += weight * tl.load(partial_ptr + (row * A + a) * Z + offs_z, mask=mask_z, other=0.0)
    tl.store(y_ptr + row * Z + offs_z, y.to(y_ptr.dtype.element_ty), mask=mask_z)


def launch_experts(
    config: ExpertConfig,
    contract: triton.JITFunction,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    y: torch.Tensor,
) -> None:
    """y[r, a] = W[topk_ids[r, a]] . x, with x [R, C] or [R, A, C] and y [R, A, N]; an id outside [0, E) gives zeros."""
    rows, top_k, outputs = y.shape
    # the interpreter has no bfloat16 arithmetic and no PTX
    exact = x.dtype == torch.float32 or triton.knobs.runtime.interpret
    _experts_kernel[(rows * top_k * triton.cdiv(outputs, config.block_n),)](
        x,
        topk_ids,
        weights,
        y,
        rows * top_k,
        x.stride(0),
        x.stride(1) if x.ndim == 3 else 0,
        topk_ids.stride(0),
        E=weights[0].shape[0],
        A=top_k,
        N=outputs,
        C=x.shape[-1],
        STRIDES=tuple(s for w in weights for s in w.stride()[:2]),
        CONTRACT=contract,
        COMPUTE=tl.float32 if exact else tl.bfloat16,
        BLOCK_N=config.block_n,
        BLOCK_C=config.block_c,
        SPLIT=config.split,
        STAGES=config.stages,
        BLOCK_P=config.block_p,
        BLOCK_R=config.block_r,
        num_warps=config.split,
    )


def launch_combine(
    partial: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, experts: int, y: torch.Tensor
) -> None:
    """y[r] = sum over a, in order, of topk_weights[r, a] * partial[r, a]; ids outside [0, experts) add nothing."""
    rows, top_k, width = partial.shape
    _combine_kernel[(triton.cdiv(width, COMBINE_BLOCK), rows)](
        partial,
        topk_ids,
        topk_weights,
        y,
        topk_ids.stride(0),
        topk_weights.stride(0),
        experts,
        top_k,
        width,
        COMBINE_BLOCK,
        num_warps=2,
    )
