"""The words of the table against the rows: a word that says something else is refused, as is a name left out."""

import pytest
from schedule_cases import BASES

from cute_megakernel.rows import Code
from cute_megakernel.schedule_error import ScheduleError
from cute_megakernel.table import FIELD
from cute_megakernel.table_view import TableView
from cute_megakernel.validate_fields import READS, check_fields

WORDS = [(code, name) for code, names in READS.items() for name in names] + [
    (Code.MIX, "span"),
    (Code.LINEAR, "row_bytes"),
    (Code.LINEAR, "pair"),
    (Code.MOE_GATE_UP, "row_bytes"),
    (Code.MOE_GATE_UP, "pair"),
    *((code, name) for code in (Code.LINEAR, Code.KDA_HEAD, Code.MOE_ROUTER) for name in ("r0", "r1")),
]


def rows_with(code: Code, name: str):
    """A row of the code that has the field, in whichever schedule has one."""
    for base in BASES:
        schedule = BASES[base].schedule()
        for number, row in enumerate(schedule.rows):
            plain = name not in READS.get(code, ()) or row.args.get(name) is not None
            mxfp4 = code == Code.MOE_GATE_UP and schedule.shape.mxfp4
            if row.code == code and plain and not mxfp4 and not (name == "span" and "norm" not in row.args):
                yield schedule, number


@pytest.mark.parametrize(("code", "name"), WORDS, ids=lambda value: getattr(value, "name", value))
def test_a_word_that_says_something_else_is_refused(code, name):
    schedule, number = next(rows_with(code, name))
    view = TableView(schedule)
    check_fields(schedule, view)
    view.rows[number].words[FIELD[name]] += 2
    with pytest.raises(ScheduleError, match=rf"row {number} "):
        check_fields(schedule, view)


@pytest.mark.parametrize("kind", ("reads", "writes"))
def test_a_name_left_out_is_refused(kind):
    for code, name in ((Code.LINEAR, "add1"), (Code.MOE_DOWN, "add1")):
        schedule, number = next(rows_with(code, name))
        row = schedule.rows[number]
        setattr(row, kind, [v for v in getattr(row, kind) if v not in (row.args[name], row.args["dst"])])
        with pytest.raises(ScheduleError, match=rf"row {number} .* is not among its {kind}"):
            check_fields(schedule, TableView(schedule))
