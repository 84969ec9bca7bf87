"""Picks the experts of each row and their weights from the router logits.

    score[e] = sigmoid(logits[e]), 0 where that is NaN                     fp32
    ids      = the TOP_K experts with the largest score[e] + bias[e], largest first, the lower id on ties
    weight   = score[id] / (sum_ids score + 1e-20) * scaling               the bias only selects

Layout   logits        [R, E] float32, any row stride     read
         bias          [E] float32, any stride            read
         topk_ids      [R, TOP_K] int32                   written; holds the kept groups for a moment
         topk_weights  [R, TOP_K] float32                 written
Work     grid (R); one program ranks a row by counting. Score and inverted id form one int64 key, so all keys differ and
         the rank of a key is the number of larger ones. Counting E^2 pairs is too much: the experts are cut into GROUPS
         strided groups. The TOP_K groups of largest maxima hold all picks: other keys are behind TOP_K of these maxima
Bytes    R*E*4 + E*4 + R*TOP_K*8
Error    exp and two divisions, float32 sum of TOP_K scores
Source   DESIGN.md section 5; ties and NaN as in vllm-project/vllm vllm/models/kimi_k3/amd/mono/README.md
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kimi_kernels.checks import validate


@dataclass(frozen=True)
class MoeRouterConfig:
    group: int  # experts of a group
    num_warps: int


def pick_moe_router_config(experts: int, top_k: int) -> MoeRouterConfig:
    experts, top_k = triton.next_power_of_2(experts), triton.next_power_of_2(top_k)
    # (experts / group)^2 pairs of groups and (top_k * group)^2 pairs of experts: least where both are alike
    group = 1
    while 4 * group * group * top_k <= experts:
        group *= 2
    # a thread counts for one group: 128 of them for 896 experts
    return MoeRouterConfig(group, num_warps=max(1, min(8, experts // group // 32)))


@triton.jit
def _score_and_key(logits_ptr, bias_ptr, stride_bias, ids, inside, ID_BITS: tl.constexpr):
    """Scores, and keys that order like (score + bias, -id); what is not `inside` gets the smallest keys."""
    logits = tl.load(logits_ptr + ids, mask=inside, other=0.0)
    bias = tl.load(bias_ptr + ids * stride_bias, mask=inside, other=0.0)
    score = tl.where(logits == logits, tl.sigmoid(logits), 0.0)
    bits = (score + bias).to(tl.int32, bitcast=True)
    # float bits as an integer of the same order: negative numbers have their magnitude inverted
    ordered = tl.where(inside, bits ^ ((bits >> 31) & 0x7FFFFFFF), -(2**31))
    return score, ordered.to(tl.int64) * 2**ID_BITS + (2**ID_BITS - 1 - ids)


@triton.jit
def _rank(keys):
    """Number of larger keys, for each of distinct `keys`: the sign bits of the differences, which fit 64 bits."""
    behind = (keys[None, :] - keys[:, None]).to(tl.uint64, bitcast=True) >> 63
    return tl.sum(behind.to(tl.int32), axis=0)


@triton.jit
def _moe_router_kernel(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    scaling,
    stride_logits_r,
    stride_bias,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    ID_BITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_logits_r
    ids_ptr += row * TOP_K
    weights_ptr += row * TOP_K

    groups = tl.arange(0, GROUPS)
    best = tl.full((GROUPS,), -(2**63), tl.int64)
    for i in tl.static_range(GROUP):
        ids = i * GROUPS + groups
        _, key = _score_and_key(logits_ptr, bias_ptr, stride_bias, ids, ids < E, ID_BITS)
        best = tl.maximum(best, key)
    rank = _rank(best)
    # through memory: moving values by rank between the threads costs a second count otherwise
    tl.store(ids_ptr + rank, groups, mask=rank < TOP_K)
    tl.debug_barrier()
    member = tl.arange(0, BLOCK_K * GROUP)
    kept = member % BLOCK_K
    group = tl.load(ids_ptr + kept, mask=kept < TOP_K, other=0)
    tl.debug_barrier()

    ids = member // BLOCK_K * GROUPS + group
    score, key = _score_and_key(logits_ptr, bias_ptr, stride_bias, ids, (kept < TOP_K) & (ids < E), ID_BITS)
    rank = _rank(key)
    picked = rank < TOP_K
    total = tl.sum(tl.where(picked, score, 0.0), axis=0) + 1e-20
    tl.store(ids_ptr + rank, ids, mask=picked)
    tl.store(weights_ptr + rank, score / total * scaling, mask=picked)


def moe_router(
    logits: torch.Tensor, bias: torch.Tensor, top_k: int, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns topk_ids [R, top_k] int32, topk_weights [R, top_k] float32. Raises as `checks.validate` does."""
    dims = validate("moe_router", logits=logits, bias=bias, top_k=top_k, scaling=scaling)
    return _launch(pick_moe_router_config(dims["E"], top_k), logits, bias, top_k, scaling)


def _launch(config: MoeRouterConfig, logits, bias, top_k, scaling) -> tuple[torch.Tensor, torch.Tensor]:
    rows, experts = logits.shape
    topk_ids = torch.empty(rows, top_k, dtype=torch.int32, device=logits.device)
    topk_weights = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    if rows == 0:
        return topk_ids, topk_weights
    padded, block_k = triton.next_power_of_2(experts), triton.next_power_of_2(top_k)
    assert padded // config.group >= block_k, "each pick may be in a group of its own"
    _moe_router_kernel[(rows,)](
        logits,
        bias,
        topk_ids,
        topk_weights,
        float(scaling),
        logits.stride(0),
        bias.stride(0),
        E=experts,
        TOP_K=top_k,
        BLOCK_K=block_k,
        GROUP=config.group,
        GROUPS=padded // config.group,
        ID_BITS=padded.bit_length() - 1,
        num_warps=config.num_warps,
    )
    return topk_ids, topk_weights
