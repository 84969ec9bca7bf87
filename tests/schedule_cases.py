"""Schedules for the tests: a case is a small dataclass, a mutation is a way in which a schedule can go wrong."""

import contextlib
import dataclasses
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass

from cute_megakernel.lowering import expert_blocks, tiles
from cute_megakernel.recording import Recording, View, record_step
from cute_megakernel.rows import Code, Row
from cute_megakernel.schedule import Place, Schedule, make_schedule
from cute_megakernel.shape import CONSUMERS, PICKS, Pieces
from kimi_kernels.config import CONFIGS, TP_SIZES, ConfigError, KimiConfig


@dataclass(frozen=True)
class Case:
    """`layers` None: all of the model."""

    config: str
    rows: int
    tp: int
    sms: int
    layers: tuple[int, ...] | None = None

    def schedule(self) -> Schedule:
        config = CONFIGS[self.config]
        return make_schedule(recording(self.config, self.rows, self.tp, self.layers), config.shard(self.tp), self.sms)


@functools.lru_cache(maxsize=32)
def recording(config: str, rows: int, tp: int, layers: tuple[int, ...] | None) -> Recording:
    return record_step(CONFIGS[config], rows, tp, layers)


def ranks_of(config: KimiConfig) -> list[int]:
    """Tensor-parallel sizes that divide the model."""
    sizes = []
    for tp in TP_SIZES:
        with contextlib.suppress(ConfigError):
            config.shard(tp)
            sizes.append(tp)
    return sizes


