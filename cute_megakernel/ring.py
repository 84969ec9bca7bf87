"""The ring of weights, stated twice: slots that the streaming warp fills for a row, and slots that the consumers step
over. The two must agree for every outcome of the router and for every kind of batch row.

    streamed(shape, f, code, part, outcome)    bytes of each slot, as `stream.py` copies them
    consumed(shape, f, code, part, outcome)    number of slots, as the stages count them
    walk(rows, sms, slots)                     raises where the two warps of an SM could wait for each other

Consumer warps work on blocks 16 apart at most, which is less than a slot: two slots are held at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cute_megakernel.footprint import Part
from cute_megakernel.rows import Code
from cute_megakernel.shape import CONSUMER_WARPS, SLOT_BYTES, KernelShape
from cute_megakernel.table_view import Fields

BF16_BLOCK = 512
HELD_AT_ONCE = 2


@dataclass(frozen=True)
class Outcome:
    """What is known only when the launch runs: `picks[row]` of the router, and which rows have state to stream."""

    picks: tuple[tuple[int, ...], ...]
    live: tuple[bool, ...]

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


def runs(first: int, end: int, total: int) -> list[tuple[int, int]]:
    """[first, end) cut where an expert's `total` tiles end."""
    cuts = [first, *range((first // total + 1) * total, end, total), end]
    return [(a, b) for a, b in zip(cuts, cuts[1:], strict=False) if a < b]


def streamed(shape: KernelShape, f: Fields, code: Code, part: Part, outcome: Outcome) -> list[int]:
    """Bytes of each slot that the streaming warp fills for the row."""
    block = shape.block_bytes
    per_slot = SLOT_BYTES // block * block
    if code == Code.LINEAR:
        return _pieces((part.end - part.first) * f["kb"] * BF16_BLOCK, SLOT_BYTES)
    if code == Code.KDA_RECURRENT:
        row = part.first // shape.kda_heads
        return _pieces(4 * shape.kda_head_dim**2, SLOT_BYTES) if outcome.live[row] else []
    if code == Code.MOE_GATE_UP:
        assert part.sm is not None
        first, end = share(part.sm, shape.sms, len(outcome.experts) * f["total"])
        return [n for a, b in runs(first, end, f["total"]) for n in _pieces((b - a) * f["kb"] * block, per_slot)]
    if code == Code.MOE_DOWN and part.first < part.end:
        piece = (part.end - part.first) * f["kb"] * block
        packed = per_slot // piece
        left = len(outcome.served(range(f["r0"], f["r1"])))
        if packed == 0:
            return _pieces(piece, per_slot) * left
        return [min(packed, left - done) * piece for done in range(0, left, packed)]
    return []


def _pieces(nbytes: int, per_slot: int) -> list[int]:
    return [min(per_slot, nbytes - done) for done in range(0, nbytes, per_slot)]


def consumed(shape: KernelShape, f: Fields, code: Code, part: Part, outcome: Outcome) -> int:
    """Slots that the consumers step over in the row."""
    per_slot = SLOT_BYTES // shape.block_bytes
    if code == Code.LINEAR:
        return _ceil((part.end - part.first) * f["kb"], SLOT_BYTES // BF16_BLOCK)
    if code == Code.KDA_RECURRENT:
        slot_rows = min(SLOT_BYTES // (4 * shape.kda_head_dim), shape.kda_head_dim)
        return shape.kda_head_dim // slot_rows if outcome.live[part.first // shape.kda_heads] else 0
    if code == Code.MOE_GATE_UP:
        assert part.sm is not None
        first, end = share(part.sm, shape.sms, len(outcome.experts) * f["total"])
        return sum(_ceil((b - a) * f["kb"], per_slot) for a, b in runs(first, end, f["total"]))
    if code == Code.MOE_DOWN and part.first < part.end:
        blocks, experts = (part.end - part.first) * f["kb"], len(outcome.served(range(f["r0"], f["r1"])))
        packed = per_slot // blocks
        return _ceil(experts, packed) if packed else experts * _ceil(blocks, per_slot)
    return 0


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

    In a row both move slot by slot and never wait for each other if the ring has `HELD_AT_ONCE` slots; what is left to
    check are the list of experts, which the streaming warp needs, and its release, which the next router needs.
    """
    if slots < HELD_AT_ONCE:
        return f"{slots} ring slots: the consumers hold {HELD_AT_ONCE}"
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


def drift_fits(shape: KernelShape) -> bool:
    """Warps at most 16 blocks apart are at most one slot apart."""
    return CONSUMER_WARPS * max(shape.block_bytes, BF16_BLOCK) <= SLOT_BYTES
