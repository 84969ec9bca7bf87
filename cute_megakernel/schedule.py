"""The schedule of one launch: rows, the share of each SM, and where every activation lives. Data for the kernel, the
emulator, the validator and the trace alike.

    schedule = make_schedule(recording, config, sms=132)
    schedule.rows[5].name, schedule.work[sm][5]          what a row does, and this SM's units [first, end)
"""

from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch

from cute_megakernel.lowering import lower, second_x, x_pitch
from cute_megakernel.recording import Buffer, Recording
from cute_megakernel.rows import STREAMED, Code, Row
from cute_megakernel.shape import MAX_BANK, KernelShape, most_slots
from kimi_kernels.config import KimiConfig

SMALLEST_X = 20480  # the query of 16 heads in mla_decode


@dataclass(frozen=True)
class Place:
    """An activation in the workspace, in words: first word and words between rows."""

    start: int
    pitch: int


@dataclass
class Schedule:
    """`work[sm][i]` are the units of row i that the SM does; (0, 1) for a row that every SM does for itself."""

    shape: KernelShape
    recording: Recording
    rows: list[Row]
    work: list[list[tuple[int, int]]]
    places: dict[int, Place] = field(default_factory=dict)  # by buffer index
    extras: dict[str, Place] = field(default_factory=dict)  # scores, parts
    words: int = 0

    @property
    def mixes(self) -> int:
        return sum(call.op == "attn_res_norm" for call in self.recording.calls)

    def part_starts(self) -> list[int]:
        """Rows at which a launch may begin: what the SMs hold in shared memory before is not needed from there on."""
        starts, experts = [], False
        for number, row in enumerate(self.rows):
            if row.code in (Code.MIX, Code.BANK_SCORES, Code.KDA_HEAD) and not experts:
                starts.append(number)
            done = row.code == Code.MOE_DOWN and row.rows[1] == self.recording.rows  # of its batch rows, the last
            experts = row.code == Code.MOE_ROUTER or (experts and not done)
        return starts

    def lists_before(self, number: int) -> int:
        """Lists of experts made by rows before row `number`."""
        return sum(row.code == Code.MOE_ROUTER for row in self.rows[:number])

    def caps(self, in_flight: int) -> list[list[int]]:
        """[sms][rows] full slots on their way to an SM at most: `in_flight` where it reads as much as the others do
        between two hand-overs to all, more or fewer where it reads more or less."""
        caps = [[in_flight] * len(self.rows) for _ in self.work]
        starts = [n for n, row in enumerate(self.rows) if row.units == 0 and row.x is not None] + [len(self.rows)]
        for start, end in pairwise([0, *starts]):
            loads = [sum(self._row_bytes(n, sm) for n in range(start, end)) for sm in range(len(self.work))]
            mean = sum(loads) / len(loads)
            for sm, load in enumerate(loads):
                cap = round(in_flight * load / mean) if mean else in_flight
                caps[sm][start:end] = [max(2, min(cap, self.shape.slots))] * (end - start)
        return caps

    def _row_bytes(self, number: int, sm: int) -> int:
        """What an SM streams for a row, if every expert is picked by one batch row at most."""
        row, (first, end) = self.rows[number], self.work[sm][number]
        if row.code not in STREAMED or row.units <= 0:
            return 0
        experts = self.shape.rows * self.shape.top_k if row.code == Code.MOE_DOWN else 1
        return max(0, end - first) * row.unit_bytes * experts

    def streamed_bytes(self, sm: int) -> int:
        """Bytes that the SM streams, but for the experts, which the router decides."""
        units = zip(self.rows, self.work[sm], strict=True)
        return sum(
            max(0, end - first) * row.unit_bytes
            for row, (first, end) in units
            if row.code in STREAMED and row.units > 0
        )


def kernel_shape(config: KimiConfig, rows: int, sms: int, x_bytes: int) -> KernelShape:
    """Build parameters of this rank's config."""
    shape = KernelShape(
        rows=rows,
        hidden_size=config.hidden_size,
        kda_heads=config.kda_heads,
        kda_head_dim=config.kda_head_dim,
        mla_heads=config.mla_heads,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_dim=config.qk_nope_dim,
        qk_rope_dim=config.qk_rope_dim,
        num_experts=config.num_experts,
        top_k=config.top_k,
        mxfp4=config.mxfp4_experts,
        x_bytes=x_bytes,
        sms=sms,
        slots=0,
        low_rank_gate=not config.full_rank_out_gate,
    )
    return replace(shape, slots=most_slots(shape))


