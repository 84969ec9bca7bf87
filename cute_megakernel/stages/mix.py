"""x <- activations, in every SM: the input of the projections that follow, kept in shared memory as bfloat16.

    s = embed[token], or the words of `src`                        embedding, or a plain load
    s = softmax mixture of bank rows and s                         attn_res_norm
    s = s / sqrt(mean(s^2) + eps) * norm                           rms_norm, attn_res_norm

What a row lacks is skipped. Every SM computes all columns; what other SMs read of it (an embedding `dst`, a result `h`)
each stores its share of. The bank's part of the mixture needs nothing that is still being computed, so it is summed up
before the wait for `src`; its scores come from BANK_SCORES.

Rounding   float32, the result to bfloat16 once
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
    poll_columns,
    poll_quads,
    poll_word,
    region,
    rms_scale,
    sum_two,
    warp_max,
    warp_sum,
    word_address,
    word_at,
)
from cute_megakernel.shape import CONSUMERS, MAX_BANK, mix_quads
from cute_megakernel.table import FIELD

LOAD_QUADS = 4  # loads on their way to a thread


@cute.jit
def mix(sm: Sm, f: Fields):
    quads = mix_quads(sm.shape.hidden_size)
    for r in range(f["r0"], f["r1"]):
        if f["kind"] != 0:
            _mix_row(sm, f, r, quads)
        else:
            _load_row(sm, f, r)
        _zero_pads(sm, f, r - f["r0"])


@cute.jit
def _load_row(sm: Sm, f: Fields, r: Int32):
    """Copies one activation row, in groups of `group` columns that start `group_pad` apart."""
    count, start = f["width"] >> 2, f["src"] + r * f["src_pitch"]
    group, pad = f["group"] >> 2, f["group_pad"] >> 2
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
    gap = (pad - group) >> 2
    total, q = Int32(0), sm.thread
    if gap > 0:
        total = (f["width"] // group) * gap
    while q < total:
        st_quad(x + ((q // gap) * pad + group) * 2 + (q % gap) * 8, Int32(0), Int32(0))
        q += CONSUMERS


def x_row(sm: Sm, row: Int32, f: Fields) -> Int32:
    return region(sm, "x") + f["x_at"] + row * f["x_pitch"]


def st_quad(address: Int32, first: Int32, second: Int32):
    ptx.st_shared_v2_b32(address, first, second)


@cute.jit
def _mix_row(sm: Sm, f: Fields, r: Int32, quads: cutlass.Constexpr):
    """Thread t of the first `span` has columns 4(t + j * span) ... for each j below `quads`; the others only add zeros.

    Weights are on their way first; then come the bank, row by row, and the prefix, whose quads are asked for together.
    """
    span, n_bank, norm = f["span"], f["n_bank"], address_of(f, "norm")
    mine = sm.thread < span
    s = cute.make_rmem_tensor(4 * quads, Float32)
    mixed = cute.make_rmem_tensor(4 * quads, Float32)
    score_weights = cute.make_rmem_tensor(4 * quads, Float32)
    norms = cute.make_rmem_tensor(2 * quads, Int32)
    for j in cutlass.range_constexpr(2 * quads):
        norms[j] = Int32(0)
    for j in cutlass.range_constexpr(4 * quads):
        s[j], mixed[j], score_weights[j] = Float32(0.0), Float32(0.0), Float32(0.0)
    if mine:
        _load_weights(sm, f, span, quads, norm, norms, score_weights)
    top, weight = _sum_bank(sm, f, r, span, quads, mine, mixed)
    if mine:
        _prefix(sm, f, r, span, quads, s)
    if n_bank > 0:
        squares, dot = Float32(0.0), Float32(0.0)
        for j in cutlass.range_constexpr(4 * quads):
            squares, dot = squares + s[j] * s[j], dot + s[j] * score_weights[j]
        squares, dot = sum_two(sm, squares, dot, 0)
        score = rms_scale(squares, f["width"], float_of(f, "eps")) * dot
        new_top = ptx.fmax(top, score)
        old, new = exp(top - new_top), exp(score - new_top)
        total = ptx.div_full(Float32(1.0), weight * old + new)
        old, new = old * total, new * total
        for j in cutlass.range_constexpr(4 * quads):
            s[j] = mixed[j] * old + s[j] * new
    scale = Float32(1.0)
    if norm != 0:
        squares = Float32(0.0)
        for j in cutlass.range_constexpr(4 * quads):
            squares = squares + s[j] * s[j]
        squares, _ = sum_two(sm, squares, Float32(0.0), 1)
        scale = rms_scale(squares, f["width"], float_of(f, "eps"))
        for j in cutlass.range_constexpr(2 * quads):
            s[2 * j] = s[2 * j] * scale * ptx.low_bf16(norms[j])
            s[2 * j + 1] = s[2 * j + 1] * scale * ptx.high_bf16(norms[j])
    if mine:
        _store(sm, f, r, span, quads, s)


@cute.jit
def _load_weights(
    sm: Sm, f: Fields, span: Int32, quads: cutlass.Constexpr, norm: Int64, norms: cute.Tensor, scores: cute.Tensor
):
    """Norm weights as pairs and, where there is a bank, score weights, of this thread's columns."""
    if norm != 0:
        for j in cutlass.range_constexpr(quads):
            at = Int64(sm.thread + j * span) * 8
            norms[2 * j], norms[2 * j + 1] = ptx.ld_global_v2_b32(norm + at)
    if f["n_bank"] > 0:
        weights = address_of(f, "weight2")
        for j in cutlass.range_constexpr(quads):
            w = ptx.ld_global_v4_f32(weights + Int64(sm.thread + j * span) * 16)
            for i in cutlass.range_constexpr(4):
                scores[4 * j + i] = w[i]


