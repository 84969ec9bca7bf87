"""The ring of each SM: stream and consumers count the same slots, whatever the router picks, and never block."""

import random
from collections.abc import Iterator

from cute_megakernel.footprint import Part
from cute_megakernel.ring import Outcome, Step, consumed, streamed, walk
from cute_megakernel.rows import Code, Row
from cute_megakernel.schedule import Schedule
from cute_megakernel.schedule_error import expect, label
from cute_megakernel.shape import SLOT_BYTES
from cute_megakernel.table_view import Fields, TableView

EXPERT_ROWS = (Code.MOE_GATE_UP, Code.MOE_DOWN)


def router_outcomes(schedule: Schedule, count: int, seed: int) -> Iterator[Outcome]:
    """All rows pick the same experts; all pick different ones; random picks with random rows padded or new, of any
    length."""
    shape, rng = schedule.shape, random.Random(seed)
    rows, k, experts = shape.rows, shape.top_k, shape.num_experts
    yield Outcome((tuple(range(k)),) * rows, (True,) * rows, (1 << 20,) * rows)
    different = tuple(tuple((r * k + a) % experts for a in range(k)) for r in range(rows))
    yield Outcome(different, (False,) * rows, (0,) * rows)
    for _ in range(count):
        picks = tuple(tuple(rng.sample(range(experts), k)) for _ in range(rows))
        lengths = tuple(rng.randrange(2 ** rng.randrange(1, 18)) for _ in range(rows))
        yield Outcome(picks, tuple(rng.random() < 0.5 for _ in range(rows)), lengths)


def check_ring(schedule: Schedule, view: TableView, outcomes: list[Outcome]) -> None:
    codes = (Code.LINEAR, Code.KDA_HEAD, Code.MLA_DECODE, Code.MOE_ROUTER, *EXPERT_ROWS)
    numbers = [number for number, row in enumerate(schedule.rows) if row.code in codes]
    known: dict[tuple, int] = {}
    for outcome in outcomes:
        steps = [_steps(schedule, view, number, outcome, known) for number in numbers]
        for sm, own in enumerate(zip(*steps, strict=True)):
            stuck = walk([step for step in own if step is not None], schedule.shape.slots)
            expect(stuck is None, f"SM {sm}", str(stuck))


def _steps(schedule: Schedule, view: TableView, number: int, outcome: Outcome, known: dict) -> list[Step | None]:
    """The row on every SM; None where neither warp looks at it."""
    row, f, where = schedule.rows[number], view.rows[number], label(number, schedule.rows[number])
    if row.code == Code.MOE_ROUTER:
        return [Step(0, f["sub"], makes=True, name=where)] * schedule.shape.sms
    router = f["sub"] if row.code in EXPERT_ROWS else -1
    frees = row.code == Code.MOE_DOWN and f["local"] != 0
    sizes = f["kb"], f["total"], row.rows, row.code
    steps: dict[tuple, Step] = {}
    result: list[Step | None] = []
    for sm, (first, end) in enumerate(share[number] for share in schedule.work):
        if first == end:
            result.append(None)
            continue
        key = (end - first, *_decides(row.code, sm, first, outcome))
        if key not in steps:
            if (sizes, key) not in known:
                known[sizes, key] = _slots(schedule, row, f, Part(sm, first, end), outcome, where)
            steps[key] = Step(known[sizes, key], router, frees=frees, name=where)
        result.append(steps[key])
    return result


def _decides(code: Code, sm: int, first: int, outcome: Outcome) -> tuple:
    """What the number of slots depends on besides the number of units."""
    if code in (Code.MOE_GATE_UP, Code.MLA_DECODE):
        return sm, outcome
    return (first, outcome) if code == Code.KDA_HEAD else (outcome,) if code == Code.MOE_DOWN else ()


def _slots(schedule: Schedule, row: Row, f: Fields, part: Part, outcome: Outcome, where: str) -> int:
    sizes = streamed(schedule.shape, f, row.code, part, outcome)
    slots = consumed(schedule.shape, f, row.code, part, outcome)
    expect(len(sizes) == slots, where, f"SM {part.sm}: {len(sizes)} slots are streamed, {slots} consumed")
    fits = all(0 < size <= SLOT_BYTES and size % 16 == 0 for size in set(sizes))
    expect(fits, where, f"SM {part.sm}: a slot of {SLOT_BYTES} bytes is to hold {set(sizes)}")
    return slots