def make_schedule(recording: Recording, config: KimiConfig, sms: int) -> Schedule:
    """Lowers a recording for `sms` SMs. `config` is this rank's. Raises ValueError where a size does not fit."""
    x_bytes = x_budget(recording, config)
    rows = lower(recording, x_bytes, sms)
    schedule = Schedule(kernel_shape(config, recording.rows, sms, x_bytes), recording, rows, [])
    schedule.work = share_out(rows, sms)
    _place(schedule)
    return schedule


def x_budget(recording: Recording, config: KimiConfig) -> int:
    """Shared memory for activations: the hidden state of all rows, and any input of one row; the inputs of the other
    projections beside the hidden state, where that costs no slot of the ring."""
    rows = [row for row in lower(recording, 1 << 30, 1) if row.x is not None and not row.args.get("x_local")]
    single, hidden = [x_pitch(row) for row in rows], second_x(recording.rows, config.hidden_size)
    least = _whole(max(hidden, SMALLEST_X, *single))
    beside = [recording.rows * x_pitch(row) for row in rows if row.x_side]
    both = _whole(max(least, hidden + max(beside, default=0)))
    slots = [kernel_shape(config, recording.rows, 1, size).slots for size in (least, both)]
    return both if slots[0] == slots[1] else least


def _whole(nbytes: int) -> int:
    return -(-nbytes // 128) * 128


def share_out(rows: list[Row], sms: int) -> list[list[tuple[int, int]]]:
    """Contiguous ranges of units: each SM gets the same number, and one more goes to those that have streamed least.
    Items go one each to those."""
    load = [0.0] * sms
    work: list[list[tuple[int, int]]] = [[] for _ in range(sms)]
    for row in rows:
        if row.units <= 0:  # done by all, or dealt out on the device
            ranges = [(0, 1)] * sms
        elif row.first is not None:
            ranges = [(0, 0)] * sms
            for i, sm in enumerate(sorted(sorted(range(sms), key=load.__getitem__)[: row.units])):
                ranges[sm] = (row.first + i, row.first + i + 1)
                load[sm] += row.unit_bytes
        else:
            ranges = _even(row, load, sms)
        if row.code == Code.MOE_DOWN:
            ranges = [share if share[0] < share[1] else (1, 0) for share in ranges]
        if row.code == Code.MLA_COMBINE:
            ranges = []  # as the row behind it
        for sm, share in enumerate(ranges):
            work[sm].append(share)
        if row.code == Code.MLA_COMBINE:
            for sm, share in enumerate(_even(row.args["for"], list(load), sms)):
                work[sm].append(share)
    return work


def _even(row: Row, load: list[float], sms: int) -> list[tuple[int, int]]:
    base, extra = divmod(row.units, sms)
    most = set(sorted(range(sms), key=load.__getitem__)[:extra])
    ranges, start = [], 0
    for sm in range(sms):
        end = start + base + (sm in most)
        ranges.append((start, end))
        load[sm] += (end - start) * row.unit_bytes
        start = end
    low = min(load)
    load[:] = [value - low for value in load]
    return ranges


def words_of(buffer: Buffer) -> int:
    """Words of one row: two bfloat16 or one wider number each, whole tiles."""
    width = -(-buffer.width // 8) * 8
    return width // 2 if buffer.dtype == torch.bfloat16 else width


def _place(schedule: Schedule):
    """Gives every activation its own words; nothing is used twice in a launch but the parts of mla_decode."""
    shape, at = schedule.shape, 0

    def take(rows: int, pitch: int) -> Place:
        nonlocal at
        start, at = at, at + -(-rows * pitch // 16) * 16
        return Place(start, pitch)

    for buffer in schedule.recording.buffers:
        schedule.places[buffer.index] = take(buffer.rows, words_of(buffer))
    heads, latent = shape.mla_heads, shape.kv_lora_rank
    schedule.extras["scores"] = take(max(1, schedule.mixes) * shape.rows, MAX_BANK)
    schedule.extras["ml"] = take(shape.rows * heads * shape.splits, 2)
    schedule.extras["part"] = take(shape.rows * heads * shape.splits, latent)
    schedule.extras["best"] = take(shape.sms * shape.rows, 2)
    schedule.words = at
