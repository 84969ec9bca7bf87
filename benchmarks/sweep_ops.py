"""Sweeps the launch configs of Triton ops on a GPU: which fields of `pick_<op>_config` would be faster at a real shape.

    python benchmarks/sweep_ops.py --config k3 --tp 8 --rows 1 --ops kda_recurrent,linear/kda_in_proj --output out.json
    python benchmarks/sweep_ops.py --ops mla_decode --values splits=16,33,66,132 num_warps=2,4,8 --seconds 120

Every config is the op's default with some fields replaced: neighbours of the default value, or the lists of `--values`.
Those that change the fewest fields come first. Kernels are compiled ahead in forked processes, on tensors without data,
into Triton's disk cache (for sm_90; another GPU compiles while it measures). On the GPU each config runs once and must
agree with the default, which must agree with the reference; then a graph of cold input sets is replayed a few times,
and the best ones more often. A config that does not compile, does not fit or is wrong is recorded.
"""

import argparse
import dataclasses
import importlib
import itertools
import json
import math
import multiprocessing
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kimi_kernels.bench import describe_run, pick_cases
from kimi_kernels.bench_cases import MIN_CALLS, Case, step_cases
from kimi_kernels.bench_inputs import input_sets
from kimi_kernels.bench_rows import explain
from kimi_kernels.bench_timing import Timing, time_graph
from kimi_kernels.compare import check_op, run_on_clones
from kimi_kernels.config import CONFIGS, TP_SIZES

QUICK_REPLAYS, FINAL_REPLAYS, FINALISTS = 5, 15, 6
AGREEMENT = 5e-3  # relative norm: two correct results differ in the rounding of some elements
STAGES = (1, 2, 3, 4, 6, 8)
FIELD_VALUES = {"num_warps": (1, 2, 4, 8, 16), "num_stages": STAGES, "stages": STAGES}
CASES: list[Case] = []  # inherited by the forked compilers


class Picks:
    """Stands in for every `pick_<op>_config` of triton_ops: notes the picks, and gives `chosen` where types agree."""

    def __init__(self) -> None:
        self.chosen: Any = None
        self.seen: list[Any] = []

    def install(self) -> "Picks":
        package = importlib.import_module("triton_ops")
        names = [f"triton_ops.{module.name}" for module in pkgutil.iter_modules(package.__path__)]
        for module in [importlib.import_module(name) for name in names]:
            for name, value in list(vars(module).items()):
                if name.startswith("pick_") and name.endswith("_config"):
                    setattr(module, name, self._wrap(value))
        return self

    def _wrap(self, pick: Callable) -> Callable:
        def picked(*args, **kwargs):
            config = pick(*args, **kwargs)
            self.seen.append(config)
            return self.chosen if type(self.chosen) is type(config) else config

        return picked

    def defaults(self, op: str, args: tuple) -> list[Any]:
        """The configs that one call of `op` picks, one of each type."""
        self.chosen, self.seen = None, []
        run_op(op, args)
        return list({type(config): config for config in self.seen}.values())


def run_op(op: str, args: tuple):
    return getattr(importlib.import_module(f"triton_ops.{op}"), op)(*args)


def variants(default: Any, values: dict[str, tuple], limit: int) -> list[Any]:
    """The default first, then configs with fields replaced, fewest and smallest changes first."""
    fields = {field.name: getattr(default, field.name) for field in dataclasses.fields(default)}
    lists = [field_values(name, value, values) for name, value in fields.items()]

    def distance(choice: tuple) -> tuple[int, float]:
        pairs = [(a, b) for a, b in zip(choice, fields.values(), strict=True) if a != b]
        return len(pairs), sum(abs(math.log2(a / b)) if a and b else 1.0 for a, b in pairs)

    ordered = sorted(itertools.product(*lists), key=distance)
    configs = [dataclasses.replace(default, **dict(zip(fields, choice, strict=True))) for choice in ordered]
    return [default, *(config for config in configs if config != default)][: max(1, limit)]


def field_values(name: str, value: Any, given: dict[str, tuple]) -> tuple:
    """What to try for a field: the given list, or the default's neighbours by factors of two."""
    if isinstance(value, bool):
        return (value, not value)
    if not isinstance(value, int):
        return (value,)
    listed = given.get(name, FIELD_VALUES.get(name, tuple(int(value * 2.0**e) for e in (-2, -1, 0, 1, 2))))
    return tuple(dict.fromkeys((value, *(v for v in listed if v >= 1))))


# compiling, in forked processes without a CUDA context


