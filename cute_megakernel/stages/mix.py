"""x <- activations, in every SM: the input of the projections that follow, kept in shared memory as bfloat16.

    s = embed[token], or the words of `src`                        embedding, or a plain load
    s = bf16(s + d), d = delta1 or bf16(delta1 + delta2)           residual_add, once or twice
    s = softmax mixture of bank rows and s                         attn_res_norm
    s = s / sqrt(mean(s^2) + eps) * norm                           rms_norm, attn_res_norm

What a row lacks is skipped. Every SM computes all columns and stores its share of them: the sum as the new prefix
`dst`, the result as `h`. The bank's part of the mixture needs nothing that is still being computed, so it is summed up
before the wait for `src` and the deltas; its scores come from BANK_SCORES.

Rounding   as the ops one by one: sums to bfloat16 each, the result once
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
    float_of,
    poll_quads,
    poll_word,
    region,
    rms_scale,
    sum_two,
    word_address,
    word_at,
)
from cute_megakernel.shape import CONSUMERS, MAX_BANK
from cute_megakernel.table import FIELD

LOAD_QUADS = 4  # loads on their way to a thread


@cute.jit
def mix(sm: Sm, f: Fields):
    quads = -(-sm.shape.hidden_size // (4 * CONSUMERS))
    for r in range(f["r0"], f["r1"]):
        if f["kind"] != 0:
            _mix_row(sm, f, r, quads)
        else:
            _load_row(sm, f, r)
        _zero_pads(sm, f, r - f["r0"])


@cute.jit
def _load_row(sm: Sm, f: Fields, r: Int32):
    """Copies one activation row, in groups of `group` columns that start `group_pad` apart."""
    count, start = f["width"] // 4, f["src"] + r * f["src_pitch"]
    group, pad = f["group"] // 4, f["group_pad"] // 4
    pad = ptx.select(group == count, group, pad)
    x = x_row(sm, r - f["r0"], f)
    first = Int32(0)
    while first < count:
        pairs = cute.make_rmem_tensor(2 * LOAD_QUADS, Int32)
        poll_quads(sm, f.number, start + 2 * first, count - first, LOAD_QUADS, pairs)
        for j in cutlass.range_constexpr(LOAD_QUADS):
            q = first + sm.thread + j * CONSUMERS
            if q < count:
                place = q
                if pad != group:
                    place = (q // group) * pad + q % group
                st_quad(x + place * 8, pairs[2 * j], pairs[2 * j + 1])
        first += LOAD_QUADS * CONSUMERS


@cute.jit
def _zero_pads(sm: Sm, f: Fields, row: Int32):
    """Zeros between groups, where a block of weights reaches past the columns."""
    group, pad = f["group"], f["group_pad"]
    x = x_row(sm, row, f)
    gap = (pad - group) // 4
    total, q = Int32(0), sm.thread
    if gap > 0:
        total = (f["width"] // group) * gap
    while q < total:
        st_quad(x + ((q // gap) * pad + group) * 2 + (q % gap) * 8, Int32(0), Int32(0))
        q += CONSUMERS


def x_row(sm: Sm, row: Int32, f: Fields) -> Int32:
    return region(sm, "x") + row * f["x_pitch"]


def st_quad(address: Int32, first: Int32, second: Int32):
    ptx.st_shared_v2_b32(address, first, second)


@cute.jit
def _mix_row(sm: Sm, f: Fields, r: Int32, quads: cutlass.Constexpr):
    """All that needs no other SM's latest result comes first: weights, the old prefix, the bank; then the deltas."""
    count, n_bank, norm = f["width"] // 4, f["n_bank"], address_of(f, "norm")
    s = cute.make_rmem_tensor(4 * quads, Float32)
    mixed = cute.make_rmem_tensor(4 * quads, Float32)
    score_weights = cute.make_rmem_tensor(4 * quads, Float32)
    norms = cute.make_rmem_tensor(2 * quads, Int32)
    _weights(sm, f, count, quads, norm, norms, score_weights)
    for j in cutlass.range_constexpr(4 * quads):
        mixed[j] = Float32(0.0)
    top, weight = _sum_bank(sm, f, r, count, quads, mixed)
    _prefix(sm, f, r, count, quads, s)
    scale = Float32(1.0)
    if n_bank > 0:
        score = _score(sm, f, count, quads, s, score_weights)
        new_top = ptx.fmax(top, score)
        old, new = exp(top - new_top), exp(score - new_top)
        total = ptx.div_full(Float32(1.0), weight * old + new)
        for j in cutlass.range_constexpr(4 * quads):
            s[j] = (mixed[j] * old + s[j] * new) * total
    if norm != 0:
        squares = Float32(0.0)
        for j in cutlass.range_constexpr(quads):
            if sm.thread + j * CONSUMERS < count:
                for i in cutlass.range_constexpr(4):
                    squares = squares + s[4 * j + i] * s[4 * j + i]
        squares, _ = sum_two(sm, squares, Float32(0.0), 1)
        scale = rms_scale(squares, f["width"], float_of(f, "eps"))
    _store(sm, f, r, count, quads, s, norms, norm, scale)


