"""Measures one row at a time: an op, what other packages make of it, or a chain of layers. Correct first, then timed.

A row that fails, for whatever reason, holds the reason instead of a number, and the next one is measured.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch

from kimi_kernels.bench_cases import COLD_BYTES, MIN_CALLS, Case
from kimi_kernels.bench_inputs import input_sets
from kimi_kernels.bench_layers import Chain, ChainSpec, checked, layer_bytes
from kimi_kernels.bench_peers import Peer, PeerMissing, relative_error
from kimi_kernels.bench_timing import Timing, time_graph
from kimi_kernels.compare import check_op
from kimi_kernels.config import KimiConfig

OURS = "triton"
Timer = Callable[[Callable[[], object], int], Timing]


@dataclass
class Row:
    """One measurement. Without a time it says why: `failure`, or `missing` for a peer that is not installed."""

    kind: str  # "op" | "peer" | "layer" | "model"
    name: str
    by: str
    bytes: int
    sets: int = 0
    cold: bool = False
    us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    calls: int = 0
    gb_per_s: float | None = None
    floor_us: float | None = None  # `bytes` at the read ceiling
    share_of_ceiling: float | None = None
    worst_over_bound: float | None = None  # error as a fraction of its bound
    relative_error: float | None = None  # of a peer, against the float64 reference
    note: str = ""
    missing: str = ""
    failure: str = ""

    def set_timing(self, timing: Timing, ceiling: float | None) -> None:
        self.us, self.p20_us, self.p80_us, self.calls = timing.us, timing.p20_us, timing.p80_us, timing.calls
        rate = self.bytes / timing.us * 1e6  # bytes per second
        self.gb_per_s = rate / 1e9
        if ceiling:
            self.floor_us, self.share_of_ceiling = self.bytes / ceiling * 1e6, rate / ceiling


class Bench:
    """Measures rows; `rows` holds them in order, `report` sees each as it is done. Never raises for what a row does."""

    def __init__(
        self,
        config: KimiConfig,
        tp: int,
        rows: int,
        context: int,
        ops: SimpleNamespace,
        generator: torch.Generator,
        timer: Timer = time_graph,
        ceiling: float | None = None,
        report: Callable[[Row], None] = lambda row: None,
    ):
        self.shape = (config, tp, rows, context)
        self.context, self.ops, self.generator = context, ops, generator
        self.timer, self.ceiling, self.report = timer, ceiling, report
        self.rows: list[Row] = []
        self.by = OURS

    def measure_op(self, case: Case, peers: tuple[Peer, ...] = ()) -> None:
        """One row of ours and one for each peer, on the same inputs."""
        sets: list[tuple] = []
        function = getattr(self.ops, case.op)

        def ours(row: Row) -> None:
            sets.extend(input_sets(case, self.context, self.generator))
            row.worst_over_bound = check_op(case.op, function, *sets[0]).ratio
            self._time_calls(row, [partial(function, *args) for args in sets])

        self.measure(Row("op", case.name, OURS, case.nbytes, case.sets, case.cold), ours)
        for peer in peers:
            row = Row("peer", case.name, peer.name, case.nbytes, case.sets, case.cold, note=peer.note)
            self.measure(row, partial(self._peer, case, peer, sets))

    def measure_layer(self, spec: ChainSpec) -> None:
        """One row for a chain of layers, microseconds and bytes of one layer."""

        def ours(row: Row) -> None:
            row.bytes = layer_bytes(spec, *self.shape)
            chain = Chain(spec, *self.shape, self.generator)
            row.sets, row.cold = chain.count, chain.count * chain.nbytes >= COLD_BYTES
            chain.run(checked(self.ops), slice(0, 1))
            row.set_timing(self.timer(lambda: chain.run(self.ops), chain.count), self.ceiling)

        self.measure(Row("layer", spec.name, OURS, 0), ours)

    def _peer(self, case: Case, peer: Peer, sets: list[tuple], row: Row) -> None:
        if not sets:
            raise RuntimeError("no inputs: they could not be made for our op")
        call = peer.prepare(*sets[0])
        row.relative_error = relative_error(case.op, sets[0], call())
        if not math.isfinite(row.relative_error):
            raise RuntimeError(f"{peer.name} gives values that are not finite")
        self._time_calls(row, [call, *(peer.prepare(*args) for args in sets[1:])])

    def _time_calls(self, row: Row, calls: list[Callable[[], object]]) -> None:
        calls = calls * math.ceil(MIN_CALLS / len(calls))

        def work() -> None:
            for call in calls:
                call()

        row.set_timing(self.timer(work, len(calls)), self.ceiling)

    def measure(self, row: Row, fill: Callable[[Row], None]) -> None:
        """Lets `fill` measure into the row, whatever comes of it."""
        try:
            fill(row)
        except PeerMissing as reason:
            row.missing = str(reason)
        except Exception as error:  # whatever one kernel does, the others are still measured
            row.failure = explain(error)
        self.rows.append(row)
        self.report(row)


def explain(error: BaseException) -> str:
    """The message of an error, with that of the one it came out of: ending a broken graph capture hides the cause."""
    text = str(error).strip() or "no message"
    text = text if isinstance(error, AssertionError) else f"{type(error).__name__}: {text}"
    cause = error.__cause__ or error.__context__
    return text if cause is None else f"{text} (after {explain(cause)})"
