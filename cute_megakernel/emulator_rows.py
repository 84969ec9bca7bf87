"""What a row does on one virtual SM: values from words and shared memory, through the reference ops, to words."""

import numpy as np
import torch
import torch.nn.functional as F

from cute_megakernel import emulator_attention
from cute_megakernel.emulator_memory import F32, EmulationError, Launch, Sm, take_x
from cute_megakernel.footprint import Part, batch_rows, grid, writes
from cute_megakernel.lowering import second_x
from cute_megakernel.ring import share
from cute_megakernel.rows import Code, Epilogue, Row
from cute_megakernel.schedule_error import label
from cute_megakernel.shape import MAX_BANK
from cute_megakernel.table_view import Fields

Tensor = torch.Tensor


def run_row(launch: Launch, sm: Sm, number: int, part: Part) -> None:
    row = launch.schedule.rows[number]
    if row.units > 0 and part.end > (row.first or 0) + row.units:
        raise EmulationError(f"{label(number, row)}: SM {sm.block} has unit {part.end - 1} of {row.units}")
    _HANDLERS[row.code](launch, sm, number, row, launch.view.rows[number], part)


def _mix(launch: Launch, sm: Sm, number: int, row: Row, f: Fields, part: Part) -> None:
    rows, width = batch_rows(f), f["width"]
    key = (row.x, row.rows)
    if not f["kind"]:
        x = launch.once((number,), lambda: launch.rows(f["src"], rows, f["src_pitch"], width))
        if row.x_side == 0 and len(rows) * f["x_pitch"] > second_x(launch.shape.rows, launch.shape.hidden_size):
            sm.x.clear()  # it reaches into the other area
        sm.x[row.x_side] = (key, x)
        return
    prefix, x = launch.once((number,), lambda: _mixture(launch, number, row, f, rows, width))
    sm.x = {**sm.x, 0: (key, x)}
    share_of = writes(launch.shape, f, row.code, part)
    columns = [2 * q for q in range(width // 2) if (q // 2) % launch.shape.sms == sm.block]
    pairs = torch.tensor([c + i for c in columns for i in range(2)], dtype=torch.long)
    values = [t[:, pairs] for name, t in (("dst", prefix), ("h", x)) if f[name] >= 0]
    if len(share_of):
        launch.store(label(number, row), share_of, torch.cat([v.flatten() for v in values]))


def _mixture(launch: Launch, number: int, row: Row, f: Fields, rows: range, width: int) -> tuple[Tensor, Tensor]:
    """The prefix, and what goes on from it."""
    ops, args, picked = launch.ops, row.args, slice(rows.start, rows.stop)
    if f["src"] >= 0:
        prefix = launch.rows(f["src"], rows, f["src_pitch"], width)
    else:
        prefix = ops.embedding(launch.tokens[picked], launch.weight(f.subject("weight")))
    if not f["norm"]:
        return prefix, prefix
    norm = launch.weight(f.subject("norm"))
    if not f["n_bank"]:
        return prefix, ops.rms_norm(prefix, norm, args["eps"])
    weight = launch.weight(f.subject("weight2"))
    bank = [launch.rows(f[f"bank{b}"], rows, f["dst_pitch"], width) for b in range(f["n_bank"])]
    for b, entry in enumerate(bank):
        got = launch.load(grid(f["scores"] + b, rows, MAX_BANK, range(1)), F32)
        if not torch.equal(got, _score(entry, weight, args["eps"])):
            raise EmulationError(f"{label(number, row)}: the score of bank row {b} is another one's")
    return prefix, ops.attn_res_norm(prefix, bank, weight, norm, args["eps"])


def _score(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return (torch.rsqrt(x.square().mean(-1) + eps) * (x * weight.double()).sum(-1)).float()


def _bank_scores(launch: Launch, sm: Sm, number: int, row: Row, f: Fields, part: Part) -> None:
    x = launch.rows(f["src"], batch_rows(f), f["src_pitch"], f["width"])
    scores = [_score(x, launch.weight(w), row.args["eps"]) for w in f.subject("weight")[part.first : part.end]]
    launch.store(label(number, row), writes(launch.shape, f, row.code, part), torch.stack(scores))


def _linear(launch: Launch, sm: Sm, number: int, row: Row, f: Fields, part: Part) -> None:
    x, kind, where = take_x(launch, sm, number, row), Epilogue(f["epilogue"]), label(number, row)
    if f["local"]:
        y = launch.ops.mla_expand_value(x, _heads(launch, f, part)).flatten(1)
        y = y[:, 8 * (part.first - part.first // f["batch_tiles"] * f["batch_tiles"]) :]
    else:
        y = launch.once((number,), lambda: _product(launch, f, kind, x))[:, 8 * part.first :]
    y = y[:, : 8 * (part.end - part.first)]
    words = writes(launch.shape, f, row.code, part)
    if kind == Epilogue.LOGITS:
        launch.store_logits(where, batch_rows(f), 8 * part.first, y)
        tokens, values = launch.ops.argmax(y, 8 * part.first)
        best = torch.stack([values.view(torch.int32), tokens.int()], dim=1)
        launch.store(where, words, best)
        return
    if kind in (Epilogue.SITU, Epilogue.SWIGLU):
        y = launch.once((number, "act"), lambda: _activated(launch, row, _product(launch, f, kind, x)))
        y = y[:, 4 * part.first : 4 * part.end]
    elif kind == Epilogue.OUTPUT_GATE:
        gate = launch.rows(f["gate"] + 4 * part.first, batch_rows(f), f["gate_pitch"], y.shape[1])
        y = launch.ops.output_gate(y, gate)
    copies = [_summed(launch, f, part, y, copy) for copy in range(f["copies"])] if kind == Epilogue.ACT else None
    launch.store(where, words, torch.stack(copies or [y] * f["copies"]))


def _summed(launch: Launch, f: Fields, part: Part, y: Tensor, copy: int) -> Tensor:
    """One copy of a projection's outputs with the sums behind it."""
    at = 4 * part.first + copy * f["copy_stride"]
    for name in ("add1", "add2"):
        if f[name] >= 0:
            other = launch.rows(f[name] + at, batch_rows(f), f["dst_pitch"], y.shape[1])
            y = launch.ops.residual_add(y, other)
    return y


def _heads(launch: Launch, f: Fields, part: Part) -> Tensor:
    """Weights of the heads that the tiles belong to."""
    first, last = part.first // f["batch_tiles"], (part.end - 1) // f["batch_tiles"]
    return launch.weight(f.subject("weight"))[first : last + 1]


def _product(launch: Launch, f: Fields, kind: Epilogue, x: Tensor) -> Tensor:
    """All outputs for the batch rows in x, with the zeros that whole tiles end in."""
    weight, ops = launch.weight(f.subject("weight")), launch.ops
    if f.kind("weight") == "absorb":
        heads, _, latent = weight.shape
        y = ops.mla_absorb_query(x.unflatten(-1, (heads, -1)), weight)[..., :latent].flatten(1)
    else:
        y = (ops.router_logits if kind == Epilogue.FLOAT else ops.linear)(x, weight)
    return F.pad(y, (0, 8 * f["total"] - y.shape[1]))


def _activated(launch: Launch, row: Row, gate_up: Tensor) -> Tensor:
    if row.args["epilogue"] == Epilogue.SITU:
        return launch.ops.situ(gate_up, row.args["p0"], row.args["p1"])
    return launch.ops.swiglu(gate_up)


# experts


def _moe_router(launch: Launch, sm: Sm, number: int, row: Row, f: Fields, part: Part) -> None:
    logits = launch.rows(f["src"], range(launch.shape.rows), f["src_pitch"], launch.shape.num_experts, F32)
    bias, args = launch.weight(f.subject("weight")), row.args
    ids, weights = launch.once((number,), lambda: launch.ops.moe_router(logits, bias, args["top_k"], args["scaling"]))
    sm.ids = f["sub"], ids, weights


def _picks(sm: Sm, number: int, row: Row, f: Fields) -> tuple[Tensor, Tensor]:
    """Picks and their weights of the batch rows."""
    if sm.ids is None or sm.ids[0] != f["sub"]:
        raise EmulationError(f"{label(number, row)}: SM {sm.block} has no list of experts from its router")
    rows = slice(f["r0"], f["r1"])
    return sm.ids[1][rows], sm.ids[2][rows]


def _moe_gate_up(launch: Launch, sm: Sm, number: int, row: Row, f: Fields, part: Part) -> None:
    x, (ids, _) = take_x(launch, sm, number, row), _picks(sm, number, row, f)
    assert sm.ids is not None
    distinct, half = sm.ids[1].unique().tolist(), f["n_valid"] // 2
    weights = [launch.weight(w) for w in f.subject("weight") if w is not None]
    op = launch.ops.moe_gate_up_mxfp4 if len(weights) == 2 else launch.ops.moe_gate_up
    m = launch.once(
        (number,), lambda: _activated(launch, row, op(x, ids, *weights).flatten(0, 1)).unflatten(0, ids.shape)
    )
    words, values = [], []
    for tile in range(*share(sm.block, launch.shape.sms, len(distinct) * f["total"])):
        place, local = divmod(tile, f["total"])
        for r, pick in (ids == distinct[place]).nonzero().tolist():
            start = f["dst"] + (r + f["r0"]) * f["dst_pitch"] + pick * (half // 2) + 2 * local
            words.append(np.arange(start, start + 2))
            values.append(m[r, pick, 4 * local : 4 * local + 4])
    if words:
        launch.store(label(number, row), np.concatenate(words), torch.cat(values))


def _moe_down(launch: Launch, sm: Sm, number: int, row: Row, f: Fields, part: Part) -> None:
    x, (ids, picked) = take_x(launch, sm, number, row), _picks(sm, number, row, f)
    weights = [launch.weight(w) for w in f.subject("weight") if w is not None]
    op = launch.ops.moe_down_mxfp4 if len(weights) == 2 else launch.ops.moe_down
    y = launch.once((number,), lambda: op(x.unflatten(-1, (ids.shape[1], -1)), ids, picked, *weights))
    y = F.pad(y, (0, 8 * f["total"] - y.shape[1]))[:, 8 * part.first : 8 * part.end]
    launch.store(label(number, row), writes(launch.shape, f, row.code, part), _summed(launch, f, part, y, 0))
    if f["local"]:  # the list of experts is given back
        sm.ids = None


def _argmax(launch: Launch, sm: Sm, number: int, row: Row, f: Fields, part: Part) -> None:
    rows = launch.shape.rows
    words = grid(f["part"], range(f["total"]), 2 * rows, range(2 * rows))
    best = launch.load(words, torch.int32).reshape(f["total"], rows, 2)
    values, tokens = best[..., 0].contiguous().view(F32), best[..., 1].long()
    largest = values == values.amax(0)
    token = torch.where(largest, tokens, torch.iinfo(torch.int64).max).amin(0)
    launch.next_tokens = token + f["vocab_start"]


_HANDLERS = {
    Code.MIX: _mix,
    Code.BANK_SCORES: _bank_scores,
    Code.LINEAR: _linear,
    Code.MOE_ROUTER: _moe_router,
    Code.MOE_GATE_UP: _moe_gate_up,
    Code.MOE_DOWN: _moe_down,
    Code.ARGMAX: _argmax,
    **emulator_attention.HANDLERS,
}
