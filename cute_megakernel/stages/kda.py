"""causal_conv1d, the KDA gates, kda_recurrent and gated_rms_norm of one head of one batch row, one after the other on
one SM; between them everything stays in its shared memory (`LOCAL`), in float32.

A unit is an item = batch row * heads + head. The recurrent state comes through the ring like a weight, because its
address is known when the launch begins: it is there before q, k and v are.

Source   DESIGN.md section 5; fla-org/flash-linear-attention fla/ops/kda/naive.py for the order of the delta rule
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
    float_of,
    poll_word,
    region,
    release,
    ring_slot,
    rms_scale,
    sigmoid,
    sync,
    wait_full,
    warp_sum,
    warp_sums,
    word_address,
)
from cute_megakernel.shape import CONSUMER_WARPS, CONSUMERS, STATE_BYTES

LOCAL = ("decay", "gate", "q", "k", "v", "log_decay", "o", "dt_bias", "norm")  # head_dim floats each, then two numbers
L2_EPS = 1.0e-6
TAPS = 4


def local(sm: Sm, name: str) -> Int32:
    return region(sm, "local") + LOCAL.index(name) * sm.shape.kda_head_dim * 4


def number(sm: Sm, index: int) -> Int32:
    """0: beta, raw before kda_gate; 1: A_log."""
    return region(sm, "local") + (len(LOCAL) * sm.shape.kda_head_dim + index) * 4


@cute.jit
def slot_of_row(sm: Sm, f: Fields, r: Int32) -> Int32:
    """Slot of the batch row, -1 where it is padding or points outside the pool."""
    slot = ptx.ld_shared_b32(region(sm, "slots") + r * 8)
    return ptx.select(slot < f["pool_count"], slot, Int32(-1))


def is_new(sm: Sm, r: Int32) -> Int32:
    return ptx.ld_shared_b32(region(sm, "slots") + r * 8 + 4)


@cute.jit
def causal_conv1d(sm: Sm, f: Fields, item: Int32):
    """silu(sum of taps) of 3 * head_dim channels; the window moves on by one input, which it keeps raw."""
    K, H = sm.shape.kda_head_dim, sm.shape.kda_heads
    r, h = item // H, item % H
    slot = slot_of_row(sm, f, r)
    old = (slot >= 0) & (is_new(sm, r) == 0)
    turns = -(-4 * K // CONSUMERS)
    windows = cute.make_rmem_tensor(turns * (TAPS - 1), Int32)
    taps = cute.make_rmem_tensor(turns * TAPS, Float32)
    for j in cutlass.range_constexpr(turns):
        i = sm.thread + j * CONSUMERS
        if i < 3 * K:
            _load_channel(sm, f, _channel(sm, h, i), slot, old, windows, taps, j)
        elif i < 4 * K:
            _fetch(sm, f, r, h, i - 3 * K)
    for j in cutlass.range_constexpr(turns):
        i = sm.thread + j * CONSUMERS
        if i < 3 * K:
            channel = _channel(sm, h, i)
            word = poll_word(sm, f.number, f["src"] + r * f["src_pitch"] + channel // 2, sm.tag)
            z = _convolve(sm, f, channel, slot, ptx.shift_half(word, channel), windows, taps, j)
            ptx.st_shared_f32(local(sm, "q") + i * 4, z)
            put(sm, f, "dst", "dst_pitch", r, channel, z)


def _channel(sm: Sm, h: Int32, i: Int32) -> Int32:
    """Channel i of the head's q, k and v among those of all heads."""
    K, H = sm.shape.kda_head_dim, sm.shape.kda_heads
    return i // K * (H * K) + h * K + i % K


def _window(sm: Sm, f: Fields, channel: Int32, slot: Int32, step: int) -> Int64:
    """Address of a channel's input `step` of the window."""
    start = address_of(f, "pool") + Int64(slot) * address_of(f, "pool_stride")
    return start + Int64(channel + step * (3 * sm.shape.kda_heads * sm.shape.kda_head_dim)) * 2


@cute.jit
def _load_channel(
    sm: Sm, f: Fields, channel: Int32, slot: Int32, old, windows: cute.Tensor, taps: cute.Tensor, j: cutlass.Constexpr
):
    for i in cutlass.range_constexpr(TAPS - 1):
        windows[j * (TAPS - 1) + i] = Int32(0)
    if old:
        for i in cutlass.range_constexpr(TAPS - 1):
            windows[j * (TAPS - 1) + i] = ptx.ld_fresh_u16(_window(sm, f, channel, slot, i))
    weights = ptx.ld_global_v4_f32(address_of(f, "weight") + Int64(channel) * 16)
    for i in cutlass.range_constexpr(TAPS):
        taps[j * TAPS + i] = weights[i]


@cute.jit
def _convolve(
    sm: Sm, f: Fields, channel: Int32, slot: Int32, new: Int32, windows: cute.Tensor, taps: cute.Tensor,
    j: cutlass.Constexpr,
) -> Float32:  # fmt: skip
    """One channel, oldest input first; padding gives 0 and leaves the window alone."""
    total = Float32(0.0)
    for i in cutlass.range_constexpr(TAPS - 1):
        total = total + ptx.low_bf16(windows[j * (TAPS - 1) + i]) * taps[j * TAPS + i]
    total = total + ptx.low_bf16(new) * taps[j * TAPS + TAPS - 1]
    if slot >= 0:
        for i in cutlass.range_constexpr(TAPS - 2):
            ptx.st_global_u16(_window(sm, f, channel, slot, i), windows[j * (TAPS - 1) + i + 1])
        ptx.st_global_u16(_window(sm, f, channel, slot, TAPS - 2), new)
    return ptx.select_f32(slot >= 0, total * sigmoid(total), Float32(0.0))


