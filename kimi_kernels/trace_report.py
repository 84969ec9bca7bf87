"""What a traced launch of the megakernel says: when each SM was at each row, as a table and as a Perfetto file.

rows = row_times(times, names)          times [SMS, ROWS, 2] ns, start and end, 0 where the SM has no part of the row
json.dump(chrome_trace(times, names), file)         open in ui.perfetto.dev or chrome://tracing; a thread is an SM
"""

from dataclasses import dataclass

import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class RowTimes:
    """One row of the table over all SMs that take part; microseconds since the first SM began its first row."""

    row: int
    name: str
    sms: int
    start_us: float  # the first SM
    start_median_us: float
    end_median_us: float
    end_us: float  # the last SM
    median_us: float  # of the time that an SM spends on it, waits included
    max_us: float


def row_times(times: Tensor, names: list[str]) -> list[RowTimes]:
    """Rows in the order of the table; one that no SM takes part in is left out."""
    origin, result = _origin(times), []
    for number, name in enumerate(names):
        spans = (times[times[:, number, 0] > 0, number] - origin).double() / 1e3  # [n, 2]
        if len(spans) == 0:
            continue
        start, end = spans[:, 0], spans[:, 1]
        figures = (start.min(), start.median(), end.median(), end.max(), (end - start).median(), (end - start).max())
        result.append(RowTimes(number, name, len(spans), *map(float, figures)))
    return result


def chrome_trace(times: Tensor, names: list[str]) -> dict:
    """The trace event format: one complete event for each SM and row."""
    origin = _origin(times)
    events: list[dict] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": sm, "args": {"name": f"SM {sm}"}}
        for sm in range(times.shape[0])
    ]
    for sm, rows in enumerate(times.tolist()):
        for number, (start, end) in enumerate(rows):
            if start > 0:
                span = {"ts": (start - origin) / 1e3, "dur": (end - start) / 1e3}
                event = {"ph": "X", "name": names[number], "cat": names[number].split()[-1], "pid": 0, "tid": sm}
                events.append(event | span | {"args": {"row": number}})
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _origin(times: Tensor) -> int:
    starts = times[..., 0]
    if not bool((starts > 0).any()):
        raise ValueError("trace: no row was timed; was the kernel built with trace?")
    return int(starts[starts > 0].min())
