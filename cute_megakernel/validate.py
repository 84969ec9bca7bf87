"""Proof that a schedule computes the recorded step, whatever the order in which its SMs get on.

    validate(make_schedule(recording, config, sms))      ScheduleError, or nothing

Every SM walks the rows in one order, so a launch finishes if each word that a row waits for is written by an earlier
row and the ring of each SM moves. What is proved, in this order:

    units    every tile, item and replicated row is done exactly once
    places   every activation has room, no two share a word
    calls    rows carry out the recorded calls, each complete once, with its own arguments (`validate_calls.py`)
    fields   words say what their rows say (`validate_fields.py`)
    plan     shared memory, loops over threads, alignment and int32 fields as the kernel assumes them
    words    words are written once, and before the row that reads them; parts of mla_decode after their last reader
    local    what passes through shared memory is there, of the right batch rows and head (`validate_local.py`)
    ring     stream and consumers count the same slots for any router outcome and cannot wait for each other (`ring.py`)
    balance  SMs differ by one unit a row, and by one unit in the bytes of the launch
"""

import numpy as np

from cute_megakernel.footprint import Part, reads, split_writes, writes
from cute_megakernel.launch import TAGS_A_LAUNCH
from cute_megakernel.rows import Code, Row
from cute_megakernel.schedule import Schedule, words_of
from cute_megakernel.schedule_error import ScheduleError, expect, label
from cute_megakernel.shape import MAX_BANK
from cute_megakernel.table_view import TableView
from cute_megakernel.validate_calls import check_calls
from cute_megakernel.validate_fields import check_fields
from cute_megakernel.validate_local import check_local
from cute_megakernel.validate_plan import check_plan
from cute_megakernel.validate_ring import check_ring, router_outcomes

UNWRITTEN = -1


def validate(schedule: Schedule, outcomes: int = 2, seed: int = 0) -> None:
    """Raises ScheduleError naming the row. `outcomes` random choices of experts are tried on the ring, and the two
    extremes."""
    check_units(schedule)
    check_places(schedule)
    check_calls(schedule)
    try:
        view = TableView(schedule)
    except (ValueError, AssertionError, KeyError, StopIteration, TypeError, IndexError) as error:
        raise ScheduleError(f"the table cannot be encoded: {error!r}") from error
    check_fields(schedule, view)
    check_plan(schedule, view)
    check_words(schedule, view)
    check_local(schedule, view)
    check_ring(schedule, view, list(router_outcomes(schedule, outcomes, seed)))
    check_balance(schedule)


def whole(schedule: Schedule, number: int) -> Part:
    """All units of a row, over all SMs."""
    row = schedule.rows[number]
    first = row.first or 0
    return Part(None, first, first + max(0, row.units))


def workers(schedule: Schedule, number: int) -> set[int]:
    """SMs that do something in the row."""
    return {sm for sm, share in enumerate(schedule.work) if share[number][0] < share[number][1]}


# units


def check_units(schedule: Schedule) -> None:
    """Each unit of each row on exactly one SM; rows without units on all."""
    expect(len(schedule.work) == schedule.shape.sms, "work", f"{len(schedule.work)} SMs of {schedule.shape.sms}")
    for sm, shares in enumerate(schedule.work):
        expect(len(shares) == len(schedule.rows), f"SM {sm}", f"{len(shares)} shares for {len(schedule.rows)} rows")
    for number, row in enumerate(schedule.rows):
        where, ranges = label(number, row), [share[number] for share in schedule.work]
        if row.code == Code.MLA_COMBINE:
            same = number + 1 < len(schedule.rows) and ranges == [share[number + 1] for share in schedule.work]
            expect(same, where, "its heads are not those of the tiles behind it")
        elif row.units <= 0:
            expect(all(share == (0, 1) for share in ranges), where, "a row that every SM does is missing on some")
        elif row.first is not None:
            _check_items(row, where, ranges)
        else:
            _check_tiles(row, where, ranges)


def _check_tiles(row: Row, where: str, ranges: list[tuple[int, int]]) -> None:
    at = 0
    for first, end in sorted(share for share in ranges if share[0] < share[1]):
        expect(first == at, where, f"unit {min(first, at)} is {'lost' if first > at else 'done twice'}")
        at = end
    expect(at == row.units, where, f"units end at {at} of {row.units}")
    idle = [share for share in ranges if share[0] >= share[1]]
    visited = row.code == Code.MOE_DOWN  # an SM without tiles passes the list of experts on
    fine = all((share == (1, 0)) if visited else (share[0] == share[1]) for share in idle)
    expect(fine, where, "an SM without units is not marked as the kernel expects")


def _check_items(row: Row, where: str, ranges: list[tuple[int, int]]) -> None:
    busy = sorted(share for share in ranges if share[0] < share[1])
    first = row.first or 0
    want = [(item, item + 1) for item in range(first, first + row.units)]
    expect(busy == want, where, f"items are not {first} to {first + row.units - 1}, one an SM")
    expect(all(a == b for a, b in ranges if a >= b), where, "an SM without units is not marked as the kernel expects")


# places


