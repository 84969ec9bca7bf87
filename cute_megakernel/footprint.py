"""Which activation words a row reads and writes: the address arithmetic of `stages/`, stated once more on the CPU.

    reads(shape, f, code, Part(sm, first, end))     word indices, without those whose tag has a `sub`
    writes(...)                                     the same for what it hands on

`Part` is one SM's part of a row; `sm` None stands for all SMs together and [first, end) is then the whole row. Parts of
mla_decode carry another tag; `split_reads` and `split_writes` give those.
"""

from dataclasses import dataclass

import numpy as np

from cute_megakernel.lowering import blocks
from cute_megakernel.rows import Code, Epilogue
from cute_megakernel.shape import (
    DIRECT_PARTS,
    GROUP_HEADS,
    MAX_BANK,
    PART,
    SHORT_PART,
    SLOT_TOKENS,
    SUM_COLUMNS,
    KernelShape,
)
from cute_megakernel.table_view import Fields

Words = np.ndarray
NOTHING = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Part:
    """Units [first, end) of a row on one SM, or on all (`sm` None); `parts` of mla_decode by batch row."""

    sm: int | None
    first: int
    end: int
    parts: tuple[int, ...] = ()


def grid(start: int, rows: range, pitch: int, columns: Words | range) -> Words:
    """start + row * pitch + column for all rows and columns."""
    if start < 0:
        return NOTHING
    return (start + np.asarray(rows)[:, None] * pitch + np.asarray(columns)[None, :]).ravel()


def join(pieces: list[Words]) -> Words:
    return np.concatenate(pieces).astype(np.int64) if pieces else NOTHING


def reads(shape: KernelShape, f: Fields, code: Code, part: Part) -> Words:
    """Words with the tag of the launch that the part waits for."""
    return _READS[code](shape, f, part) if code in _READS else NOTHING


def writes(shape: KernelShape, f: Fields, code: Code, part: Part) -> Words:
    """Words with the tag of the launch that the part hands on."""
    return _WRITES[code](shape, f, part) if code in _WRITES else NOTHING


def batch_rows(f: Fields) -> range:
    return range(f["r0"], f["r1"])


def item_of(shape: KernelShape, unit: int) -> tuple[int, int]:
    """Batch row and head."""
    return divmod(unit, shape.kda_heads)


def conv_channels(shape: KernelShape, head: int) -> Words:
    """Channels of q, k and v of one head."""
    K, H = shape.kda_head_dim, shape.kda_heads
    return np.concatenate([np.arange(K) + part * H * K + head * K for part in range(3)])


