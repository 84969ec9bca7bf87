"""The ring of weights, stated twice: slots that the streaming warp fills for a row, and slots that the consumers step
over. The two must agree for every outcome of the router and for every kind and length of batch row.

    streamed(shape, f, code, part, outcome)    bytes of each slot, as `stream*.py` copy them
    consumed(shape, f, code, part, outcome)    number of slots, as the stages count them
    walk(steps, slots)                         where stream and consumers of an SM would wait for each other for ever

A slot belongs to two warps, which take its two pieces; the state and tiles of a KDA head and the cached rows of
mla_decode are read by all warps, no more slots at a time than there are. A warp does its slots in their order and waits
for others only behind all its pieces of a group of tiles, so it gives a slot back before one is needed that the ring
could not hold beside it: one is enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cute_megakernel.footprint import Part, cached_tokens, decode_units, split
from cute_megakernel.rows import Code
from cute_megakernel.shape import SLOT_TOKENS, STATE_BYTES, KernelShape
from cute_megakernel.table_view import Fields

BF16_BLOCK = 512


@dataclass(frozen=True)
class Outcome:
    """What is known only when the launch runs: `picks[row]` of the router, which rows have state to stream, and their
    lengths."""

    picks: tuple[tuple[int, ...], ...]
    live: tuple[bool, ...]
    lengths: tuple[int, ...]

    @property
    def experts(self) -> list[int]:
        """Distinct experts in ascending order."""
        return sorted({expert for row in self.picks for expert in row})

    def served(self, rows: range) -> list[int]:
        """Experts that any of the batch rows picked."""
        return [expert for expert in self.experts if any(expert in self.picks[r] for r in rows)]


def share(sm: int, sms: int, tiles: int) -> tuple[int, int]:
    """First and end of an SM's tiles of the picked experts."""
    return sm * tiles // sms, (sm + 1) * tiles // sms


def streamed(shape: KernelShape, f: Fields, code: Code, part: Part, outcome: Outcome) -> list[int]:
    """Bytes of each slot that the streaming warp fills for the row."""
    block, tiles = shape.block_bytes, part.end - part.first
    if code == Code.LINEAR:
        return _pieces(tiles * f["kb"] * BF16_BLOCK, 2 * f["piece"] * f["tpp"] * BF16_BLOCK)
    if code == Code.KDA_HEAD:
        size, row = shape.kda_head_dim**2, part.first // shape.kda_heads
        state = _pieces(4 * size, STATE_BYTES) if outcome.live[row] else []
        return state + (2 if shape.low_rank_gate else 1) * _pieces(2 * size, STATE_BYTES)
    if code == Code.MLA_DECODE:
        own = Part(part.sm, 0, 1, tuple(split(shape, length)[1] for length in outcome.lengths))
        tokens = [cached_tokens(shape, outcome.lengths[r], which) for which, r, _ in decode_units(shape, f, own)]
        slot = SLOT_TOKENS * shape.latent_bytes
        return [size for count in tokens for size in _pieces(count * shape.latent_bytes, slot)]
    if code == Code.MOE_GATE_UP:
        assert part.sm is not None
        first, end = share(part.sm, shape.sms, len(outcome.experts) * f["total"])
        return _pieces((end - first) * f["ppt"] * f["piece"] * block, 2 * f["piece"] * block)
    if code == Code.MOE_DOWN and tiles > 0:
        of_expert = _pieces(tiles * f["kb"] * block, f["piece"] * f["tpp"] * block)
        pieces = of_expert * len(outcome.served(range(f["r0"], f["r1"])))
        return [sum(pieces[i : i + 2]) for i in range(0, len(pieces), 2)]
    return []


def _pieces(nbytes: int, per_slot: int) -> list[int]:
    return [min(per_slot, nbytes - done) for done in range(0, nbytes, per_slot)]


def consumed(shape: KernelShape, f: Fields, code: Code, part: Part, outcome: Outcome) -> int:
    """Slots that the consumers step over in the row."""
    if code == Code.KDA_HEAD:
        dim = shape.kda_head_dim
        slot_rows, slot_tiles = STATE_BYTES // (4 * dim), STATE_BYTES // (16 * dim)
        state = _ceil(dim, slot_rows) if outcome.live[part.first // shape.kda_heads] else 0
        return state + (1 + shape.low_rank_gate) * _ceil(dim // 8, slot_tiles)
    if code == Code.MLA_DECODE:
        return _decode_slots(shape, part, outcome)
    pieces = 0
    if code == Code.LINEAR:
        pieces = _ceil((part.end - part.first) * f["ppt"], f["tpp"])
    elif code == Code.MOE_GATE_UP:
        assert part.sm is not None
        first, end = share(part.sm, shape.sms, len(outcome.experts) * f["total"])
        pieces = (end - first) * f["ppt"]
    elif code == Code.MOE_DOWN and part.first < part.end:
        experts = len(outcome.served(range(f["r0"], f["r1"])))
        pieces = experts * _ceil((part.end - part.first) * f["ppt"], f["tpp"])
    return _ceil(pieces, 2)


def _decode_slots(shape: KernelShape, part: Part, outcome: Outcome) -> int:
    """Slots of this SM's units, turn by turn."""
    assert part.sm is not None
    slots, groups = 0, shape.head_groups
    for unit in range(part.sm, shape.splits * shape.rows * groups, shape.sms):
        length = outcome.lengths[unit // groups % shape.rows]
        tokens = split(shape, length)[0]
        start = unit // (shape.rows * groups) * tokens
        count = min(tokens, length - start)
        cached = count - (start + count == length)
        while count > 0:
            slots += min(shape.turn_slots, _ceil(max(0, cached), SLOT_TOKENS))
            count, cached = count - SLOT_TOKENS * shape.turn_slots, cached - SLOT_TOKENS * shape.turn_slots
    return slots


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Step:
    """One row as the ring sees it on one SM; `router` is the list of experts that it makes, needs or frees."""

    slots: int
    router: int = -1
    makes: bool = False
    frees: bool = False
    name: str = ""


def walk(steps: Sequence[Step], slots: int) -> str | None:
    """Runs the streaming warp against the consumers of one SM. -> what they are stuck at, None where they finish.

    In a row both move slot by slot and never wait for each other; what is left to check are the list of experts, which
    the streaming warp needs, and its release, which the next router needs.
    """
    streaming, ready, freed, ahead = 0, -1, -1, 0  # next row of the stream, lists made and freed, slots filled
    for number, step in enumerate(steps):
        while streaming < len(steps):
            row = steps[streaming]
            if not row.makes and row.router > ready:
                break
            # a row that is not the consumers' own must fit behind what they have not read yet
            if streaming > number and ahead + row.slots > slots:
                break
            ahead += row.slots
            freed = row.router if row.frees else freed
            streaming += 1
        if streaming <= number:
            return f"{step.name}: the stream waits for list {steps[streaming].router} of experts"
        if step.makes:
            if step.router > 0 and freed < step.router - 1:
                return f"{step.name}: list {step.router - 1} of experts is never given back"
            ready = step.router
        ahead -= step.slots
    return None