def check_places(schedule: Schedule) -> None:
    shape, taken = schedule.shape, []
    for buffer in schedule.recording.buffers:
        expect(buffer.index in schedule.places, buffer.name, "has no place")
        place, need = schedule.places[buffer.index], words_of(buffer)
        exact = buffer.rows != shape.rows  # [R * picks, I] is read as [R, picks * I]
        fits = place.pitch == need == _words(buffer) if exact else place.pitch >= need
        expect(fits, buffer.name, f"a row of {need} words has {place.pitch}")
        taken.append((place.start, place.start + buffer.rows * place.pitch, place.pitch, buffer.name))
    heads = shape.rows * shape.mla_heads
    sizes = {
        "scores": (max(1, schedule.mixes) * shape.rows, MAX_BANK),
        "ml": (heads * shape.splits, 2),
        "part": (heads * shape.splits, shape.kv_lora_rank),
        "best": (shape.sms * shape.rows, 2),
    }
    for name, (rows, pitch) in sizes.items():
        place = schedule.extras[name]
        expect(place.pitch == pitch, name, f"pitch is {place.pitch}, not {pitch}")
        taken.append((place.start, place.start + rows * pitch, pitch, name))
    at, before = 0, "the start"
    for start, end, pitch, name in sorted(taken):
        expect(start >= at, name, f"overlaps {before}")
        expect(start % 2 == 0 and pitch % 2 == 0, name, "words are not in pairs")
        at, before = end, name
    expect(at <= schedule.words < 2**31, "workspace", f"places end at {at}, there are {schedule.words} words")


def _words(buffer) -> int:
    return buffer.width // 2 if buffer.dtype.itemsize == 2 else buffer.width


# words


def check_words(schedule: Schedule, view: TableView) -> None:
    """Words are written once, before they are read; `seen` are those that every SM has read."""
    shape = schedule.shape
    writer = np.full(schedule.words, UNWRITTEN, dtype=np.int32)
    seen = np.zeros(schedule.words, dtype=bool)
    decodes: list[int] = []
    combines: dict[int, list[int]] = {}
    for number, (row, f) in enumerate(zip(schedule.rows, view.rows, strict=True)):
        where, part = label(number, row), whole(schedule, number)
        words = reads(shape, f, row.code, part)
        _inside(where, words, schedule.words)
        missing = words[writer[words] == UNWRITTEN]
        expect(
            not len(missing),
            where,
            f"waits for {len(missing)} words that no earlier row writes{_owner(schedule, missing)}",
        )
        if row.code == Code.MIX and row.units == 0:
            seen[words] = True
        words = writes(shape, f, row.code, part)
        _inside(where, words, schedule.words)
        again = words[writer[words] != UNWRITTEN]
        unique = len(np.unique(words)) == len(words)
        expect(not len(again) and unique, where, f"writes words a second time{_owner(schedule, again)}")
        writer[words] = number
        if row.code == Code.MLA_DECODE:
            _check_parts(schedule, view, number, decodes, combines, seen)
            decodes.append(number)
        elif row.code in (Code.MLA_REDUCE, Code.MLA_COMBINE):
            subs = [view.rows[decode]["sub"] for decode in decodes]
            expect(bool(subs) and f["sub"] == subs[-1], where, "puts together parts of another mla_decode")
            combines.setdefault(decodes[-1], []).append(number)


def _inside(where: str, words: np.ndarray, count: int) -> None:
    expect(not len(words) or (words.min() >= 0 and words.max() < count), where, "reaches out of the workspace")


def _owner(schedule: Schedule, words: np.ndarray) -> str:
    """Name of the activation that the first of the words belongs to."""
    if not len(words):
        return ""
    starts = [(place.start, schedule.recording.buffers[index].name) for index, place in schedule.places.items()]
    starts += [(place.start, name) for name, place in schedule.extras.items()]
    return f", the first in {max((s for s in starts if s[0] <= words[0]), default=(0, 'nothing'))[1]}"


def _check_parts(schedule, view: TableView, number: int, decodes: list[int], combines: dict, seen: np.ndarray) -> None:
    """Parts get a tag of their own, and are overwritten only when every SM has put the ones before together."""
    where, f = label(number, schedule.rows[number]), view.rows[number]
    subs = [view.rows[decode]["sub"] for decode in decodes]
    expect(0 < f["sub"] < TAGS_A_LAUNCH and f["sub"] not in subs, where, f"tag {f['sub']} of its parts is not its own")
    _inside(where, split_writes(schedule.shape, f, whole(schedule, number)), schedule.words)
    for decode in decodes[-1:]:
        for combine in combines.get(decode, []):
            done = any(
                _read_by_all(schedule, view, other, seen) and workers(schedule, combine) <= workers(schedule, other)
                for other in range(combine + 1, number)
            )
            expect(done, where, f"may overwrite parts that row {combine} still reads")


def _read_by_all(schedule: Schedule, view: TableView, number: int, seen: np.ndarray) -> bool:
    """Whether every SM has waited for all that the row hands on, and so for all its SMs to have passed it."""
    words = writes(schedule.shape, view.rows[number], schedule.rows[number].code, whole(schedule, number))
    return bool(len(words)) and bool(seen[words].all())


# balance


def check_balance(schedule: Schedule) -> None:
    for number, row in enumerate(schedule.rows):
        if row.units > 0 and row.first is None:
            sizes = [max(0, share[number][1] - share[number][0]) for share in schedule.work]
            expect(max(sizes) - min(sizes) <= 1, label(number, row), f"{min(sizes)} to {max(sizes)} units on an SM")
    loads = [schedule.streamed_bytes(sm) for sm in range(schedule.shape.sms)]
    bound = max([row.unit_bytes for row in schedule.rows if row.units > 0], default=0)
    spread = max(loads) - min(loads)
    expect(spread <= bound, "balance", f"SMs stream {min(loads)} to {max(loads)} bytes, which may differ by {bound}")


__all__ = ["ScheduleError", "validate", "whole", "workers"]