@cute.jit
def _fetch(sm: Sm, f: Fields, r: Int32, h: Int32, k: Int32):
    """What the rows behind this one need from memory, on its way while the convolution waits for its own."""
    K = sm.shape.kda_head_dim
    dt = ptx.ld_global_f32(address_of(f, "weight2") + Int64(h * K + k) * 4)
    norm = ptx.ld_global_f32(address_of(f, "norm") + Int64(k) * 4)
    if k == 0:
        ptx.st_shared_f32(number(sm, 1), ptx.ld_global_f32(address_of(f, "A_log") + Int64(h) * 4))
        word = poll_word(sm, f.number, f["beta"] + r * f["beta_pitch"] + h // 2, sm.tag)
        ptx.st_shared_f32(number(sm, 0), half_of(word, h))
    ptx.st_shared_f32(local(sm, "dt_bias") + k * 4, dt)
    ptx.st_shared_f32(local(sm, "norm") + k * 4, norm)
    if f["gate"] >= 0:
        word = poll_word(sm, f.number, f["gate"] + r * f["gate_pitch"] + (h * K + k) // 2, sm.tag)
        ptx.st_shared_f32(local(sm, "gate") + k * 4, half_of(word, k))


def half_of(word: Int32, index: Int32) -> Float32:
    """Column `index` of the pair that holds it."""
    return ptx.select_f32(index % 2 == 0, ptx.low_bf16(word), ptx.high_bf16(word))


@cute.jit
def put(sm: Sm, f: Fields, name: cutlass.Constexpr, pitch: cutlass.Constexpr, r: Int32, column: Int32, value: Float32):
    """Hands a float32 on, where the row asks for it."""
    if f[name] >= 0:
        ptx.st_word(word_address(sm, f[name] + r * f[pitch] + column), ptx.float_bits(value), sm.tag)


@cute.jit
def kda_gate(sm: Sm, f: Fields, item: Int32):
    """log_decay = bound * sigmoid(rate * (raw + dt)), or -rate * softplus(raw + dt) where bound is 0; beta."""
    K, H = sm.shape.kda_head_dim, sm.shape.kda_heads
    r, h = item // H, item % H
    bound = float_of(f, "p0")
    if sm.thread < K:
        rate = ptx.fmin(exp(ptx.ld_shared_f32(number(sm, 1))), Float32(3.4028234663852886e38))
        dt = ptx.ld_shared_f32(local(sm, "dt_bias") + sm.thread * 4)
        raw = ptx.ld_shared_f32(local(sm, "decay") + sm.thread * 4) + dt
        decay = bound * sigmoid(rate * raw)
        if bound == Float32(0.0):
            decay = Float32(0.0) - rate * softplus(raw)
        ptx.st_shared_f32(local(sm, "log_decay") + sm.thread * 4, decay)
        put(sm, f, "dst", "dst_pitch", r, h * K + sm.thread, decay)
    if sm.thread == K:
        beta = sigmoid(ptx.ld_shared_f32(number(sm, 0)))
        ptx.st_shared_f32(number(sm, 0), beta)
        put(sm, f, "tap", "tap_pitch", r, h, beta)


@cute.jit
def softplus(x: Float32) -> Float32:
    """log(1 + e^x) as max(x, 0) + log1p(e^-|x|); the logarithm by its series where e^-|x| is small."""
    e = exp(Float32(0.0) - ptx.abs_f32(x))
    u = Float32(1.0) + e
    # log1p(e) = log(u) + (e - (u - 1)) / u: what rounding u lost comes back
    log1p = ptx.log2_approx(u) * Float32(0.6931471805599453) + ptx.div_full(e - (u - Float32(1.0)), u)
    small = e * (Float32(1.0) - e * (Float32(0.5) - e * (Float32(0.33333333) - e * Float32(0.25))))
    log1p = ptx.select_f32(e < Float32(0.03125), small, log1p)
    return ptx.fmax_nan(x, Float32(0.0)) + log1p


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


@cute.jit
def gated_rms_norm(sm: Sm, f: Fields, item: Int32):
    """RMSNorm of the head's outputs times sigmoid(gate); each of the first warps sums the squares for itself."""
    K, H = sm.shape.kda_head_dim, sm.shape.kda_heads
    r, h = item // H, item % H
    if sm.thread < 32 * (-(-K // 64)):
        squares = Float32(0.0)
        for i in cutlass.range_constexpr(K // 32):
            o = ptx.ld_shared_f32(local(sm, "o") + (sm.lane + 32 * i) * 4)
            squares = squares + o * o
        scale = rms_scale(warp_sum(squares), Float32(K), float_of(f, "eps"))
        if sm.thread < K // 2:
            column = 2 * sm.thread
            y = cute.make_rmem_tensor(2, Float32)
            for i in cutlass.range_constexpr(2):
                at = (column + i) * 4
                normed = ptx.ld_shared_f32(local(sm, "o") + at) * scale * ptx.ld_shared_f32(local(sm, "norm") + at)
                y[i] = normed * sigmoid(ptx.ld_shared_f32(local(sm, "gate") + at))
            at = f["dst"] + r * f["dst_pitch"] + (h * K + column) // 2
            ptx.st_word(word_address(sm, at), ptx.pack_bf16(y[0], y[1]), sm.tag)