@cute.jit
def _weights(
    sm: Sm, f: Fields, count: Int32, quads: cutlass.Constexpr, norm: Int64, norms: cute.Tensor, scores: cute.Tensor
):
    """Norm weights as pairs and, where there is a bank, score weights, of this thread's columns."""
    score_weights = address_of(f, "weight2")
    for j in cutlass.range_constexpr(quads):
        q = sm.thread + j * CONSUMERS
        norms[2 * j], norms[2 * j + 1] = Int32(0), Int32(0)
        for i in cutlass.range_constexpr(4):
            scores[4 * j + i] = Float32(0.0)
        if q < count:
            if norm != 0:
                norms[2 * j], norms[2 * j + 1] = ptx.ld_global_v2_b32(norm + Int64(q) * 8)
            if f["n_bank"] > 0:
                w = ptx.ld_global_v4_f32(score_weights + Int64(q) * 16)
                for i in cutlass.range_constexpr(4):
                    scores[4 * j + i] = w[i]


@cute.jit
def _sum_bank(sm: Sm, f: Fields, r: Int32, count: Int32, quads: cutlass.Constexpr, mixed: cute.Tensor):
    """Sum of exp(score - top) * row over the bank rows into `mixed`. -> top, sum of exp(score - top)"""
    top, weight = Float32(-1.0e30), Float32(0.0)
    n_bank, scores = f["n_bank"], f["scores"] + r * MAX_BANK
    for b in range(n_bank):
        top = ptx.fmax(top, ptx.bits_float(poll_word(sm, f.number, scores + b, sm.tag)))
    for b in range(n_bank):
        e = exp(ptx.bits_float(poll_word(sm, f.number, scores + b, sm.tag)) - top)
        weight = weight + e
        pairs = cute.make_rmem_tensor(2 * quads, Int32)
        bank = word_at(f, FIELD["bank0"] + b)
        poll_quads(sm, f.number, bank + r * f["dst_pitch"], count, quads, pairs)
        for j in cutlass.range_constexpr(2 * quads):
            mixed[2 * j] = mixed[2 * j] + e * ptx.low_bf16(pairs[j])
            mixed[2 * j + 1] = mixed[2 * j + 1] + e * ptx.high_bf16(pairs[j])
    return top, weight


