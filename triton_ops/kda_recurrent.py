"""One or more steps of the KDA delta rule per sequence, on the pooled fp32 state; between the gates and the gated norm.

    qn = q / sqrt(sum(q^2) + 1e-6) * K^-0.5        kn = k / sqrt(sum(k^2) + 1e-6)
    S  <- S * exp(log_decay)                       decay first, per key channel
    c  = beta * (v - S kn)                         prediction from the decayed state
    o  = S qn + (kn . qn) * c                      = S' qn, so both products read S once
    S  <- S + c kn^T

Layout   q, k [R, H, K], v [R, H, V] bf16 or float32, any strides but the last    read
         log_decay [R, H, K], beta [R, H] float32                                read
         state [SLOTS, H, V, K] float32, K innermost, any slot pitch             read and written, rows `slots`
         slots, is_new [B] int32, bool                                           read
         o [R, H, V] float32                                                     written
Work     grid (V blocks, H, B); a program owns BLOCK_V value rows of one head, independent of the others, and keeps them
         in registers over the T rows; each block normalises q and k again (1 KiB from L2 against BLOCK_V KiB of state)
Bytes    2*B*H*V*K*4 + R*H*(2*K*q + V*v + K*4 + 4 + V*4)
Error    exp of log_decay, two rsqrt, float32 sums; state and output are not rounded
Source   DESIGN.md section 5; fla-org/flash-linear-attention fla/ops/kda/naive.py for the order
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kimi_kernels.checks import validate

L2_EPS = tl.constexpr(1e-6)


@dataclass(frozen=True)
class KdaRecurrentConfig:
    block_v: int
    num_warps: int


def pick_kda_recurrent_config(value_dim: int) -> KdaRecurrentConfig:
    if triton.knobs.runtime.interpret:
        return KdaRecurrentConfig(triton.next_power_of_2(value_dim), 1)  # few programs: each has a fixed cost there
    # 4 value rows a warp: at 32 sequences 15.8 us against 16.2 with 8 and 17.0 with 16 (MEASURED.md, kda_recurrent)
    return KdaRecurrentConfig(min(4, triton.next_power_of_2(value_dim)), 1)


@triton.jit(
    do_not_specialize=["SLOTS", "first_valid_slot", "stride_slots", "stride_new"],
    do_not_specialize_on_alignment=["slots_ptr", "is_new_ptr"],
)
def _kda_recurrent_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    log_decay_ptr,
    beta_ptr,
    state_ptr,
    slots_ptr,
    is_new_ptr,
    o_ptr,
    T,
    SLOTS,
    first_valid_slot,
    stride_q_r,
    stride_q_h,
    stride_k_r,
    stride_k_h,
    stride_v_r,
    stride_v_h,
    stride_decay_r,
    stride_decay_h,
    stride_beta_r,
    stride_state_s,
    stride_state_h,
    stride_state_v,
    stride_slots,
    stride_new,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    pid_h = tl.program_id(1)
    pid_b = tl.program_id(2)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k = offs_k < K
    mask_v = offs_v < V
    mask_state = mask_v[:, None] & mask_k[None, :]
    slot = tl.load(slots_ptr + pid_b * stride_slots)
    is_new = tl.load(is_new_ptr + pid_b * stride_new)
    live = (slot >= first_valid_slot) & (slot < SLOTS)  # an id past the pool must not write behind it
    state_ptrs = state_ptr + slot.to(tl.int64) * stride_state_s + pid_h * stride_state_h
    state_ptrs += offs_v[:, None] * stride_state_v + offs_k[None, :]
    state = tl.load(state_ptrs, mask=mask_state & live & (is_new == 0), other=0.0)
    for t in range(T):
        row = pid_b * T + t
        q = tl.load(q_ptr + row * stride_q_r + pid_h * stride_q_h + offs_k, mask=mask_k, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + row * stride_k_r + pid_h * stride_k_h + offs_k, mask=mask_k, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + row * stride_v_r + pid_h * stride_v_h + offs_v, mask=mask_v, other=0.0).to(tl.float32)
        decay_ptrs = log_decay_ptr + row * stride_decay_r + pid_h * stride_decay_h + offs_k
        decay = tl.exp(tl.load(decay_ptrs, mask=mask_k, other=0.0))
        beta = tl.load(beta_ptr + row * stride_beta_r + pid_h)
        q *= tl.rsqrt(tl.sum(q * q) + L2_EPS) * K**-0.5
        k *= tl.rsqrt(tl.sum(k * k) + L2_EPS)
        state *= decay[None, :]
        correction = beta * (v - tl.sum(state * k[None, :], axis=1))
        o = tl.sum(state * q[None, :], axis=1) + tl.sum(k * q) * correction
        state += correction[:, None] * k[None, :]
        tl.store(o_ptr + (row * H + pid_h) * V + offs_v, tl.where(live, o, 0.0), mask=mask_v)
    tl.store(state_ptrs, state, mask=mask_state & live)


def kda_recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    is_new: torch.Tensor,
    first_valid_slot: int,
) -> torch.Tensor:
    """Returns o [R, H, V] float32 and updates `state[slots]` in place.

    Rows of slots below `first_valid_slot` are zero. `is_new[b]` starts from a zero state, whatever the slot holds.
    Raises ValueError as `checks.validate` does.
    """
    dims = validate(
        "kda_recurrent",
        q=q,
        k=k,
        v=v,
        log_decay=log_decay,
        beta=beta,
        state=state,
        slots=slots,
        is_new=is_new,
        first_valid_slot=first_valid_slot,
    )
    config = pick_kda_recurrent_config(dims["V"])
    return _launch(config, q, k, v, log_decay, beta, state, slots, is_new, first_valid_slot)


def _launch(config, q, k, v, log_decay, beta, state, slots, is_new, first_valid_slot) -> torch.Tensor:
    rows, heads, value_dim = v.shape
    key_dim, batch = q.shape[-1], slots.shape[0]
    o = torch.empty(rows, heads, value_dim, dtype=torch.float32, device=q.device)
    if rows == 0:
        return o
    _kda_recurrent_kernel[(triton.cdiv(value_dim, config.block_v), heads, batch)](
        q,
        k,
        v,
        log_decay,
        beta,
        state,
        slots,
        is_new,
        o,
        rows // batch,
        state.shape[0],
        first_valid_slot,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *log_decay.stride()[:2],
        beta.stride(0),
        *state.stride()[:3],
        slots.stride(0),
        is_new.stride(0),
        H=heads,
        K=key_dim,
        V=value_dim,
        BLOCK_K=triton.next_power_of_2(key_dim),
        BLOCK_V=config.block_v,
        num_warps=config.num_warps,
    )
    return o