@cute.jit
def _sum_bank(sm: Sm, f: Fields, r: Int32, span: Int32, quads: cutlass.Constexpr, mine, mixed: cute.Tensor):
    """Sum of exp(score - top) * row over the bank rows into `mixed`. -> top, sum of exp(score - top)"""
    n_bank = f["n_bank"]
    top, weight = Float32(-1.0e30), Float32(0.0)
    if n_bank > 0:
        held = sm.lane < n_bank
        index = f["scores"] + r * MAX_BANK + ptx.select(held, sm.lane, Int32(0))
        mine_of = ptx.bits_float(poll_word(sm, f.number, index, sm.tag))  # the score of bank row `lane`
        top = warp_max(ptx.select_f32(held, mine_of, top))
        share = ptx.select_f32(held, exp(mine_of - top), Float32(0.0))
        weight = warp_sum(share)
        for b in range(n_bank):
            e = ptx.shfl(share, b)
            if mine:
                pairs = cute.make_rmem_tensor(2 * quads, Int32)
                bank = word_at(f, FIELD["bank0"] + b) + r * f["dst_pitch"]
                poll_columns(sm, f.number, bank, span, quads, pairs)
                for j in cutlass.range_constexpr(2 * quads):
                    mixed[2 * j] = mixed[2 * j] + e * ptx.low_bf16(pairs[j])
                    mixed[2 * j + 1] = mixed[2 * j + 1] + e * ptx.high_bf16(pairs[j])
    return top, weight


@cute.jit
def _prefix(sm: Sm, f: Fields, r: Int32, span: Int32, quads: cutlass.Constexpr, s: cute.Tensor):
    """The prefix; an embedding, which nobody has stored yet, is stored to `dst`, each SM its share."""
    pairs = cute.make_rmem_tensor(2 * quads, Int32)
    if f["src"] >= 0:
        poll_columns(sm, f.number, f["src"] + r * f["src_pitch"], span, quads, pairs)
    else:
        _embed(sm, f, r, span, quads, pairs)
        for j in cutlass.range_constexpr(quads):
            q = sm.thread + j * span
            if q % sm.shape.sms == sm.block:
                at = f["dst"] + r * f["dst_pitch"] + 2 * q
                ptx.st_word_pair(word_address(sm, at), pairs[2 * j], pairs[2 * j + 1], sm.tag)
    for j in cutlass.range_constexpr(2 * quads):
        s[2 * j], s[2 * j + 1] = ptx.low_bf16(pairs[j]), ptx.high_bf16(pairs[j])


@cute.jit
def _embed(sm: Sm, f: Fields, r: Int32, span: Int32, quads: cutlass.Constexpr, pairs: cute.Tensor):
    """Row `tokens[r]` of the embedding; a token outside the table gives zeros."""
    for j in cutlass.range_constexpr(2 * quads):
        pairs[j] = Int32(0)
    token = ptx.ld_global_b64(sm.batch["tokens"] + Int64(r) * 8)
    if (token >= 0) & (token < Int64(f["pool_count"])):
        row = address_of(f, "weight") + token * Int64(f["width"]) * 2
        for j in cutlass.range_constexpr(quads):
            pairs[2 * j], pairs[2 * j + 1] = ptx.ld_global_v2_b32(row + Int64(sm.thread + j * span) * 8)


@cute.jit
def _store(sm: Sm, f: Fields, r: Int32, span: Int32, quads: cutlass.Constexpr, s: cute.Tensor):
    """The result to shared memory, and this SM's share to `h`."""
    x = x_row(sm, r - f["r0"], f)
    for j in cutlass.range_constexpr(quads):
        q = sm.thread + j * span
        first, second = ptx.pack_bf16(s[4 * j], s[4 * j + 1]), ptx.pack_bf16(s[4 * j + 2], s[4 * j + 3])
        st_quad(x + q * 8, first, second)
        if f["h"] >= 0:
            if q % sm.shape.sms == sm.block:
                ptx.st_word_pair(word_address(sm, f["h"] + r * f["h_pitch"] + 2 * q), first, second, sm.tag)
