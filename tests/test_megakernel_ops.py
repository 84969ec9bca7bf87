"""The fused kernel carries out every op of the table, each where `rows.HANDLERS` says, in the order of the step."""

from pathlib import Path

import pytest

from cute_megakernel.recording import record_step
from cute_megakernel.rows import HANDLERS, Code
from cute_megakernel.schedule import make_schedule
from kimi_kernels.config import K3_MINI, KIMI_LINEAR_MINI
from kimi_kernels.op_specs import OPS
from kimi_kernels.traffic import record_step as op_calls

ROOT = Path(__file__).parent.parent
CONFIGS = {"k3": K3_MINI, "kimi-linear": KIMI_LINEAR_MINI}


def codes_of(op: str) -> tuple[Code, ...]:
    codes = HANDLERS[op]
    return codes if isinstance(codes, tuple) else (codes,)


def test_every_op_has_a_handler_in_the_order_of_the_table():
    assert list(HANDLERS) == list(OPS)
    without_op = {Code.BANK_SCORES, Code.MLA_DECODE, Code.MLA_REDUCE}
    assert {code for op in OPS for code in codes_of(op)} | without_op == set(Code)


def test_every_handler_is_a_stage_file():
    stages = {path.stem for path in (ROOT / "cute_megakernel/stages").glob("*.py")}
    assert {code.name.lower() for code in Code} <= stages
    assert {"situ", "swiglu", "output_gate"} <= stages
    assert {"causal_conv1d", "kda_gate", "kda_recurrent", "gated_rms_norm"} <= stages


@pytest.mark.parametrize("rows", (1, 5))
@pytest.mark.parametrize("family", CONFIGS)
def test_rows_carry_out_the_calls_of_the_step_each_by_its_handler(family, rows):
    config = CONFIGS[family]
    schedule = make_schedule(record_step(config, rows), config, sms=7)
    calls = schedule.recording.calls
    assert [call.op for call in calls] == [call.op for call in op_calls(config, rows=rows)]
    done = [(number, row.code) for row in schedule.rows for number in row.calls]
    assert sorted(number for number, _ in done) == list(range(len(calls)))
    for number, code in done:
        assert code in codes_of(calls[number].op), f"call {number}, {calls[number].op}, by {code.name}"
