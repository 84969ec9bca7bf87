"""The report of a traced launch, from times made by hand; a launch itself is traced in `test_megakernel_gpu.py`."""

import pytest
import torch

from kimi_kernels.trace_report import chrome_trace, row_times

NAMES = ["embed mix", "layer 0 kda in_proj", "layer 0 kda conv"]
# two SMs, three rows; the second SM has no part of row 1, nobody has one of row 2
TIMES = torch.tensor([[[5_000, 6_000], [6_500, 9_500], [0, 0]], [[5_500, 8_000], [0, 0], [0, 0]]])


def test_rows_are_summed_up_over_the_sms_that_take_part():
    first, second = row_times(TIMES, NAMES)
    assert (first.row, first.name, first.sms) == (0, "embed mix", 2)
    assert (first.start_us, first.end_us, first.max_us) == (0.0, 3.0, 2.5)
    assert (second.row, second.sms, second.start_us, second.end_us, second.median_us) == (1, 1, 1.5, 4.5, 3.0)


def test_the_file_has_an_event_for_each_sm_and_row():
    trace = chrome_trace(TIMES, NAMES)
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(e["tid"], e["args"]["row"], e["ts"], e["dur"]) for e in spans] == [
        (0, 0, 0.0, 1.0),
        (0, 1, 1.5, 3.0),
        (1, 0, 0.5, 2.5),
    ]
    assert spans[1]["name"] == NAMES[1] and spans[1]["cat"] == "in_proj"
    assert sum(event["ph"] == "M" for event in trace["traceEvents"]) == 2


def test_an_untraced_launch_is_refused():
    with pytest.raises(ValueError, match="no row was timed"):
        row_times(torch.zeros(2, 3, 2, dtype=torch.int64), NAMES)