@cute.jit
def _prefix(sm: Sm, f: Fields, r: Int32, count: Int32, quads: cutlass.Constexpr, s: cute.Tensor):
    """The prefix with its pending sums, rounded to bfloat16, into `s`; this SM's share is stored to `dst`."""
    pairs = cute.make_rmem_tensor(2 * quads, Int32)
    if f["src"] >= 0:
        poll_quads(sm, f.number, f["src"] + r * f["src_pitch"], count, quads, pairs)
    else:
        _embed(sm, f, r, count, quads, pairs)
    for j in cutlass.range_constexpr(2 * quads):
        s[2 * j], s[2 * j + 1] = ptx.low_bf16(pairs[j]), ptx.high_bf16(pairs[j])
    if f["delta1"] >= 0:
        delta = cute.make_rmem_tensor(2 * quads, Int32)
        second = f["delta2"]
        if second >= 0:  # the one that is there sooner
            poll_quads(sm, f.number, second + r * f["dst_pitch"], count, quads, delta)
        poll_quads(sm, f.number, f["delta1"] + r * f["dst_pitch"], count, quads, pairs)
        for j in cutlass.range_constexpr(2 * quads):
            d0, d1 = ptx.low_bf16(pairs[j]), ptx.high_bf16(pairs[j])
            if second >= 0:
                both = ptx.pack_bf16(d0 + ptx.low_bf16(delta[j]), d1 + ptx.high_bf16(delta[j]))
                d0, d1 = ptx.low_bf16(both), ptx.high_bf16(both)
            total = ptx.pack_bf16(s[2 * j] + d0, s[2 * j + 1] + d1)
            s[2 * j], s[2 * j + 1] = ptx.low_bf16(total), ptx.high_bf16(total)
    if f["dst"] >= 0:
        for j in cutlass.range_constexpr(quads):
            q = sm.thread + j * CONSUMERS
            if (q < count) & (q % sm.shape.sms == sm.block):
                ptx.st_word_pair(
                    word_address(sm, f["dst"] + r * f["dst_pitch"] + 2 * q),
                    ptx.pack_bf16(s[4 * j], s[4 * j + 1]),
                    ptx.pack_bf16(s[4 * j + 2], s[4 * j + 3]),
                    sm.tag,
                )


@cute.jit
def _embed(sm: Sm, f: Fields, r: Int32, count: Int32, quads: cutlass.Constexpr, pairs: cute.Tensor):
    """Row `tokens[r]` of the embedding; a token outside the table gives zeros."""
    token = ptx.ld_global_b64(sm.batch["tokens"] + Int64(r) * 8)
    inside = (token >= 0) & (token < Int64(f["pool_count"]))
    row = address_of(f, "weight") + token * Int64(f["width"]) * 2
    for j in cutlass.range_constexpr(quads):
        q = sm.thread + j * CONSUMERS
        pairs[2 * j], pairs[2 * j + 1] = Int32(0), Int32(0)
        if inside & (q < count):
            pairs[2 * j], pairs[2 * j + 1] = ptx.ld_global_v2_b32(row + Int64(q) * 8)


@cute.jit
def _score(sm: Sm, f: Fields, count: Int32, quads: cutlass.Constexpr, s: cute.Tensor, weights: cute.Tensor) -> Float32:
    """Score of the prefix: of its normed row, by the row's own score weight."""
    squares, dot = Float32(0.0), Float32(0.0)
    for j in cutlass.range_constexpr(quads):
        if sm.thread + j * CONSUMERS < count:
            for i in cutlass.range_constexpr(4):
                squares = squares + s[4 * j + i] * s[4 * j + i]
                dot = dot + s[4 * j + i] * weights[4 * j + i]
    squares, dot = sum_two(sm, squares, dot, 0)
    return rms_scale(squares, f["width"], float_of(f, "eps")) * dot


@cute.jit
def _store(
    sm: Sm, f: Fields, r: Int32, count: Int32, quads: cutlass.Constexpr, s: cute.Tensor, norms: cute.Tensor,
    norm: Int64, scale: Float32,
):  # fmt: skip
    """The result to shared memory, and this SM's share to `h`."""
    x = x_row(sm, r - f["r0"], f)
    for j in cutlass.range_constexpr(quads):
        q = sm.thread + j * CONSUMERS
        if q < count:
            if norm != 0:
                w0, w1 = norms[2 * j], norms[2 * j + 1]
                s[4 * j] = s[4 * j] * scale * ptx.low_bf16(w0)
                s[4 * j + 1] = s[4 * j + 1] * scale * ptx.high_bf16(w0)
                s[4 * j + 2] = s[4 * j + 2] * scale * ptx.low_bf16(w1)
                s[4 * j + 3] = s[4 * j + 3] * scale * ptx.high_bf16(w1)
            first, second = ptx.pack_bf16(s[4 * j], s[4 * j + 1]), ptx.pack_bf16(s[4 * j + 2], s[4 * j + 3])
            st_quad(x + q * 8, first, second)
            if (f["h"] >= 0) & (q % sm.shape.sms == sm.block):
                ptx.st_word_pair(word_address(sm, f["h"] + r * f["h_pitch"] + 2 * q), first, second, sm.tag)
