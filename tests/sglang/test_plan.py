"""Which steps of the engine the whole step takes: decided on the host from mode, rows and what is asked for."""

from types import SimpleNamespace

import pytest
import torch

from sglang_integration.spec import MAX_ROWS
from sglang_integration.step import BuiltStep


@pytest.fixture
def built() -> BuiltStep:
    """Only what `plan` reads."""
    step = object.__new__(BuiltStep)
    step.widths = tuple(range(1, MAX_ROWS + 1))
    return step


def batch(mode: str = "DECODE", rows: int = 2, hidden: str = "NULL", **fields) -> SimpleNamespace:
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

    found = dict(
        forward_mode=ForwardMode[mode],
        batch_size=rows,
        spec_info=None,
        capture_hidden_mode=CaptureHiddenMode[hidden],
        input_embeds=None,
    )
    return SimpleNamespace(**(found | fields))


@pytest.mark.parametrize("rows", range(1, MAX_ROWS + 1))
def test_decode_up_to_eight_rows_is_taken(built, rows):
    step = built.plan(torch.zeros(rows, dtype=torch.int64), batch(rows=rows))
    assert (step.mode, step.rows) == ("decode", rows)


def test_wider_batches_run_sglangs_own_forward(built):
    assert built.plan(torch.zeros(MAX_ROWS + 1), batch(rows=MAX_ROWS + 1)) is None


def test_every_other_mode_runs_sglangs_own_forward(built):
    """Faults T03, T05, T12: mixed batches, prompts of one token (an EXTEND of length 1), idle and verify steps."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    for mode in ForwardMode:
        planned = built.plan(torch.zeros(2), batch(mode.name))
        assert (planned is None) == (mode is not ForwardMode.DECODE), mode


@pytest.mark.parametrize("changed", [
    dict(hidden="FULL"),
    dict(hidden="LAST"),
    dict(spec_info=object()),
    dict(input_embeds=torch.zeros(2, 4)),
    dict(batch_size=1),
], ids=lambda changed: next(iter(changed)))  # fmt: skip
def test_what_the_step_does_not_return_or_read_is_left_to_sglang(built, changed):
    assert built.plan(torch.zeros(2), batch(**changed)) is None


def test_arguments_beyond_the_batch_are_left_to_sglang(built):
    assert built.plan(torch.zeros(2), batch(), inputs_embeds=torch.zeros(2, 4)) is None
    assert built.plan(torch.zeros(2), batch(), None, pp_proxy_tensors=object()) is None
    assert built.plan(torch.zeros(2), batch(), inputs_embeds=None, get_embedding=False) is not None
