"""Rows against the recorded calls: each call is carried out once, completely, and with its own arguments."""

from collections import defaultdict

from cute_megakernel.call_checker import CallChecker
from cute_megakernel.rows import Row
from cute_megakernel.schedule import Schedule
from cute_megakernel.schedule_error import ScheduleError, expect, label


def check_calls(schedule: Schedule) -> None:
    """Every recorded call, from the rows that serve it: all batch rows or items once, complete at the last row."""
    checker = CallChecker(schedule.recording)
    pieces: dict[int, list[int]] = defaultdict(list)
    for number, row in enumerate(schedule.rows):
        try:
            carried = getattr(checker, row.code.name.lower())(row)
        except (KeyError, AttributeError, IndexError, StopIteration) as error:
            raise ScheduleError(f"{label(number, row)}: lacks an argument: {error!r}") from error
        wrong = [name for name, fine in carried.checks.items() if not fine]
        expect(not wrong, label(number, row), f"is not the recorded call: {', '.join(wrong)}")
        for index in carried.calls:
            pieces[index].append(number)
        expect(
            set(row.calls) <= set(carried.calls),
            label(number, row),
            f"completes calls {row.calls}, does {carried.calls}",
        )
    completing: dict[int, list[int]] = defaultdict(list)
    for number, row in enumerate(schedule.rows):
        for index in row.calls:
            completing[index].append(number)
    for call in schedule.recording.calls:
        where, numbers = f"call {call.index} ({call.op})", pieces[call.index]
        expect(bool(numbers), where, "no row does it")
        done = completing[call.index]
        expect(done == [numbers[-1]], where, f"is completed by rows {done}, its last row is {numbers[-1]}")
        _check_pieces(schedule, where, [schedule.rows[n] for n in numbers])


def _check_pieces(schedule: Schedule, where: str, rows: list[Row]) -> None:
    """The batch rows, or the (batch row, head) items, of the rows that share a call."""
    total = schedule.recording.rows
    if rows[0].first is not None:
        total *= schedule.shape.kda_heads
        ranges = sorted((row.first, row.first + row.units) for row in rows if row.first is not None)
        expect(
            all(row.rows == (0, schedule.recording.rows) for row in rows),
            where,
            "an item row serves only some batch rows",
        )
    else:
        ranges = sorted(row.rows for row in rows)
    at = 0
    for first, end in ranges:
        expect(first == at, where, f"part {min(first, at)} is {'lost' if first > at else 'done twice'}")
        at = end
    expect(at == total, where, f"parts end at {at} of {total}")
