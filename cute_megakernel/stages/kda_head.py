"""One KDA head of one batch row, from the words of in_proj to those of y: all its op calls in one row, on one SM.

    z = causal_conv1d(qkv)        raw_decay = f_b f_a       out_gate = g_b g_a, or as it comes
    log_decay, beta = kda_gate    o = kda_recurrent         y = gated_rms_norm

A unit is an item = batch row * heads + head. What does not depend on in_proj is loaded before the wait: the state and
the tiles of f_b come through the ring into registers, those of g_b wait in their slots, the rest from memory. The
words that the head needs are asked for all at once, each by its own thread; from there on everything passes through
`LOCAL`. Pools are written last, behind the words that other SMs wait for.

Rounding   as the ops one by one: raw_decay and out_gate to bfloat16, float32 between the others
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_megakernel import ptx
from cute_megakernel.core import (
    Fields,
    Sm,
    address_of,
    exp,
    first_own,
    float_of,
    poll_pair,
    poll_word,
    region,
    release,
    ring_slot,
    sigmoid,
    sync,
    wait_full,
    word_address,
)
from cute_megakernel.shape import CONSUMER_WARPS, STATE_BYTES
from cute_megakernel.stages.causal_conv1d import TAPS, channel_of, convolve, load_channel, store_window
from cute_megakernel.stages.gated_rms_norm import gated_rms_norm
from cute_megakernel.stages.kda_gate import decay_rate, log_decays
from cute_megakernel.stages.kda_recurrent import advance, correct, lengths, load_lane, load_rows, store_rows
from cute_megakernel.stages.linear import load_tile, multiply_tile, row_place

LOCAL = ("q", "k", "v", "decay", "o", "gate", "norm", "dt_bias", "x")  # head_dim floats each, then numbers
DECAY, GATE, NUMBERS = 0, 1, 2  # warps behind those of the convolution: what each of them waits for


def local(sm: Sm, name: str) -> Int32:
    """A vector of the head; `x` holds two of bfloat16, f_a and g_a."""
    return region(sm, "local") + LOCAL.index(name) * sm.shape.kda_head_dim * 4


def number(sm: Sm, index: int) -> Int32:
    """0: beta; 1: scale of q; 2: scale of k; 3: their product, scaled; 4: exp(A_log)."""
    return region(sm, "local") + (len(LOCAL) * sm.shape.kda_head_dim + index) * 4


@cute.jit
def slot_of_row(sm: Sm, f: Fields, r: Int32) -> Int32:
    """Slot of the batch row, -1 where it is padding or points outside the pools."""
    slot = ptx.ld_shared_b32(region(sm, "slots") + r * 8)
    return ptx.select(slot < f["pool_count"], slot, Int32(-1))


def is_new(sm: Sm, r: Int32) -> Int32:
    return ptx.ld_shared_b32(region(sm, "slots") + r * 8 + 4)


@cute.jit
def kda_head(sm: Sm, f: Fields, pos: Int32, item: Int32) -> Int32:
    """One item. -> position in the ring behind it"""
    K, H = sm.shape.kda_head_dim, sm.shape.kda_heads
    per_lane, rows = K // 32, K // CONSUMER_WARPS
    r, h = item // H, item % H
    slot = slot_of_row(sm, f, r)
    old = (slot >= 0) & (is_new(sm, r) == 0)
    tapped = f["tap_z"] >= 0
    windows, ahead = cute.make_rmem_tensor(TAPS - 1, Int32), cute.make_rmem_tensor(TAPS, Float32)
    _load_ahead(sm, f, h, slot, old, windows, ahead)
    state = cute.make_rmem_tensor(rows * per_lane, Float32)
    tile = cute.make_rmem_tensor(4 * per_lane, Int32)
    pos = _take_slots(sm, pos, old, state, tile)
    if cutlass.const_expr(sm.shape.low_rank_gate):
        wait_full(sm, pos + ptx.select(sm.warp < K // 8, sm.warp // tile_warps(sm), Int32(0)))
    new = _wait(sm, f, r, h, slot, tapped, windows, ahead)
    sync(sm)
    gate = _decay(sm, f, r, h, tapped, pos, tile)
    q, k = load_lane(local(sm, "q"), sm.lane, per_lane), load_lane(local(sm, "k"), sm.lane, per_lane)
    sync(sm)
    decay = load_lane(local(sm, "decay"), sm.lane, per_lane)
    value_row = rows * sm.warp + sm.lane // (16 // rows) % rows
    value, numbers = ptx.ld_shared_f32(local(sm, "v") + value_row * 4), ptx.ld_shared_v4_f32(number(sm, 0))
    if cutlass.const_expr(sm.shape.low_rank_gate):
        _keep_gate(sm, f, r, h, tapped, gate)
    correction, o = correct(sm, state, q, k, decay, value, numbers)
    o = ptx.select_f32(slot < 0, Float32(0.0), o)
    if sm.lane & (15 // rows + 16) == 0:  # one of the lanes that have it
        ptx.st_shared_f32(local(sm, "o") + value_row * 4, o)
        if tapped:
            put(sm, f, "tap_o", H * K, r, h * K + value_row, ptx.float_bits(o))
    sync(sm)
    if sm.warp == 0:
        gated_rms_norm(sm, f, r, h, local(sm, "o"), local(sm, "gate"), local(sm, "norm"))
    advance(state, k, decay, correction, rows)
    sync(sm)  # the words of y go first
    if cutlass.const_expr(sm.shape.low_rank_gate):
        own = first_own(sm, pos)
        if own < tile_slots(sm):
            release(sm, pos + own)
        pos = pos + tile_slots(sm)
    if slot >= 0:
        store_rows(sm, f, h, slot, state)
        if sm.thread < 3 * K:
            store_window(sm, f, channel_of(sm, h, sm.thread), slot, windows, new)
    return pos


@cute.jit
def _load_ahead(sm: Sm, f: Fields, h: Int32, slot: Int32, old, windows: cute.Tensor, ahead: cute.Tensor):
    """What comes from memory, on its way when this returns: the window and taps of a channel, or vectors."""
    K = sm.shape.kda_head_dim
    role = sm.warp - 3 * K // 32
    for i in cutlass.range_constexpr(TAPS - 1):
        windows[i] = Int32(0)
    for i in cutlass.range_constexpr(TAPS):
        ahead[i] = Float32(0.0)
    if role < 0:
        load_channel(sm, f, channel_of(sm, h, sm.thread), slot, old, windows, ahead)
    elif role == NUMBERS:
        ahead[0] = ptx.ld_global_f32(address_of(f, "A_log") + cutlass.Int64(h) * 4)
    elif (role < NUMBERS) & (sm.lane < K // 4):
        start = address_of(f, "norm")
        if role == DECAY:
            start = address_of(f, "weight2") + cutlass.Int64(h) * (4 * K)
        vector = ptx.ld_global_v4_f32(start + cutlass.Int64(sm.lane) * 16)
        for i in cutlass.range_constexpr(4):
            ahead[i] = vector[i]


@cute.jit
def _take_slots(sm: Sm, pos: Int32, old, state: cute.Tensor, tile: cute.Tensor) -> Int32:
    """This warp's rows of the state and its tile of f_b into registers, as many slots at a time as the ring has: all
    warps read, then those to which the slots belong give them back. -> position behind them"""
    K = sm.shape.kda_head_dim
    per_lane, rows = K // 32, K // CONSUMER_WARPS
    state_slots = -(-4 * K * K // STATE_BYTES)
    total = state_slots + tile_slots(sm)
    state_warps = STATE_BYTES // (4 * K * rows)  # that find their rows in one slot
    absent = ptx.select(old, Int32(0), Int32(state_slots))
    for i in cutlass.range_constexpr(rows * per_lane):
        state[i] = Float32(0.0)
    for i in cutlass.range_constexpr(4 * per_lane):
        tile[i] = Int32(0)
    for start in cutlass.range_constexpr(0, total, sm.shape.slots):
        end = min(total, start + sm.shape.slots)
        at = sm.warp // state_warps
        if old & (at >= start) & (at < end):
            wait_full(sm, pos + at)
            load_rows(sm, ring_slot(sm, pos + at) + sm.warp % state_warps * (4 * K * rows), state)
        at = state_slots + sm.warp // tile_warps(sm)
        if (sm.warp < K // 8) & (at >= start) & (at < end):
            wait_full(sm, pos + at - absent)
            load_tile(sm, tile_address(sm, pos + state_slots - absent), tile, per_lane)
        sync(sm)
        first = ptx.select(absent < start, start - absent, Int32(0))
        last = ptx.select(absent < end, end - absent, Int32(0))
        own = first + first_own(sm, pos + first)
        if own < last:
            release(sm, pos + own)
    return pos + total - absent


def tile_slots(sm: Sm) -> int:
    """Slots that the tiles of a projection take."""
    return -(-2 * sm.shape.kda_head_dim**2 // STATE_BYTES)


def tile_warps(sm: Sm) -> int:
    """Warps that find their tiles in one slot."""
    return STATE_BYTES // (16 * sm.shape.kda_head_dim)


def tile_address(sm: Sm, pos: Int32) -> Int32:
    """This warp's tile of those from slot `pos` on."""
    at = sm.warp % tile_warps(sm) * (16 * sm.shape.kda_head_dim)
    return ring_slot(sm, pos + sm.warp // tile_warps(sm)) + at


@cute.jit
def _wait(
    sm: Sm, f: Fields, r: Int32, h: Int32, slot: Int32, tapped, windows: cute.Tensor, ahead: cute.Tensor
) -> Int32:
    """The words of the head, each asked for by its own thread, into `LOCAL`. -> the new input of this channel"""
    K, H = sm.shape.kda_head_dim, sm.shape.kda_heads
    role, new = sm.warp - 3 * K // 32, Int32(0)
    if role < 0:
        channel = channel_of(sm, h, sm.thread)
        word = poll_word(sm, f.number, f["src"] + r * f["src_pitch"] + channel // 2, sm.tag)
        new = ptx.shift_half(word, channel)
        z = ptx.select_f32(slot >= 0, convolve(windows, new, ahead), Float32(0.0))
        ptx.st_shared_f32(local(sm, "q") + sm.thread * 4, z)
        if tapped:
            put(sm, f, "tap_z", 3 * H * K, r, channel, ptx.float_bits(z))
    elif (role == DECAY) & (sm.lane < K // 4):
        first, second = poll_pair(sm, f.number, f["f_a"] + r * f["src_pitch"] + 2 * sm.lane, sm.tag)
        _keep_pairs(sm, local(sm, "x"), first, second)
        _keep(local(sm, "dt_bias") + sm.lane * 16, ahead[0], ahead[1], ahead[2], ahead[3])
    elif (role == GATE) & (sm.lane < K // 4):
        at = f["gate"] + r * f["src_pitch"] + 2 * sm.lane
        if cutlass.const_expr(sm.shape.low_rank_gate):
            first, second = poll_pair(sm, f.number, at, sm.tag)
            _keep_pairs(sm, local(sm, "x") + 2 * K, first, second)
        else:
            first, second = poll_pair(sm, f.number, at + h * (K // 2), sm.tag)
            low, high = sigmoid_pair(first), sigmoid_pair(second)
            _keep(local(sm, "gate") + sm.lane * 16, low[0], low[1], high[0], high[1])
        _keep(local(sm, "norm") + sm.lane * 16, ahead[0], ahead[1], ahead[2], ahead[3])
    elif (role == NUMBERS) & (sm.lane == 0):
        word = poll_word(sm, f.number, f["beta"] + r * f["src_pitch"] + h // 2, sm.tag)
        beta = sigmoid(ptx.low_bf16(ptx.shift_half(word, h)))
        ptx.st_shared_f32(number(sm, 0), beta)
        ptx.st_shared_f32(number(sm, 4), decay_rate(ahead[0]))
        if tapped:
            put(sm, f, "tap_beta", -(-H // 8) * 8, r, h, ptx.float_bits(beta))
    return new


@cute.jit
def _decay(sm: Sm, f: Fields, r: Int32, h: Int32, tapped, pos: Int32, tile: cute.Tensor) -> Int32:
    """exp(log_decay) of this warp's channels to `LOCAL`, and by one warp the lengths of q and k. -> a pair of the
    low-rank output gate, whose tiles are in their slots until here"""
    K, H = sm.shape.kda_head_dim, sm.shape.kda_heads
    per_lane, bound = K // 32, float_of(f, "p0")
    inside = sm.warp < K // 8
    column = ptx.select(inside, 8 * sm.warp + 2 * sm.quad, Int32(0))
    raw, gate = ptx.pack_bf16(*multiply_tile(sm, local(sm, "x"), tile, per_lane)), Int32(0)
    dt, dt_next = ptx.ld_shared_v2_b32(local(sm, "dt_bias") + column * 4)
    rate = ptx.ld_shared_f32(number(sm, 4))
    if cutlass.const_expr(sm.shape.low_rank_gate):
        load_tile(sm, tile_address(sm, pos), tile, per_lane)
        gate = ptx.pack_bf16(*multiply_tile(sm, local(sm, "x") + 2 * K, tile, per_lane))
    if sm.warp == 0:
        q, k = load_lane(local(sm, "q"), sm.lane, per_lane), load_lane(local(sm, "k"), sm.lane, per_lane)
        scales = lengths(q, k, per_lane)
        for i in cutlass.range_constexpr(3):
            ptx.st_shared_f32(number(sm, 1 + i), scales[i])
    low, high = ptx.low_bf16(raw) + ptx.bits_float(dt), ptx.high_bf16(raw) + ptx.bits_float(dt_next)
    low, high = log_decays(bound, rate, low, high)
    if inside & (sm.group == 0):
        ptx.st_shared_v2_f32(local(sm, "decay") + column * 4, exp(low), exp(high))
        if tapped:
            channel = h * K + column
            put(sm, f, "tap_raw_decay", H * K // 2, r, channel // 2, raw)
            put(sm, f, "tap_log_decay", H * K, r, channel, ptx.float_bits(low))
            put(sm, f, "tap_log_decay", H * K, r, channel + 1, ptx.float_bits(high))
    return gate


@cute.jit
def _keep_gate(sm: Sm, f: Fields, r: Int32, h: Int32, tapped, gate: Int32):
    """sigmoid(out_gate) of this warp's channels to `LOCAL`."""
    K, H = sm.shape.kda_head_dim, sm.shape.kda_heads
    if (sm.warp < K // 8) & (sm.group == 0):
        column = 8 * sm.warp + 2 * sm.quad
        ptx.st_shared_v2_f32(local(sm, "gate") + column * 4, *sigmoid_pair(gate))
        if tapped:
            put(sm, f, "tap_out_gate", H * K // 2, r, (h * K + column) // 2, gate)


def sigmoid_pair(pair: Int32) -> tuple[Float32, Float32]:
    return sigmoid(ptx.low_bf16(pair)), sigmoid(ptx.high_bf16(pair))


def _keep_pairs(sm: Sm, address: Int32, first: Int32, second: Int32):
    """Columns 4 * lane and on of a row for `multiply_tile`."""
    ptx.st_shared_b32(address + row_place(2 * sm.lane) * 4, first)
    ptx.st_shared_b32(address + row_place(2 * sm.lane + 1) * 4, second)


def _keep(address: Int32, a: Float32, b: Float32, c: Float32, d: Float32):
    ptx.st_shared_v2_f32(address, a, b)
    ptx.st_shared_v2_f32(address + 8, c, d)


def put(sm: Sm, f: Fields, name: str, pitch: int, r: Int32, column: Int32, word: Int32):
    """Hands a word on that nobody but the caller of the launch looks at."""
    ptx.st_word(word_address(sm, f[name] + r * pitch + column), word, sm.tag)
