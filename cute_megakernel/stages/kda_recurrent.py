"""kda_recurrent of one head: the delta rule on its state [V, K], which comes through the ring and goes to the pool.

    S = S * exp(log_decay)      c = beta * (v - S k)      o = S q + (k . q) c      S = S + c k^T

The state streams like a weight, because its address is known when the launch begins: it is there before q, k and v are.

Source   DESIGN.md section 5; fla-org/flash-linear-attention fla/ops/kda/naive.py for the order
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_megakernel import ptx
from cute_megakernel.core import (
    Fields,
    Sm,
    address_of,
    exp,
    first_own,
    release,
    ring_slot,
    sync,
    wait_full,
    warp_sum,
    warp_sums,
)
from cute_megakernel.shape import CONSUMER_WARPS, STATE_BYTES
from cute_megakernel.stages.kda_head import is_new, local, number, put, slot_of_row

L2_EPS = 1.0e-6


@cute.jit
def kda_recurrent(sm: Sm, f: Fields, pos: Int32, item: Int32) -> Int32:
    """Decay, predict, correct, read: value rows of the state over the warps, its key channels over the lanes."""
    K, H = sm.shape.kda_head_dim, sm.shape.kda_heads
    per_lane = K // 32
    slot_rows = min(STATE_BYTES // (4 * K), K)
    slots = K // slot_rows
    warp_rows = slot_rows // CONSUMER_WARPS
    r, h = item // H, item % H
    slot = slot_of_row(sm, f, r)
    state = cute.make_rmem_tensor(slots * warp_rows * per_lane, Float32)
    for i in cutlass.range_constexpr(slots * warp_rows * per_lane):
        state[i] = Float32(0.0)
    if (slot >= 0) & (is_new(sm, r) == 0):
        for s in cutlass.range_constexpr(slots):
            wait_full(sm, pos)
            base = ring_slot(sm, pos) + sm.lane * (4 * per_lane)
            for v in cutlass.range_constexpr(warp_rows):
                _load_row(base + (sm.warp * warp_rows + v) * (4 * K), state, (s * warp_rows + v) * per_lane, per_lane)
            sync(sm)  # all warps have read the slot
            if first_own(sm, pos) == 0:
                release(sm, pos)
            pos += 1
    q, k, decay = _load_lane(sm, "q", per_lane), _load_lane(sm, "k", per_lane), _load_lane(sm, "log_decay", per_lane)
    qq, kk, kq = Float32(0.0), Float32(0.0), Float32(0.0)
    for i in cutlass.range_constexpr(per_lane):
        qq, kk = qq + q[i] * q[i], kk + k[i] * k[i]
    q_scale = ptx.rsqrt_approx(warp_sum(qq) + Float32(L2_EPS)) * Float32(K**-0.5)
    k_scale = ptx.rsqrt_approx(warp_sum(kk) + Float32(L2_EPS))
    for i in cutlass.range_constexpr(per_lane):
        q[i], k[i], decay[i] = q[i] * q_scale, k[i] * k_scale, exp(decay[i])
        kq = kq + q[i] * k[i]
    kq = warp_sum(kq)
    beta = ptx.ld_shared_f32(number(sm, 0))
    pool = address_of(f, "pool") + Int64(slot) * address_of(f, "pool_stride") + Int64(h) * (4 * K * K)
    count = slots * warp_rows
    seen, read = cute.make_rmem_tensor(count, Float32), cute.make_rmem_tensor(count, Float32)
    for v in cutlass.range_constexpr(count):
        seen[v], read[v] = Float32(0.0), Float32(0.0)
        for i in cutlass.range_constexpr(per_lane):
            at = v * per_lane + i
            state[at] = state[at] * decay[i]
            seen[v], read[v] = seen[v] + state[at] * k[i], read[v] + state[at] * q[i]
    warp_sums(seen, count)
    warp_sums(read, count)
    for v in cutlass.range_constexpr(count):
        value_row = (v // warp_rows) * slot_rows + sm.warp * warp_rows + v % warp_rows
        value = ptx.ld_shared_f32(local(sm, "v") + value_row * 4)
        correction = beta * (value - seen[v])
        o = ptx.select_f32(slot < 0, Float32(0.0), read[v] + kq * correction)
        for i in cutlass.range_constexpr(per_lane):
            state[v * per_lane + i] = state[v * per_lane + i] + correction * k[i]
        if slot >= 0:
            _store_row(pool + Int64(value_row * K + sm.lane * per_lane) * 4, state, v * per_lane, per_lane)
        if sm.lane == 0:
            ptx.st_shared_f32(local(sm, "o") + value_row * 4, o)
            put(sm, f, "dst", "dst_pitch", r, h * K + value_row, o)
    return pos


@cute.jit
def _load_lane(sm: Sm, name: cutlass.Constexpr, per_lane: cutlass.Constexpr):
    """This lane's channels of a local vector."""
    values = cute.make_rmem_tensor(per_lane, Float32)
    _load_row(local(sm, name) + sm.lane * (4 * per_lane), values, 0, per_lane)
    return values


@cute.jit
def _load_row(address: Int32, into: cute.Tensor, at: cutlass.Constexpr, per_lane: cutlass.Constexpr):
    if cutlass.const_expr(per_lane == 4):
        into[at], into[at + 1], into[at + 2], into[at + 3] = ptx.ld_shared_v4_f32(address)
    else:
        for i in cutlass.range_constexpr(per_lane):
            into[at + i] = ptx.ld_shared_f32(address + 4 * i)


@cute.jit
def _store_row(address: Int64, values: cute.Tensor, at: cutlass.Constexpr, per_lane: cutlass.Constexpr):
    if cutlass.const_expr(per_lane == 4):
        ptx.st_global_v4_f32(address, values[at], values[at + 1], values[at + 2], values[at + 3])
    else:
        for i in cutlass.range_constexpr(per_lane):
            ptx.st_global_f32(address + 4 * i, values[at + i])
