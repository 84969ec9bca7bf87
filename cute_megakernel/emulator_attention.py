"""Rows of attention on one virtual SM: heads of KDA, and MLA in parts."""

import numpy as np
import torch

from cute_megakernel.emulator_memory import BF16, EmulationError, Launch, Sm
from cute_megakernel.footprint import (
    Part,
    batch_rows,
    combined_heads,
    conv_channels,
    decode_units,
    grid,
    item_of,
    split,
    split_writes,
    writes,
)
from cute_megakernel.rows import Code, Row
from cute_megakernel.schedule_error import label
from cute_megakernel.table_view import Fields

Tensor = torch.Tensor


def _take(launch: Launch, sm: Sm, number: int, row: Row, part: Part, *names: str) -> list[Tensor]:
    """What the rows before left of this item."""
    item = (row.place, *item_of(launch.shape, part.first))
    for name in names:
        if name not in sm.items or sm.items[name][0] != item:
            raise EmulationError(f"{label(number, row)}: SM {sm.block} does not hold {name} of item {item[1:]}")
    return [sm.items.pop(name)[1] for name in names]


def _where(launch: Launch, r: int) -> tuple[Tensor, Tensor, int]:
    batch = launch.batch
    return batch.slots[r : r + 1], batch.is_new[r : r + 1], batch.first_valid_slot


def _causal_conv1d(launch: Launch, sm: Sm, number: int, row: Row, f: Fields, part: Part) -> None:
    r, head = item_of(launch.shape, part.first)
    channels = torch.from_numpy(conv_channels(launch.shape, head))
    x = launch.load(f["src"] + r * f["src_pitch"] + channels.numpy()[::2] // 2)[None]
    pool = launch.pool(f)
    window = pool[:, :, channels]
    z = launch.ops.causal_conv1d(x, launch.weight(f.subject("weight"))[channels], window, *_where(launch, r))
    pool[:, :, channels] = window
    beta = launch.load(np.array([f["beta"] + r * f["beta_pitch"] + head // 2]))[head % 2]
    a_log, dt_bias = (launch.weight(f.subject(name))[head : head + 1] for name in ("A_log", "weight2"))
    left = dict(zip("qkv", (part_of[:, None] for part_of in z.chunk(3, dim=-1)), strict=True))
    left |= {
        "raw_beta": beta.reshape(1, 1),
        "A_log": a_log,
        "dt_bias": dt_bias,
        "norm": launch.weight(f.subject("norm")),
    }
    if f["gate"] >= 0:
        K = launch.shape.kda_head_dim
        left["gate"] = launch.rows(f["gate"] + head * K // 2, range(r, r + 1), f["gate_pitch"], K)
    for name, value in left.items():
        sm.items[name] = ((row.place, r, head), value)


def _kda_gate(launch: Launch, sm: Sm, number: int, row: Row, f: Fields, part: Part) -> None:
    r, head = item_of(launch.shape, part.first)
    decay, beta, a_log, dt = _take(launch, sm, number, row, part, "decay", "raw_beta", "A_log", "dt_bias")
    if row.args["bound"]:
        log_decay, beta = launch.ops.kda_gate_bounded(decay[:, None], beta, a_log, dt, row.args["bound"])
    else:
        log_decay, beta = launch.ops.kda_gate_softplus(decay[:, None], beta, a_log, dt)
    for name, value in (("log_decay", log_decay), ("beta", beta)):
        sm.items[name] = ((row.place, r, head), value)


def _kda_recurrent(launch: Launch, sm: Sm, number: int, row: Row, f: Fields, part: Part) -> None:
    r, head = item_of(launch.shape, part.first)
    inputs = _take(launch, sm, number, row, part, "q", "k", "v", "log_decay", "beta")
    o = launch.ops.kda_recurrent(*inputs, launch.pool(f)[:, head : head + 1], *_where(launch, r))
    sm.items["o"] = ((row.place, r, head), o)


def _gated_rms_norm(launch: Launch, sm: Sm, number: int, row: Row, f: Fields, part: Part) -> None:
    o, gate, norm = _take(launch, sm, number, row, part, "o", "gate", "norm")
    y = launch.ops.gated_rms_norm(o, gate[:, None], norm, row.args["eps"])
    launch.store(label(number, row), writes(launch.shape, f, row.code, part), y)


# MLA


def _mla_kv_append(launch: Launch, sm: Sm, number: int, row: Row, f: Fields, part: Part) -> None:
    width, batch = launch.shape.kv_lora_rank + launch.shape.qk_rope_dim, launch.batch
    for r in range(part.first, part.end):
        ckv = launch.rows(f["src"], range(r, r + 1), f["src_pitch"], width)
        where = launch.pool(f), batch.page_table[r : r + 1], batch.seq_lens[r : r + 1]
        launch.ops.mla_kv_append(ckv, launch.weight(f.subject("weight")), row.args["eps"], *where)
    words = writes(launch.shape, f, row.code, part)
    launch.store(label(number, row), words, torch.zeros(len(words), dtype=torch.int32))


def _mla_decode(launch: Launch, sm: Sm, number: int, row: Row, f: Fields, part: Part) -> None:
    """Parts of the softmax in float64; what the words hold of them is rounded."""
    shape, batch, cache = launch.shape, launch.batch, launch.pool(f)
    sm.x.clear()
    L, P, nope = shape.kv_lora_rank, shape.qk_rope_dim, shape.qk_nope_dim
    for which, r, heads in decode_units(shape, f, part):
        length = int(batch.seq_lens[r])
        tokens = split(length)[0]
        positions = torch.arange(which * tokens, min(length, (which + 1) * tokens))
        pages = batch.page_table[r, positions // cache.shape[1]].long()
        keys = cache[pages, positions % cache.shape[1]].double()
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


def _mla_combine(launch: Launch, sm: Sm, number: int, row: Row, f: Fields, part: Part) -> None:
    rows, heads = batch_rows(f), combined_heads(f, part)
    o = torch.zeros(len(rows), len(heads), launch.shape.kv_lora_rank, dtype=torch.float64)
    for r in rows:
        for head in heads:
            parts = [launch.parts[r, head, which] for which in range(part.parts[r])]
            if any(sub != f["sub"] for sub, *_ in parts):
                raise EmulationError(f"{label(number, row)}: SM {sm.block} finds parts of another layer")
            if parts:
                top = torch.stack([top for _, top, _, _ in parts])
                weight = torch.exp(top - top.max())
                total = (weight * torch.stack([total for _, _, total, _ in parts])).sum()
                sums = (weight[:, None] * torch.stack([sums for _, _, _, sums in parts])).sum(0)
                o[r - rows.start, head - heads.start] = sums / total
    sm.x = {0: ((row.x, row.rows), o.to(BF16))}


HANDLERS = {
    Code.CAUSAL_CONV1D: _causal_conv1d,
    Code.KDA_GATE: _kda_gate,
    Code.KDA_RECURRENT: _kda_recurrent,
    Code.GATED_RMS_NORM: _gated_rms_norm,
    Code.MLA_KV_APPEND: _mla_kv_append,
    Code.MLA_DECODE: _mla_decode,
    Code.MLA_COMBINE: _mla_combine,
}
