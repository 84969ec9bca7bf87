"""The words of a row against what the row is said to do: where its activations and weights are, and which it names.

`validate_calls.py` compares rows with the recorded calls, and all else looks at words; this is what ties the two.
"""

from cute_megakernel.images import pair_rows
from cute_megakernel.recording import Buffer, View
from cute_megakernel.rows import Code, Row
from cute_megakernel.schedule import Schedule, words_of
from cute_megakernel.schedule_error import expect, label
from cute_megakernel.shape import mix_quads
from cute_megakernel.table_view import Fields, TableView

READS = {  # activations that a row asks for, by field; those in shared memory are the business of `validate_local.py`
    Code.MIX: ("src",),
    Code.BANK_SCORES: ("src",),
    Code.LINEAR: ("add1", "add2", "gate"),
    Code.MOE_ROUTER: ("src",),
    Code.MOE_DOWN: ("add1", "add2"),
    Code.KDA_HEAD: ("src", "f_a", "gate", "beta"),
    Code.MLA_KV_APPEND: ("ckv",),
    Code.MLA_DECODE: ("src", "rope", "ckv"),
}
WRITES = ("dst", "h", "tap", "inner")  # what it hands on, or what taps see of it


def check_fields(schedule: Schedule, view: TableView) -> None:
    for number, (row, f) in enumerate(zip(schedule.rows, view.rows, strict=True)):
        where = label(number, row)
        expect(
            (f["r0"], f["r1"]) == row.rows, where, f"serves batch rows {row.rows}, its words say {f['r0']}, {f['r1']}"
        )
        _check_activations(schedule, row, f, where)
        if row.code == Code.MIX and f["kind"]:
            columns = 4 * mix_quads(schedule.shape.hidden_size) * f["span"]
            expect(columns == f["width"], where, f"threads hold {columns} of {f['width']} columns")
        if row.code == Code.LINEAR or (row.code in (Code.MOE_GATE_UP, Code.MOE_DOWN) and not schedule.shape.mxfp4):
            _check_weight(row, f, where)


def _check_activations(schedule: Schedule, row: Row, f: Fields, where: str) -> None:
    """Each where the schedule has placed it, and among what the row names as read or written."""
    for name in READS.get(row.code, ()):
        source = row.args.get(name)
        if source is not None:
            expect(f[name] == start_of(schedule, source), where, f"{name} is not where {source.buffer.name} is")
            expect(source in row.reads, where, f"{name} is not among its reads")
    for name in WRITES:
        target = row.args.get(name)
        if isinstance(target, Buffer) and row.code != Code.MLA_REDUCE:  # that one makes a part of mla_combine's
            expect(target in row.writes, where, f"{name} is not among its writes")


def start_of(schedule: Schedule, view: View) -> int:
    """First word of an activation or of a part of it."""
    wide = words_of(view.buffer) < view.buffer.width  # two columns a word
    return schedule.places[view.buffer.index].start + (view.start // 2 if wide else view.start)


def _check_weight(row: Row, f: Fields, where: str) -> None:
    """Rows of a bfloat16 weight that lies together; other pitches are the instance's, and checked where it is made."""
    outputs = row.args["weight"].shape[-2]
    pair = pair_rows(outputs) if row.args["image"].startswith("paired") else 0
    expect(f["pair"] == pair, where, f"up rows begin {f['pair']} rows behind gate rows, not {pair}")
    expect(f["row_bytes"] == 64 * f["kb"], where, f"rows of {f['row_bytes']} bytes for {f['kb']} blocks")
