"""kda_recurrent of one head: the delta rule on its state [V, K], which comes through the ring and goes to the pool.

    S = S * exp(log_decay)      c = beta * (v - S k)      o = S q + (k . q) c      S = S + c k^T

Value rows of the state are dealt out over the warps, key channels over the lanes. The state streams like a weight,
because its address is known when the launch begins: it is in registers before q, k and v are there. The decay goes to
k and q first, and to the state when y is gone; their lengths come in behind the sums.

Source   DESIGN.md section 5; fla-org/flash-linear-attention fla/ops/kda/naive.py for the order
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_megakernel import ptx
from cute_megakernel.core import Fields, Sm, address_of, warp_sums
from cute_megakernel.shape import CONSUMER_WARPS

L2_EPS = 1.0e-6


@cute.jit
def lengths(q: cute.Tensor, k: cute.Tensor, per_lane: cutlass.Constexpr):
    """Scales that give q and k unit length, that of q with the scale of attention; and the product of the two then."""
    sums = cute.make_rmem_tensor(3, Float32)
    for i in cutlass.range_constexpr(3):
        sums[i] = Float32(0.0)
    for i in cutlass.range_constexpr(per_lane):
        sums[0], sums[1], sums[2] = sums[0] + q[i] * q[i], sums[1] + k[i] * k[i], sums[2] + k[i] * q[i]
    warp_sums(sums, 3)
    q_scale = ptx.rsqrt_approx(sums[0] + Float32(L2_EPS)) * Float32((32 * per_lane) ** -0.5)
    k_scale = ptx.rsqrt_approx(sums[1] + Float32(L2_EPS))
    return q_scale, k_scale, sums[2] * q_scale * k_scale


@cute.jit
def correct(
    sm: Sm, state: cute.Tensor, q: cute.Tensor, k: cute.Tensor, decay: cute.Tensor, value: Float32, numbers: tuple
):
    """Predict, correct, read. `value` is of row `lane // (16 // rows) % rows` of this warp; `numbers` are beta and what
    `lengths` returns. -> c with the scale of k, and o, of that row"""
    beta, q_scale, k_scale, kq = numbers
    per_lane, rows = sm.shape.kda_head_dim // 32, sm.shape.kda_head_dim // CONSUMER_WARPS
    totals = cute.make_rmem_tensor(2 * rows, Float32)
    for v in cutlass.range_constexpr(rows):
        totals[v], totals[rows + v] = Float32(0.0), Float32(0.0)
        for i in cutlass.range_constexpr(per_lane):
            totals[v] = totals[v] + state[v * per_lane + i] * (k[i] * decay[i])
            totals[rows + v] = totals[rows + v] + state[v * per_lane + i] * (q[i] * decay[i])
    total = _sums_by_lane(totals, 2 * rows, sm.lane)
    other = ptx.shfl_xor(total, 16)
    seen = ptx.select_f32(sm.lane < 16, total, other) * k_scale
    read = ptx.select_f32(sm.lane < 16, other, total) * q_scale
    correction = beta * (value - seen)
    return correction * k_scale, read + kq * correction


@cute.jit
def _sums_by_lane(values: cute.Tensor, count: cutlass.Constexpr, lane: Int32) -> Float32:
    """Sums over the warp of `count` numbers, a power of 2. -> in lane l the sum of number l * count / 32

    In every step a lane gives half of what it has left to a lane that takes it over.
    """
    for step in cutlass.range_constexpr(5):
        mask, half = 16 >> step, count >> (step + 1)
        if cutlass.const_expr(half > 0):
            upper = lane & mask != 0
            for i in cutlass.range_constexpr(half):
                mine = ptx.select_f32(upper, values[i + half], values[i])
                given = ptx.select_f32(upper, values[i], values[i + half])
                values[i] = mine + ptx.shfl_xor(given, mask)
        else:
            values[0] = values[0] + ptx.shfl_xor(values[0], mask)
    return values[0]


@cute.jit
def advance(
    state: cute.Tensor, k: cute.Tensor, decay: cute.Tensor, correction: Float32, rows: cutlass.Constexpr
):  # fmt: skip
    """The state after the step; lanes hold the corrections as `correct` left them."""
    per_lane = rows * CONSUMER_WARPS // 32
    for v in cutlass.range_constexpr(rows):
        c = ptx.shfl_f32(correction, v * (16 // rows))
        for i in cutlass.range_constexpr(per_lane):
            state[v * per_lane + i] = state[v * per_lane + i] * decay[i] + c * k[i]


@cute.jit
def load_rows(sm: Sm, address: Int32, state: cute.Tensor):
    """This warp's rows of the state from its place in the ring."""
    K = sm.shape.kda_head_dim
    for v in cutlass.range_constexpr(K // CONSUMER_WARPS):
        _load_row(address + v * (4 * K) + sm.lane * (K // 8), state, v * (K // 32), K // 32)


@cute.jit
def store_rows(sm: Sm, f: Fields, h: Int32, slot: Int32, state: cute.Tensor):
    """This warp's rows to the pool."""
    K = sm.shape.kda_head_dim
    per_lane, rows = K // 32, K // CONSUMER_WARPS
    pool = address_of(f, "pool") + Int64(slot) * address_of(f, "pool_stride") + Int64(h) * (4 * K * K)
    pool = pool + Int64(sm.warp * (rows * 4 * K) + sm.lane * (4 * per_lane))
    for v in cutlass.range_constexpr(rows):
        _store_row(pool + v * (4 * K), state, v * per_lane, per_lane)


@cute.jit
def load_lane(address: Int32, lane: Int32, per_lane: cutlass.Constexpr):
    """This lane's channels of a vector in shared memory."""
    values = cute.make_rmem_tensor(per_lane, Float32)
    _load_row(address + lane * (4 * per_lane), values, 0, per_lane)
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
