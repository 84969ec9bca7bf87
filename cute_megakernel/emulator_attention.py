"""Rows of attention on one virtual SM: heads of KDA, and MLA in parts."""

import numpy as np
import torch

from cute_megakernel.emulator_memory import BF16, EmulationError, Launch, Sm
from cute_megakernel.footprint import (
    Part,
    batch_rows,
    cached_tokens,
    combined_heads,
    conv_channels,
    decode_units,
    gate_start,
    grid,
    item_of,
    latent_words,
    many,
    reduce_tasks,
    split,
    split_writes,
    writes,
)
from cute_megakernel.rows import Code, Row
from cute_megakernel.schedule_error import label
from cute_megakernel.table_view import Fields

Tensor = torch.Tensor


def _kda_head(launch: Launch, sm: Sm, number: int, row: Row, f: Fields, part: Part) -> None:
    shape, ops = launch.shape, launch.ops
    r, head = item_of(shape, part.first)
    K, one = shape.kda_head_dim, slice(head, head + 1)
    batch, at = launch.batch, r * f["src_pitch"]
    where = batch.slots[r : r + 1], batch.is_new[r : r + 1], batch.first_valid_slot

    def words(start: int) -> Tensor:
        return launch.load(at + start + np.arange(K // 2))[None]

    def projected(x: Tensor, name: str) -> Tensor:
        return ops.linear(x, launch.weight(f.subject(name))[head * K : head * K + K])

    channels = torch.from_numpy(conv_channels(shape, head))
    x = launch.load(at + f["src"] + channels.numpy()[::2] // 2)[None]
    pool = launch.pool(f, "window")
    window = pool[:, :, channels]
    z = ops.causal_conv1d(x, launch.weight(f.subject("weight"))[channels], window, *where)
    pool[:, :, channels] = window
    decay, gate = projected(words(f["f_a"]), "f_b"), words(gate_start(shape, f, head))
    if shape.low_rank_gate:
        gate = projected(gate, "g_b")
    beta = launch.load(np.array([at + f["beta"] + head // 2]))[head % 2].reshape(1, 1)
    inputs = decay[:, None], beta, *(launch.weight(f.subject(name))[one] for name in ("A_log", "weight2"))
    if row.args["bound"]:
        log_decay, beta = ops.kda_gate_bounded(*inputs, row.args["bound"])
    else:
        log_decay, beta = ops.kda_gate_softplus(*inputs)
    q, k, v = (of_head[:, None] for of_head in z.chunk(3, dim=-1))
    o = ops.kda_recurrent(q, k, v, log_decay, beta, launch.pool(f)[:, one], *where)
    y = ops.gated_rms_norm(o, gate[:, None], launch.weight(f.subject("norm")), row.args["eps"])
    launch.store(label(number, row), writes(shape, f, row.code, part), y)


# MLA


def _mla_kv_append(launch: Launch, sm: Sm, number: int, row: Row, f: Fields, part: Part) -> None:
    width, batch = launch.shape.kv_lora_rank + launch.shape.qk_rope_dim, launch.batch
    for r in range(part.first, part.end):
        ckv = launch.rows(f["ckv"], range(r, r + 1), f["ckv_pitch"], width)
        where = launch.pool(f), batch.page_table[r : r + 1], batch.seq_lens[r : r + 1]
        launch.ops.mla_kv_append(ckv, launch.weight(f.subject("norm")), row.args["eps"], *where)


def _newest(launch: Launch, f: Fields, row: Row, r: int) -> Tensor:
    """The row of the cache that is made in this launch."""
    width, one = launch.shape.kv_lora_rank + launch.shape.qk_rope_dim, torch.ones(1, dtype=torch.int32)
    ckv, cache = launch.rows(f["ckv"], range(r, r + 1), f["ckv_pitch"], width), torch.empty(1, 1, width, dtype=BF16)
    launch.ops.mla_kv_append(ckv, launch.weight(f.subject("norm")), row.args["eps"], cache, 0 * one[None], one)
    return cache[0]


def _mla_decode(launch: Launch, sm: Sm, number: int, row: Row, f: Fields, part: Part) -> None:
    """Parts of the softmax in float64; what the words hold of them is rounded."""
    shape, batch, cache = launch.shape, launch.batch, launch.pool(f)
    sm.x.clear()
    L, P, nope = shape.kv_lora_rank, shape.qk_rope_dim, shape.qk_nope_dim
    for which, r, heads in decode_units(shape, f, part):
        length = int(batch.seq_lens[r])
        tokens, parts = split(shape, length)
        positions = torch.arange(which * tokens, which * tokens + cached_tokens(shape, length, which))
        pages = batch.page_table[r, positions // cache.shape[1]].long()
        keys = cache[pages, positions % cache.shape[1]].double()
        if which == parts - 1:
            keys = torch.cat([keys, _newest(launch, f, row, r).double()])
        latent = launch.load(grid(f["src"] + r * f["src_pitch"], heads, L // 2, range(L // 2))).reshape(-1, L)
        rope_at = f["rope"] + r * f["rope_pitch"] + nope // 2
        rope = launch.load(grid(rope_at, heads, (nope + P) // 2, range(P // 2))).reshape(-1, P)
        scores = torch.cat([latent, rope], dim=1).double() @ keys.T * row.args["scale"]
        top = scores.amax(1)
        p = torch.exp(scores - top[:, None])
        for i, head in enumerate(heads):
            launch.parts[r, head, which] = f["sub"], top[i], p[i].sum(), p[i] @ keys[:, :L]
    words = split_writes(shape, f, part)
    launch.store(label(number, row), words, torch.zeros(len(words), dtype=torch.int32), f["sub"])


def _put_together(launch: Launch, sm: Sm, number: int, row: Row, f: Fields, r: int, head: int, count: int) -> Tensor:
    """One head from its parts."""
    parts = [launch.parts[r, head, which] for which in range(count)]
    if any(sub != f["sub"] for sub, *_ in parts):
        raise EmulationError(f"{label(number, row)}: SM {sm.block} finds parts of another layer")
    if not parts:
        return torch.zeros(launch.shape.kv_lora_rank, dtype=BF16)
    top = torch.stack([top for _, top, _, _ in parts])
    weight = torch.exp(top - top.max())
    total = (weight * torch.stack([total for _, _, total, _ in parts])).sum()
    sums = (weight[:, None] * torch.stack([sums for _, _, _, sums in parts])).sum(0)
    return (sums / total).to(BF16)


def _mla_reduce(launch: Launch, sm: Sm, number: int, row: Row, f: Fields, part: Part) -> None:
    for r, head, columns in reduce_tasks(launch.shape, f, part):
        o = _put_together(launch, sm, number, row, f, r, head, part.parts[r])
        words = latent_words(launch.shape, f, r, head, columns)
        launch.store(label(number, row), words, o[columns.start : columns.stop])


def _mla_combine(launch: Launch, sm: Sm, number: int, row: Row, f: Fields, part: Part) -> None:
    rows, heads, ready = batch_rows(f), combined_heads(launch.shape, f, part), many(f, part)
    o = torch.zeros(len(rows), len(heads), launch.shape.kv_lora_rank, dtype=BF16)
    for r in rows:
        for head in heads:
            if r in ready:
                made = launch.load(latent_words(launch.shape, f, r, head, range(launch.shape.kv_lora_rank)))
            else:
                made = _put_together(launch, sm, number, row, f, r, head, part.parts[r])
            o[r - rows.start, head - heads.start] = made
    sm.x = {0: ((row.x, row.rows), o)}


HANDLERS = {
    Code.KDA_HEAD: _kda_head,
    Code.MLA_KV_APPEND: _mla_kv_append,
    Code.MLA_DECODE: _mla_decode,
    Code.MLA_REDUCE: _mla_reduce,
    Code.MLA_COMBINE: _mla_combine,
}
