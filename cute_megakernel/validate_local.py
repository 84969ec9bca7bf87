"""What rows hand on through the shared memory of an SM: x and the list of experts. Where a launch may begin
(`Schedule.part_starts`), nothing of that is left."""

from collections import defaultdict

from cute_megakernel.footprint import Part
from cute_megakernel.rows import Code, Row
from cute_megakernel.schedule import Schedule
from cute_megakernel.schedule_error import ScheduleError, expect, label
from cute_megakernel.table_view import Fields, TableView


def check_local(schedule: Schedule, view: TableView) -> None:
    memory, starts = Memory(schedule), set(schedule.part_starts())
    for number, (row, f) in enumerate(zip(schedule.rows, view.rows, strict=True)):
        where = label(number, row)
        if number in starts:
            memory.forget(where)
        parts = [
            Part(sm, *share[number]) for sm, share in enumerate(schedule.work) if share[number][0] < share[number][1]
        ]
        if row.code in (Code.MIX, Code.MLA_COMBINE, Code.MLA_DECODE):
            memory.put_x(row, f, parts)
        elif row.code in (Code.LINEAR, Code.MOE_GATE_UP, Code.MOE_DOWN):
            memory.take_x(where, row, f, parts)
        if row.code in (Code.MOE_ROUTER, Code.MOE_GATE_UP, Code.MOE_DOWN):
            memory.list_experts(where, row, f)
    memory.finish()


class Memory:
    """The shared memory of all SMs, as names of what it holds."""

    def __init__(self, schedule: Schedule):
        self.schedule = schedule
        self.x: list[dict[int, tuple]] = [{} for _ in range(schedule.shape.sms)]  # by where in x it begins
        self.ends: dict[tuple[int, int], int] = {}  # where what begins there ends
        self.lists: list[object] = []  # expert ids of the routers so far
        self.free = True
        self.served: dict[object, list[tuple[int, int]]] = defaultdict(list)

    def forget(self, where: str) -> None:
        """A launch may begin here: whatever is in shared memory is lost."""
        expect(self.free, where, "a launch may begin here, but the list of experts is in use")
        self.x = [{} for _ in range(self.schedule.shape.sms)]

    def put_x(self, row: Row, f: Fields, parts: list[Part]) -> None:
        for part in parts:
            assert part.sm is not None
            held, at, shape = self.x[part.sm], f["x_at"], self.schedule.shape
            if row.code == Code.MLA_DECODE:
                held.clear()
                continue
            end = at + (row.rows[1] - row.rows[0]) * f["x_pitch"]
            if row.code == Code.MLA_COMBINE:
                end = shape.x_bytes
            for other in [other for other in held if at <= other < end or (other < at < self.ends[part.sm, other])]:
                del held[other]
            held[at] = self._key(row, f, part, row.code == Code.MLA_COMBINE)
            self.ends[part.sm, at] = end

    def _key(self, row: Row, f: Fields, part: Part, heads: bool) -> tuple:
        if not heads:
            return row.x, row.rows, f["x_pitch"]
        combine = row.code == Code.MLA_COMBINE
        batch_tiles, pad = (f["groups"], 2 * f["group_pad"]) if combine else (f["batch_tiles"], f["x_batch"])
        return row.x, row.rows, f["x_pitch"], part.first // batch_tiles, (part.end - 1) // batch_tiles + 1, pad

    def take_x(self, where: str, row: Row, f: Fields, parts: list[Part]) -> None:
        local = row.code == Code.LINEAR and f["local"] != 0
        for part in parts:
            assert part.sm is not None
            held, want = self.x[part.sm].get(f["x_at"]), self._key(row, f, part, local)
            if held != want:
                raise ScheduleError(f"{where}: SM {part.sm} holds {_show(held)}, not {_show(want)}")

    def list_experts(self, where: str, row: Row, f: Fields) -> None:
        """The list is made, used by its own layer, and free again when its last row is done."""
        if row.code == Code.MOE_ROUTER:
            expect(self.free and f["sub"] == len(self.lists), where, "the list of experts before it is still in use")
            self.lists.append(row.args["ids"])
            self.free = False
            return
        ids = row.reads[1].buffer
        mine = bool(self.lists) and self.lists[-1] == ids and not self.free and f["sub"] == len(self.lists) - 1
        expect(mine, where, "the list of experts is not that of its router")
        if row.code == Code.MOE_DOWN:
            self.free = f["local"] != 0

    def finish(self) -> None:
        expect(self.free, "launch", "the last list of experts is not done with")


def _show(key: tuple | None) -> str:
    if key is None:
        return "nothing"
    view, rows = key[0], key[1]
    heads = f", heads {key[3]} to {key[4] - 1}" if len(key) > 3 else ""
    return f"{view.buffer.name}[{view.start}:{view.start + view.width}] of batch rows {rows[0]} to {rows[1] - 1}{heads}"
