"""Times device work: CUDA graph replays between events, percentiles, and the read bandwidth that the machine reaches.

    timing = time_graph(work, calls)        microseconds per call, median of 15 replays after 3
    best, rates = read_ceiling()            bytes per second of a read-only kernel over 4 GiB

A graph holds the work once; replays are queued without waiting, so no launch gap is timed. Cold L2 is the caller's
business: enough distinct inputs in one graph that each has left the cache before its next turn.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

WARMUP, REPLAYS = 3, 15
CEILING_BYTES = 2**32
# block (int32 elements), loads in flight per thread and step, warps, programs: large reductions that reached the most
CEILING_SHAPES = (
    (8192, 2, 16, 1056),
    (8192, 1, 16, 1056),
    (4096, 4, 8, 1056),
    (8192, 4, 16, 528),
    (2048, 4, 4, 2112),
    (8192, 2, 16, 2112),
)


@dataclass(frozen=True)
class Timing:
    """Microseconds per call over `replays` replays of a graph of `calls` calls."""

    us: float
    p20_us: float
    p80_us: float
    calls: int
    replays: int


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100) of `values`, linear between neighbours."""
    if not values:
        raise ValueError("percentile: needs at least one value")
    ordered = sorted(values)
    position = (len(ordered) - 1) * q / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def summarise(replay_us: Sequence[float], calls: int) -> Timing:
    """Timing of replays that took `replay_us` microseconds each."""
    median, p20, p80 = (percentile(replay_us, q) / calls for q in (50, 20, 80))
    return Timing(median, p20, p80, calls, len(replay_us))


def time_graph(work: Callable[[], object], calls: int, warmup: int = WARMUP, replays: int = REPLAYS) -> Timing:
    """Captures `work`, which makes `calls` calls, and times its replays. Needs CUDA; runs `work` once before."""
    work()  # compiles, tunes and loads outside the graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return summarise(time_replays(graph.replay, warmup, replays), calls)


def time_replays(launch: Callable[[], object], warmup: int, replays: int) -> list[float]:
    """Microseconds of each of `replays` launches, by events around it, after `warmup` launches."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
    for _ in range(warmup):
        launch()
    for start, end in events:
        start.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in events]


def read_ceiling(nbytes: int = CEILING_BYTES, device: str = "cuda") -> tuple[float, list[dict]]:
    """Best read rate in bytes per second, and the rate of each launch shape. Raises RuntimeError if a sum is wrong."""
    kernel = _read_kernel()
    data = torch.randint(-(2**31), 2**31 - 1, (nbytes // 4,), dtype=torch.int32, device=device)
    want = int(data.sum(dtype=torch.int64)) % 2**32
    rates = []
    for block, unroll, warps, programs in CEILING_SHAPES:
        sums = torch.empty(programs, dtype=torch.int64, device=device)
        launch = _reader(kernel, data, sums, block, unroll, warps)
        us = percentile(time_replays(launch, WARMUP, REPLAYS), 50)
        if int(sums.sum()) % 2**32 != want:  # a program adds in int32, which wraps
            raise RuntimeError(f"read ceiling: wrong sum for block={block} unroll={unroll} programs={programs}")
        shape = {"block": block, "unroll": unroll, "warps": warps, "programs": programs}
        rates.append({**shape, "us": us, "bytes_per_s": nbytes / us * 1e6})
    return max(rate["bytes_per_s"] for rate in rates), rates


def _reader(
    kernel, data: torch.Tensor, sums: torch.Tensor, block: int, unroll: int, warps: int
) -> Callable[[], object]:
    assert data.numel() % (block * unroll) == 0
    return lambda: kernel[(sums.numel(),)](data, sums, data.numel(), BLOCK=block, UNROLL=unroll, num_warps=warps)


def _read_kernel():
    """The kernel; built on use, since this package imports without triton."""
    import triton
    import triton.language as tl

    @triton.jit
    def _read_bandwidth_kernel(x_ptr, sums_ptr, n, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
        pid = tl.program_id(0)
        offs = tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.int32)
        for start in range(pid * BLOCK * UNROLL, n, tl.num_programs(0) * BLOCK * UNROLL):
            for i in tl.static_range(UNROLL):
                total += tl.load(x_ptr + start + i * BLOCK + offs)
        tl.store(sums_ptr + pid, tl.sum(total.to(tl.int64)))

    return _read_bandwidth_kernel