def start_compiler() -> None:
    """Turns every launch of this process into a compilation for sm_90."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Sm90Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    run = JITFunction.run
    driver.set_active(Sm90Driver())
    JITFunction.run = lambda self, *args, grid, warmup, **kwargs: run(self, *args, grid=grid, warmup=True, **kwargs)
    global PICKS
    PICKS = Picks().install()
    torch.set_num_threads(1)


def default_configs(index: int) -> list[Any]:
    """In a compiler process: the configs that case `index` picks; compiles them."""
    return PICKS.defaults(CASES[index].op, CASES[index].args)


def compile_variant(index: int, config: Any) -> str:
    """In a compiler process: compiles case `index` with `config`, in a child of its own; returns what went wrong."""

    def work() -> str:
        PICKS.chosen = config
        try:
            run_op(CASES[index].op, CASES[index].args)
            return ""
        except Exception as error:
            return explain(error)[:500]

    return in_child(work)


def in_child(work: Callable[[], str]) -> str:
    """What `work` returns in a forked process: a config that makes the compiler abort takes nothing else with it."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write_end, work().encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    return text if status == 0 else f"the compiler died with exit code {os.waitstatus_to_exitcode(status)}"


# measuring


@dataclasses.dataclass
class Result:
    """One config of one case."""

    config: dict[str, Any]
    type: str
    is_default: bool = False
    us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    replays: int = 0
    difference: float | None = None  # relative norm to the default's outputs
    failure: str = ""

    def set_timing(self, timing: Timing) -> None:
        self.us, self.p20_us, self.p80_us, self.replays = timing.us, timing.p20_us, timing.p80_us, timing.replays


class Sweep:
    """Measures the variants of one case on one device."""

    def __init__(self, case: Case, context: int, generator: torch.Generator, picks: Picks, timer=time_graph):
        self.case, self.picks, self.timer = case, picks, timer
        self.sets = input_sets(case, context, generator)
        (self.probe,) = input_sets(case, context, generator, count=1)  # never timed: timing moves the state on
        self.picks.chosen = None
        check_op(case.op, lambda *args: run_op(case.op, args), *self.probe)
        self.want = self._outputs()

    def measure(self, config: Any, result: Result, replays: int) -> None:
        """Fills in `result`; raises what the config raises."""
        self.picks.chosen = config
        result.difference = max((relative(a, b) for a, b in zip(self._outputs(), self.want, strict=True)), default=0.0)
        if not result.difference <= AGREEMENT:
            raise AssertionError(f"differs from the default by {result.difference:.3g}")
        sets = self.sets * math.ceil(MIN_CALLS / len(self.sets))

        def work() -> None:
            for args in sets:
                run_op(self.case.op, args)

        result.set_timing(self.timer(work, len(sets), 2, replays))

    def _outputs(self) -> list[torch.Tensor]:
        """Outputs and changed arguments of a run on the probe."""
        outputs, changed = run_on_clones(self.case.op, lambda *args: run_op(self.case.op, args), self.probe)
        outputs = () if outputs is None else outputs if isinstance(outputs, tuple) else (outputs,)
        return [*outputs, *changed.values()]


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm; infinite where integers differ or one has NaN where the other has not."""
    if not got.is_floating_point():
        return 0.0 if torch.equal(got, want) else math.inf
    if not torch.equal(got.isnan(), want.isnan()):
        return math.inf
    got, want = got.nan_to_num().double(), want.nan_to_num().double()
    norm = float(torch.linalg.vector_norm(want))
    if norm == 0:
        return math.inf if bool(got.any()) else 0.0
    return float(torch.linalg.vector_norm(got - want)) / norm


def sweep_case(sweep: Sweep, plan: Iterator[tuple[Any, Result, Future]], deadline: float) -> list[Result]:
    """Measures the plan until the deadline, then the fastest again with more replays."""
    results, configs = [], {}
    for config, result, compiled in plan:
        results.append(result)
        if time.monotonic() > deadline and not result.is_default:
            result.failure = "skipped: out of time"
            continue
        try:
            if failure := compiled.result(timeout=max(60.0, deadline - time.monotonic())):
                raise RuntimeError(failure)
            sweep.measure(config, result, QUICK_REPLAYS)
            configs[id(result)] = config
        except Exception as error:
            result.failure = explain(error)[:500]
            if device_is_lost():
                result.failure += " (the device is lost)"
                return results
    timed = sorted((result for result in results if result.us is not None), key=lambda result: result.us)
    for result in {id(r): r for r in [*timed[:FINALISTS], *(r for r in timed if r.is_default)]}.values():
        sweep.measure(configs[id(result)], result, FINAL_REPLAYS)
    return sorted(results, key=lambda result: (result.us is None, result.us or 0.0))


def device_is_lost() -> bool:
    """True where an earlier kernel left the CUDA context unusable: nothing more can be measured by this process."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except Exception:
        return True
    return False