def fewest_sms(config: KimiConfig, rows: int) -> int:
    """SMs that moe_down needs: the sums of an SM's tiles have to fit. `config` is a rank's."""
    kb = expert_blocks(config.expert_size // 2 if config.mxfp4_experts else config.expert_size, config.mxfp4_experts)[0]
    per_tile = Pieces.of(kb, config.mxfp4_experts).per_tile
    sums = max(64, 256 // rows)
    return -(-tiles(config.expert_in) // min(2 * sums // (PICKS * per_tile), CONSUMERS // (2 * rows)))


BASES = {
    "k3": Case("k3-mini", 2, 1, 6),
    "kimi-linear": Case("kimi-linear-mini", 3, 1, 4),
    "more SMs than tiles": Case("k3-mini", 1, 1, 44, (1, 3, 5)),
    "rows in turns": Case("k3", 8, 4, 132, (3, 4)),  # inputs that do not fit for all rows at once
}


class NotHere(Exception):
    """The schedule has nothing that this mutation could break."""


def pick(items: list, rng: random.Random):
    if not items:
        raise NotHere
    return rng.choice(items)


def numbered(schedule: Schedule, wanted: Callable[[Row], bool]) -> list[int]:
    return [number for number, row in enumerate(schedule.rows) if wanted(row)]


def is_load(row: Row) -> bool:
    return row.code == Code.MIX and "norm" not in row.args and "dst" not in row.args


def busy(schedule: Schedule, number: int) -> list[int]:
    return [sm for sm, share in enumerate(schedule.work) if share[number][0] < share[number][1]]


def _tiled(row: Row) -> bool:
    return row.units > 0 and row.first is None


def _change_share(schedule: Schedule, rng: random.Random, change: Callable) -> None:
    number = pick(numbered(schedule, _tiled), rng)
    sm = pick(busy(schedule, number), rng)
    schedule.work[sm][number] = change(*schedule.work[sm][number])


def lost_unit(schedule: Schedule, rng: random.Random) -> None:
    _change_share(schedule, rng, lambda first, end: (first, end - 1))


def unit_done_twice(schedule: Schedule, rng: random.Random) -> None:
    _change_share(schedule, rng, lambda first, end: (first, end + 1))


def shifted_units(schedule: Schedule, rng: random.Random) -> None:
    _change_share(schedule, rng, lambda first, end: (first + 1, end + 1))


def lost_item(schedule: Schedule, rng: random.Random) -> None:
    number = pick(numbered(schedule, lambda row: row.first is not None), rng)
    schedule.work[pick(busy(schedule, number), rng)][number] = (0, 0)


def item_done_twice(schedule: Schedule, rng: random.Random) -> None:
    """An SM has the item of another one."""
    number = pick(numbered(schedule, lambda row: row.first is not None and row.units > 1), rng)
    one, two = rng.sample(busy(schedule, number), 2)
    schedule.work[one][number] = schedule.work[two][number]


def lost_share_of_a_mix(schedule: Schedule, rng: random.Random) -> None:
    number = pick(numbered(schedule, lambda row: row.units == 0 and row.code != Code.MLA_COMBINE), rng)
    schedule.work[rng.randrange(schedule.shape.sms)][number] = (0, 0)


def lost_row(schedule: Schedule, rng: random.Random) -> None:
    number = rng.randrange(len(schedule.rows))
    for shares in [schedule.rows, *schedule.work]:
        del shares[number]


def repeated_row(schedule: Schedule, rng: random.Random) -> None:
    """A load may be done twice; nothing else."""
    number = pick(numbered(schedule, lambda row: not is_load(row)), rng)
    for shares in [schedule.rows, *schedule.work]:
        shares.insert(number, shares[number])


def swapped_rows(schedule: Schedule, rng: random.Random) -> None:
    pairs = [n for n in range(len(schedule.rows) - 1) if depends(schedule.rows[n + 1], schedule.rows[n])]
    number = pick(pairs, rng)
    for shares in [schedule.rows, *schedule.work]:
        shares[number], shares[number + 1] = shares[number + 1], shares[number]


def depends(later: Row, earlier: Row) -> bool:
    """Whether the row needs the one right before it: its words, its x or its list of experts."""
    written = {buffer.index for buffer in earlier.writes}
    reads = any(view.buffer.index in written for view in later.reads)
    takes_x = earlier.code in (Code.MIX, Code.MLA_COMBINE) and later.code not in (Code.MIX, Code.BANK_SCORES)
    takes_x = takes_x and later.x is not None and later.x == earlier.x
    scores = earlier.code == Code.BANK_SCORES and later.code == Code.MIX
    parts = (Code.MLA_DECODE, Code.MLA_REDUCE, Code.MLA_COMBINE)
    return reads or takes_x or scores or (earlier.code, later.code) in zip(parts, parts[1:], strict=False)


def row_before_its_input(schedule: Schedule, rng: random.Random) -> None:
    """A row moves to the place of one whose words it waits for."""
    rows = schedule.rows
    writers = {buffer.index: n for n, row in enumerate(rows) for buffer in row.writes}
    late = {n: [writers[v.buffer.index] for v in row.reads if v.buffer.index in writers] for n, row in enumerate(rows)}
    number = pick([n for n, before in late.items() if any(b < n for b in before)], rng)
    target = max(b for b in late[number] if b < number)
    for shares in [schedule.rows, *schedule.work]:
        shares.insert(target, shares.pop(number))


def short_place(schedule: Schedule, rng: random.Random) -> None:
    index = pick(list(schedule.places), rng)
    place = schedule.places[index]
    schedule.places[index] = Place(place.start, place.pitch - 2)


def overlapping_places(schedule: Schedule, rng: random.Random) -> None:
    one, two = rng.sample(list(schedule.places), 2)
    schedule.places[one] = Place(schedule.places[two].start, schedule.places[one].pitch)


def overlapping_extra(schedule: Schedule, rng: random.Random) -> None:
    name = pick(["scores", "ml", "part", "best"], rng)
    place = schedule.extras[name]
    schedule.extras[name] = Place(place.start - 16, place.pitch)


def no_room(schedule: Schedule, rng: random.Random) -> None:
    schedule.words -= 16


def _other_view(schedule: Schedule, view: View, rng: random.Random) -> View:
    others = [b for b in schedule.recording.buffers if b.width >= view.width and b.index != view.buffer.index]
    return View(pick(others, rng), 0, view.width)


def wrong_x(schedule: Schedule, rng: random.Random) -> None:
    number = pick(numbered(schedule, lambda row: row.x is not None and not is_load(row)), rng)
    row = schedule.rows[number]
    schedule.rows[number] = dataclasses.replace(row, x=_other_view(schedule, row.x, rng))


def wrong_source(schedule: Schedule, rng: random.Random) -> None:
    """A row and the load in front of it agree on what is not its input."""
    pairs = [n for n in numbered(schedule, is_load) if schedule.rows[n + 1].x == schedule.rows[n].x]
    number = pick(pairs, rng)
    other = _other_view(schedule, schedule.rows[number].x, rng)
    for n in (number, number + 1):
        row = schedule.rows[n]
        args = {**row.args, "src": other} if n == number else row.args
        schedule.rows[n] = dataclasses.replace(row, x=other, reads=[other, *row.reads[1:]], args=args)


def wrong_batch_rows(schedule: Schedule, rng: random.Random) -> None:
    number = pick(numbered(schedule, lambda row: row.x is not None), rng)
    row = schedule.rows[number]
    first, end = row.rows
    others = [(a, b) for a in range(end) for b in range(a + 1, schedule.shape.rows + 1) if (a, b) != (first, end)]
    schedule.rows[number] = dataclasses.replace(row, rows=pick(others, rng))


def lost_bank_score(schedule: Schedule, rng: random.Random) -> None:
    number = pick(numbered(schedule, lambda row: row.code == Code.BANK_SCORES), rng)
    row = schedule.rows[number]
    args = row.args | {name: row.args[name][:-1] for name in ("weights", "mixes")}
    schedule.rows[number] = dataclasses.replace(row, units=row.units - 1, args=args)
    for share in schedule.work:
        share[number] = tuple(min(unit, row.units - 1) for unit in share[number])


def score_of_another_mix(schedule: Schedule, rng: random.Random) -> None:
    number = pick(numbered(schedule, lambda row: row.code == Code.BANK_SCORES and row.units > 1), rng)
    row = schedule.rows[number]
    args = row.args | {"mixes": [*row.args["mixes"][1:], row.args["mixes"][0]]}
    schedule.rows[number] = dataclasses.replace(row, args=args)


def reused_tag_of_parts(schedule: Schedule, rng: random.Random) -> None:
    decodes = numbered(schedule, lambda row: row.code == Code.MLA_DECODE)
    if len(decodes) < 2:
        raise NotHere
    one, two = (schedule.rows[number] for number in decodes[:2])
    two.args["part"] = one.args["part"]


def list_not_given_back(schedule: Schedule, rng: random.Random) -> None:
    """An SM without tiles of moe_down passes it by."""
    number = pick(numbered(schedule, lambda row: row.code == Code.MOE_DOWN), rng)
    idle = [sm for sm in range(schedule.shape.sms) if sm not in busy(schedule, number)]
    schedule.work[pick(idle, rng)][number] = (0, 0)


def lost_call(schedule: Schedule, rng: random.Random) -> None:
    number = pick(numbered(schedule, lambda row: bool(row.calls)), rng)
    row = schedule.rows[number]
    schedule.rows[number] = dataclasses.replace(row, calls=row.calls[:-1])


def wrong_number(schedule: Schedule, rng: random.Random) -> None:
    """A size in the arguments of a projection or of experts."""
    number = pick(numbered(schedule, lambda row: row.code in (Code.LINEAR, Code.MOE_GATE_UP, Code.MOE_DOWN)), rng)
    row = schedule.rows[number]
    name = pick([name for name in ("kb", "total", "n_valid", "top_k", "group_pad") if name in row.args], rng)
    schedule.rows[number] = dataclasses.replace(row, args={**row.args, name: row.args[name] + 8})


def wrong_weight(schedule: Schedule, rng: random.Random) -> None:
    number = pick(numbered(schedule, lambda row: row.code == Code.LINEAR), rng)
    row = schedule.rows[number]
    weight = dataclasses.replace(row.args["weight"], path="lm_head_of_another_model")
    schedule.rows[number] = dataclasses.replace(row, args={**row.args, "weight": weight})


def no_ring(schedule: Schedule, rng: random.Random) -> None:
    schedule.shape = dataclasses.replace(schedule.shape, slots=0)


def large_ring(schedule: Schedule, rng: random.Random) -> None:
    schedule.shape = dataclasses.replace(schedule.shape, slots=schedule.shape.slots + 1)


def small_x(schedule: Schedule, rng: random.Random) -> None:
    schedule.shape = dataclasses.replace(schedule.shape, x_bytes=1024)


MUTATIONS = (
    lost_unit, unit_done_twice, shifted_units, lost_item, item_done_twice, lost_share_of_a_mix, lost_row,
    repeated_row, swapped_rows, row_before_its_input, short_place, overlapping_places, overlapping_extra, no_room,
    wrong_x, wrong_source, wrong_batch_rows, lost_bank_score, score_of_another_mix, reused_tag_of_parts,
    list_not_given_back, lost_call, wrong_number, wrong_weight, no_ring,
    large_ring, small_x,
)  # fmt: skip
