"""One op call of the step as a launch of its own, with its inputs at hand: a look at one op of the fused kernel.

    part = alone(schedule, call)          the rows that carry the call out, and what they cannot do without
    inputs_of(part)                       the activations that are to be given

Rows keep their units, places and order. A row whose input was in shared memory gets a load in front, so that the input
can be given. What else a row finds there, or in words that are no activations, is made by the rows that make it in the
step: the list of experts, the parts of mla_decode and the sums of many of them, the scores of bank rows, the best logit
of each SM. Those rows run too, on given inputs; where ops share a row, as those of a KDA head do, they run together.
"""

from dataclasses import replace

from cute_megakernel.lowering import load, second_x
from cute_megakernel.recording import Buffer
from cute_megakernel.rows import Code, Row
from cute_megakernel.schedule import Schedule

IN_FRONT = {  # code of a row -> codes of the rows of the same place that make what it finds
    Code.MOE_GATE_UP: (Code.MOE_ROUTER,),
    Code.MOE_DOWN: (Code.MOE_ROUTER,),
    Code.MLA_REDUCE: (Code.MLA_DECODE,),
    Code.MLA_COMBINE: (Code.MLA_DECODE, Code.MLA_REDUCE),
    Code.ARGMAX: (Code.LINEAR,),
}


def alone(schedule: Schedule, index: int) -> Schedule:
    """A schedule that does call `index` of the recording and no more; it is part of one that is proved."""
    todo, numbers = carriers(schedule, index), set()
    while todo:
        number = todo.pop()
        if number not in numbers:
            numbers.add(number)
            todo += in_front(schedule.rows, number)
    shape = schedule.shape
    picked = [replace(schedule.rows[number]) for number in sorted(numbers)]
    own = dict(zip(map(id, picked), sorted(numbers), strict=True))
    second = second_x(shape.rows, shape.hidden_size)
    rows = load(picked, second, shape.x_bytes - second)
    work = [[shares[own[id(row)]] if id(row) in own else (0, 1) for row in rows] for shares in schedule.work]
    return replace(schedule, rows=rows, work=work)


def carriers(schedule: Schedule, index: int) -> list[int]:
    """Rows that do the call, or some batch rows or heads of it."""
    outputs = schedule.recording.calls[index].outputs
    return [
        number
        for number, row in enumerate(schedule.rows)
        if index in row.calls or any(buffer in row.writes for buffer in outputs)
    ]


def in_front(rows: list[Row], number: int) -> list[int]:
    """Rows that leave something for row `number` that is no activation and no input of its."""
    row = rows[number]
    if row.code == Code.MIX:
        return [n for n in range(number) if row.args.get("mix") in rows[n].args.get("mixes", ())]
    wanted = (Code.MLA_COMBINE,) if row.args.get("x_local") else IN_FRONT.get(row.code, ())
    return [n for n in range(number) if rows[n].code in wanted and rows[n].place == row.place]


def inputs_of(part: Schedule) -> list[Buffer]:
    """Activations that the rows read and none of them makes."""
    needed: dict[int, Buffer] = {}
    made: set[int] = set()
    for row in part.rows:
        needed |= {view.buffer.index: view.buffer for view in row.reads if view.buffer.index not in made}
        made |= {buffer.index for buffer in row.writes}
    return list(needed.values())