def table(case: Case, results: list[Result], rows: int) -> str:
    """The fastest configs and the default, with fields that differ from the default."""
    defaults = {result.type: result for result in results if result.is_default}
    timed = [result for result in results if result.us is not None]
    lines = [f"{case.name}: {case.nbytes / 1e6:.3f} MB, {len(timed)} of {len(results)} configs timed"]
    for result in [*timed[:rows], *(r for r in timed[rows:] if r.is_default)]:
        base = defaults[result.type].config
        changes = " ".join(f"{k}={v}" for k, v in result.config.items() if v != base[k])
        shown = changes or "default: " + " ".join(f"{k}={v}" for k, v in base.items())
        spread = f"{result.p20_us:.2f}-{result.p80_us:.2f}"
        lines.append(f"  {result.us:9.2f} us  {spread:>17}  {case.nbytes / result.us / 1e3:7.0f} GB/s  {shown}")
    failures = [result for result in results if result.failure and not result.failure.startswith("skipped")]
    for text, count in {r.failure: sum(f.failure == r.failure for f in failures) for r in failures}.items():
        lines.append(f"  {count} failed: {text[:160]}")
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=CONFIGS, default="k3")
    parser.add_argument("--tp", type=int, choices=TP_SIZES, default=8)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument(
        "--ops", required=True, metavar="A,B", help="ops, or op/weight as `kimi-kernels bench` names them"
    )
    parser.add_argument("--values", nargs="*", default=[], metavar="FIELD=1,2", type=field_list)
    parser.add_argument("--max-configs", type=int, default=150, help="per config type of a case (default 150)")
    parser.add_argument("--seconds", type=float, default=420.0, help="time budget of the whole run (default 420)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="compiler processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=8, help="configs printed per case (default 8)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write all results there as JSON, after every case")
    return parser.parse_args(argv)


def field_list(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, numbers = text.partition("=")
    return name, tuple(int(number) for number in numbers.split(","))


def main(argv: list[str] | None = None) -> int:
    args, start = parse(argv), time.monotonic()
    os.environ.setdefault(
        "PYTORCH_NVML_BASED_CUDA_CHECK", "1"
    )  # looks for a GPU without a context, so that fork is safe
    CASES[:] = pick_cases(step_cases(CONFIGS[args.config], args.tp, args.rows, args.context), args.ops)
    if not torch.cuda.is_available():
        sys.stderr.write("sweep_ops: needs a CUDA GPU\n")
        return 2
    importlib.import_module("triton_ops")
    pool = compiler_pool(args.workers)
    try:
        return measure_all(args, make_plans(args, pool), start)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def compiler_pool(workers: int) -> ProcessPoolExecutor:
    """Forked from this process, before it has a CUDA context."""
    return ProcessPoolExecutor(max(1, workers), multiprocessing.get_context("fork"), initializer=start_compiler)


def make_plans(args: argparse.Namespace, pool: ProcessPoolExecutor) -> list[list[tuple[Any, Result, Future]]]:
    """Per case its configs with the futures of their compilation, all submitted."""
    defaults = [pool.submit(default_configs, index) for index in range(len(CASES))]
    plans = []
    for index, future in enumerate(defaults):
        plan: list[tuple[Any, Result, Future]] = []
        for default in future.result():
            for config in variants(default, dict(args.values), args.max_configs):
                result = Result(dataclasses.asdict(config), type(config).__name__, config == default)
                plan.append((config, result, pool.submit(compile_variant, index, config)))
        plans.append(plan)
    return plans


def measure_all(args: argparse.Namespace, plans: list, start: float) -> int:
    picks, generator = Picks().install(), torch.Generator("cuda").manual_seed(args.seed)
    report, failed = {**describe_run(args, args.seed), "cases": []}, False
    for done, (case, plan) in enumerate(zip(CASES, plans, strict=True)):
        now = time.monotonic()
        deadline = now + (start + args.seconds - now) / (len(CASES) - done)
        entry: dict[str, Any] = {"name": case.name, "bytes": case.nbytes, "sets": case.sets, "cold": case.cold}
        report["cases"].append(entry)
        try:
            results = sweep_case(Sweep(case, args.context, generator, picks), iter(plan), deadline)
            entry["results"] = [dataclasses.asdict(result) for result in results]
            print(table(case, results, args.show), flush=True)
        except Exception as error:
            failed = True
            entry["failure"] = explain(error)[:2000]
            print(f"{case.name}: failed: {entry['failure']}", flush=True)
        if args.output:
            args.output.write_text(json.dumps(report, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