def mix_share(sms: int, sm: int | None, width: int) -> Words:
    """Words of a row that one SM stores: every `sms`-th group of four columns."""
    quads = np.arange(width // 4) if sm is None else np.arange(sm, width // 4, sms)
    return (2 * quads[:, None] + np.arange(2)[None, :]).ravel()


def _mix_reads(shape: KernelShape, f: Fields, part: Part) -> Words:
    columns = range(f["width"] // 2)
    pieces = [grid(f["src"], batch_rows(f), f["src_pitch"], columns)]
    if f["kind"]:
        pieces += [grid(f[f"bank{b}"], batch_rows(f), f["dst_pitch"], columns) for b in range(f["n_bank"])]
        pieces.append(grid(f["scores"], batch_rows(f), MAX_BANK, range(f["n_bank"])))
    return join(pieces)


def _mix_writes(shape: KernelShape, f: Fields, part: Part) -> Words:
    if not f["kind"]:
        return NOTHING
    share = mix_share(shape.sms, part.sm, f["width"])
    return join([grid(f[name], batch_rows(f), f[f"{name}_pitch"], share) for name in ("dst", "h")])


def _scores_reads(shape: KernelShape, f: Fields, part: Part) -> Words:
    return grid(f["src"], batch_rows(f), f["src_pitch"], range(f["width"] // 2))


def _scores_writes(shape: KernelShape, f: Fields, part: Part) -> Words:
    targets = f.subject("out")[part.first : part.end]
    return join([grid(target, batch_rows(f), MAX_BANK, range(1)) for target in targets])


def _linear_reads(shape: KernelShape, f: Fields, part: Part) -> Words:
    if f["epilogue"] == Epilogue.OUTPUT_GATE:
        return grid(f["gate"], batch_rows(f), f["gate_pitch"], range(4 * part.first, 4 * part.end))
    return _addends(f, part, f["copies"]) if f["epilogue"] == Epilogue.ACT else NOTHING


def _addends(f: Fields, part: Part, copies: int) -> Words:
    """The other operands of the sums behind a projection."""
    columns = range(4 * part.first, 4 * part.end)
    starts = [f[name] + copy * f["copy_stride"] for name in ("add1", "add2") if f[name] >= 0 for copy in range(copies)]
    return join([grid(start, batch_rows(f), f["dst_pitch"], columns) for start in starts])


def _linear_writes(shape: KernelShape, f: Fields, part: Part) -> Words:
    kind = Epilogue(f["epilogue"])
    if kind == Epilogue.LOGITS:
        return best_words(shape, f, part)
    per_tile = {Epilogue.FLOAT: 8, Epilogue.SITU: 2, Epilogue.SWIGLU: 2}.get(kind, 4)
    columns = range(per_tile * part.first, per_tile * part.end)
    copies = f["copies"] if kind not in (Epilogue.SITU, Epilogue.SWIGLU) else 1
    return join(
        [grid(f["dst"] + copy * f["copy_stride"], batch_rows(f), f["dst_pitch"], columns) for copy in range(copies)]
    )


def best_words(shape: KernelShape, f: Fields, part: Part) -> Words:
    """Where an SM leaves the best of its logits: by SM, or by tile where there are fewer tiles."""
    few = f["total"] < shape.sms
    if part.sm is None:
        places = range(min(f["total"], shape.sms))
    else:
        places = range(part.first, part.first + 1) if few else range(part.sm, part.sm + 1)
    return grid(f["part"], places, 2 * shape.rows, range(2 * shape.rows))


def _argmax_reads(shape: KernelShape, f: Fields, part: Part) -> Words:
    return grid(f["part"], range(f["total"]), 2 * shape.rows, range(2 * shape.rows))


def _router_reads(shape: KernelShape, f: Fields, part: Part) -> Words:
    return grid(f["src"], range(shape.rows), f["src_pitch"], range(shape.num_experts))


def _gate_up_writes(shape: KernelShape, f: Fields, part: Part) -> Words:
    """Of all SMs; what one SM writes, depends on the router."""
    return grid(f["dst"], batch_rows(f), f["dst_pitch"], range(shape.top_k * f["n_valid"] // 4))


def _down_writes(shape: KernelShape, f: Fields, part: Part) -> Words:
    return grid(f["dst"], batch_rows(f), f["dst_pitch"], range(4 * part.first, 4 * part.end))


def gate_start(shape: KernelShape, f: Fields, head: int) -> int:
    """First word of the head's output gate, or of g_a, which all heads share."""
    return f["gate"] + (0 if shape.low_rank_gate else head * (shape.kda_head_dim // 2))


def _head_reads(shape: KernelShape, f: Fields, part: Part) -> Words:
    """Of the output of in_proj: q, k, v, f_a, the gate or g_a, and the word that beta is in."""
    pieces, half = [], np.arange(shape.kda_head_dim // 2)
    for unit in range(part.first, part.end):
        r, head = item_of(shape, unit)
        words = [f["src"] + conv_channels(shape, head)[::2] // 2, f["f_a"] + half, gate_start(shape, f, head) + half]
        pieces += [r * f["src_pitch"] + at for at in (*words, np.array([f["beta"] + head // 2]))]
    return np.unique(join(pieces))


def _head_writes(shape: KernelShape, f: Fields, part: Part) -> Words:
    half = shape.kda_head_dim // 2
    units = np.arange(part.first, part.end)[:, None]
    start = f["dst"] + units // shape.kda_heads * f["dst_pitch"] + units % shape.kda_heads * half
    return (start + np.arange(half)[None, :]).ravel()


def _append_reads(shape: KernelShape, f: Fields, part: Part) -> Words:
    width = shape.kv_lora_rank + shape.qk_rope_dim
    return grid(f["ckv"], range(part.first, part.end), f["ckv_pitch"], range(width // 2))


# mla_decode: units (part of the sequence, batch row, group of heads), dealt out over the SMs


def split(shape: KernelShape, length: int) -> tuple[int, int]:
    """Tokens of a part, whole slots of them, and the number of parts."""
    tokens = max(SHORT_PART, min(PART, blocks(length, DIRECT_PARTS)), blocks(length, shape.splits))
    tokens = blocks(tokens, SLOT_TOKENS) * SLOT_TOKENS
    return tokens, blocks(length, tokens)


def decode_units(shape: KernelShape, f: Fields, part: Part) -> list[tuple[int, int, range]]:
    """(part of the sequence, batch row, heads) of one SM, or of all."""
    groups = shape.head_groups
    units = range(shape.splits * shape.rows * groups)
    found = []
    for unit in units if part.sm is None else units[part.sm :: shape.sms]:
        which, rest = divmod(unit, shape.rows * groups)
        r, first = rest // groups, rest % groups * GROUP_HEADS
        if not part.parts or which < part.parts[r]:
            found.append((which, r, range(first, min(first + GROUP_HEADS, shape.mla_heads))))
    return found


def cached_tokens(shape: KernelShape, length: int, which: int) -> int:
    """Tokens of a part but for the newest of the sequence, which is not in the pool yet."""
    tokens, parts = split(shape, length)
    return max(0, min(tokens, length - which * tokens)) - (which == parts - 1)


def _decode_reads(shape: KernelShape, f: Fields, part: Part) -> Words:
    """The queries, and the newest row for the last part of a sequence."""
    L, P, nope = shape.kv_lora_rank, shape.qk_rope_dim, shape.qk_nope_dim
    pieces = []
    for r in {r for which, r, _ in decode_units(shape, f, part) if not part.parts or which == part.parts[r] - 1}:
        pieces.append(grid(f["ckv"], range(r, r + 1), f["ckv_pitch"], range((L + P) // 2)))
    for r, heads in {(r, heads) for _, r, heads in decode_units(shape, f, part)}:
        pieces.append(grid(f["src"] + r * f["src_pitch"], heads, L // 2, range(L // 2)))
        rope = f["rope"] + r * f["rope_pitch"] + nope // 2
        pieces.append(grid(rope, heads, (nope + P) // 2, range(P // 2)))
    return join(pieces)


def _parts_of(shape: KernelShape, f: Fields, r: int, heads: range, parts: range) -> Words:
    """Words of the parts of one batch row."""
    L = shape.kv_lora_rank
    at = ((r * shape.mla_heads + np.asarray(heads))[:, None] * shape.splits + np.asarray(parts)[None, :]).ravel()
    ml = f["ml"] + (2 * at[:, None] + np.arange(2)).ravel()
    return np.concatenate([ml, f["part"] + (L * at[:, None] + np.arange(L)).ravel()])


def split_writes(shape: KernelShape, f: Fields, part: Part) -> Words:
    """What mla_decode leaves behind."""
    if part.sm is None and not part.parts:
        return join([_parts_of(shape, f, r, range(shape.mla_heads), range(shape.splits)) for r in batch_rows(f)])
    units = decode_units(shape, f, part)
    return join([_parts_of(shape, f, r, heads, range(which, which + 1)) for which, r, heads in units])


def combined_heads(shape: KernelShape, f: Fields, part: Part) -> range:
    """Heads whose tiles the SM has in the row behind mla_combine."""
    if part.sm is None:
        return range(shape.mla_heads)
    if part.first >= part.end:
        return range(0)
    return range(part.first // f["groups"], (part.end - 1) // f["groups"] + 1)


def split_reads(shape: KernelShape, f: Fields, code: Code, part: Part) -> Words:
    """Parts that mla_reduce or mla_combine wait for, their number known."""
    if code == Code.MLA_REDUCE:
        heads_of = {(r, head) for r, head, _ in reduce_tasks(shape, f, part)}
    else:
        heads_of = {(r, head) for r in few(f, part) for head in combined_heads(shape, f, part)}
    return join([_parts_of(shape, f, r, range(head, head + 1), range(part.parts[r])) for r, head in heads_of])


def few(f: Fields, part: Part) -> list[int]:
    """Batch rows of so few parts that mla_combine reads them itself."""
    return [r for r in batch_rows(f) if not part.parts or part.parts[r] <= DIRECT_PARTS]


def many(f: Fields, part: Part) -> list[int]:
    """Batch rows whose parts mla_reduce puts together; all may be, where lengths are not known."""
    return [r for r in batch_rows(f) if not part.parts or part.parts[r] > DIRECT_PARTS]


def reduce_tasks(shape: KernelShape, f: Fields, part: Part) -> list[tuple[int, int, range]]:
    """(batch row, head, columns) that one SM puts together, or all."""
    width, L, heads = shape.sum_slices * SUM_COLUMNS, shape.kv_lora_rank, shape.mla_heads
    per_head, wanted = blocks(L, width), many(f, part)
    tasks = range(shape.rows * heads * per_head)
    found = []
    for task in tasks if part.sm is None else tasks[part.sm :: shape.sms]:
        item, block = divmod(task, per_head)
        if item // heads in wanted:
            found.append((item // heads, item % heads, range(block * width, min(L, (block + 1) * width))))
    return found


def latent_words(shape: KernelShape, f: Fields, r: int, head: int, columns: range) -> Words:
    """Columns of a head of what mla_decode makes."""
    start = f["o"] + r * f["o_pitch"] + head * (shape.kv_lora_rank // 2)
    return start + np.arange(columns.start // 2, columns.stop // 2)


def _reduce_writes(shape: KernelShape, f: Fields, part: Part) -> Words:
    return join([latent_words(shape, f, *task) for task in reduce_tasks(shape, f, part)])


def _combine_reads(shape: KernelShape, f: Fields, part: Part) -> Words:
    columns = range(shape.kv_lora_rank)
    items = [(r, head) for r in many(f, part) for head in combined_heads(shape, f, part)]
    return join([latent_words(shape, f, r, head, columns) for r, head in items])


_READS = {
    Code.MIX: _mix_reads,
    Code.BANK_SCORES: _scores_reads,
    Code.LINEAR: _linear_reads,
    Code.MOE_ROUTER: _router_reads,
    Code.MOE_DOWN: lambda shape, f, part: _addends(f, part, 1),
    Code.KDA_HEAD: _head_reads,
    Code.MLA_KV_APPEND: _append_reads,
    Code.MLA_DECODE: _decode_reads,
    Code.MLA_COMBINE: _combine_reads,
    Code.ARGMAX: _argmax_reads,
}
_WRITES = {
    Code.MIX: _mix_writes,
    Code.BANK_SCORES: _scores_writes,
    Code.LINEAR: _linear_writes,
    Code.MOE_GATE_UP: _gate_up_writes,
    Code.MOE_DOWN: _down_writes,
    Code.KDA_HEAD: _head_writes,
    Code.MLA_REDUCE: _reduce_writes,
}
