"""The megakernel beside the Triton ops at the sizes that count, in one run: every op correct first, then timed.

    python benchmarks/megakernel.py                                                 three cases, batch 1, context 1024
    python benchmarks/megakernel.py --cases k3-tp16 --rows 1,2,4,8 --contexts 1024,4096,32768 --output FILE

    kimi-linear     Kimi-Linear-48B, whole model
    k3-tp8-layer    one more KDA+MoE layer of a K3 TP8 rank, router and latent projections sharded
    k3-tp16         all 93 layers of a K3 TP16 rank, router and latent projections sharded

Random weights, one rank, no collectives: `kimi_kernels/bench_megakernel.py` says what a row is. The floor is the bytes
of the row at the read ceiling, which is measured in the same run. Prints a table; `--output` keeps all rows as JSON,
written after every row. Exit code 1 where a row failed.
"""

import argparse
import itertools
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kimi_kernels.backends import BackendError, check_megakernel, make_ops
from kimi_kernels.bench import describe_machine, write_json
from kimi_kernels.bench_megakernel import NAME, FusedBench, fused_schedule, layer_walks, walk_layers
from kimi_kernels.bench_rows import Bench, Row
from kimi_kernels.bench_timing import read_ceiling, time_graph
from kimi_kernels.commands.common import plain_table
from kimi_kernels.config import CONFIGS


@dataclass(frozen=True)
class Case:
    config: str
    tp: int
    part: str  # "layer" | "model"
    sharded: bool

    def walks(self) -> list[list[int] | None]:
        """Layers of the step that is checked, and of those that are timed."""
        config = CONFIGS[self.config]
        return [walk_layers(config), *(layer_walks(config) if self.part == "layer" else [None])]


CASES = {
    "kimi-linear": Case("kimi-linear-48b", 1, "model", False),
    "k3-tp8-layer": Case("k3", 8, "layer", True),
    "k3-tp16": Case("k3", 16, "model", True),
}


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), metavar="A,B", help="default all three")
    parser.add_argument("--rows", type=numbers, default=[1], metavar="R,R", help="sequences, 1 to 8 (default 1)")
    parser.add_argument("--contexts", type=numbers, default=[1024], metavar="C,C", help="cached tokens (default 1024)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON of all rows")
    args = parser.parse_args(argv)
    if unknown := set(args.cases.split(",")) - set(CASES):
        parser.error(f"--cases: {', '.join(sorted(unknown))} is not among {', '.join(CASES)}")
    cases = {name: CASES[name] for name in args.cases.split(",")}
    try:
        for rows in args.rows:
            check_megakernel("cuda", torch.bfloat16, rows)
    except (BackendError, ValueError) as error:
        parser.exit(2, f"{error}\n")
    build_ahead([(case, rows) for case in cases.values() for rows in args.rows])
    ceiling, shapes = read_ceiling()
    result: dict = {**describe_machine(), "passed": False, "read_ceiling_gb_per_s": ceiling / 1e9, "shapes": shapes}
    result["results"] = []
    for (name, case), rows, context in itertools.product(cases.items(), args.rows, args.contexts):
        for row in measure(case, rows, context, ceiling):
            result["results"].append({"case": name, "rows": rows, "context": context, **asdict(row)})
        if args.output:
            write_json(args.output, result)
    failures = [f"{row['case']} by {row['by']}: {row['failure']}" for row in result["results"] if row["failure"]]
    result["passed"] = not failures
    if args.output:
        write_json(args.output, result)
    Console().print(table(result))
    for failure in failures:
        sys.stderr.write(f"{failure}\n")
    return 1 if failures else 0


def build_ahead(wanted: list[tuple[Case, int]]) -> None:
    """Kernels and proofs of all that will run, into the cache, each case in a process of its own."""
    sms, arch = torch.cuda.get_device_properties(0).multi_processor_count, torch.cuda.get_device_capability()
    with ProcessPoolExecutor(8, multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(build, case, rows, sms, f"sm_{arch[0]}{arch[1]}a") for case, rows in wanted]:
            done.exception()  # if one fails, so does its row, and says why


def build(case: Case, rows: int, sms: int, arch: str) -> None:
    from cute_megakernel.build import machine_code, prove

    for layers in case.walks():
        schedule = fused_schedule(CONFIGS[case.config], case.tp, rows, layers, case.sharded, sms)
        machine_code(schedule.shape, arch)
        prove(schedule)


def measure(case: Case, rows: int, context: int, ceiling: float) -> list[Row]:
    """Two rows: the Triton ops, the megakernel."""
    console = Console(stderr=True, highlight=False)

    def report(row: Row) -> None:
        shown = f"{row.us:10.2f} us" if row.us is not None else row.failure or row.missing
        text = f"{case.config} tp {case.tp} rows {rows} context {context}: {row.name} by {row.by} {shown}"
        console.print(text, soft_wrap=True, markup=False)

    generator = torch.Generator("cuda").manual_seed(0)
    ops = make_ops("triton", "cuda")
    bench = Bench(CONFIGS[case.config], case.tp, rows, context, ops, generator, time_graph, ceiling, report)
    fused = FusedBench(bench)
    (fused.measure_layer if case.part == "layer" else fused.measure_model)(case.sharded)
    return bench.rows


def table(result: dict) -> Table:
    """A line a case: both times, the floor, and the megakernel's share of the ceiling and worst error."""
    columns = ["rows", "context", "megakernel\nus", "Triton\nus", "floor\nus", "share\n%", "error"]
    shown = plain_table(
        f"{result['machine']['gpu']}, {result['read_ceiling_gb_per_s']:,.0f} GB/s read ceiling", "case", columns
    )
    rows = result["results"]
    for ours in (row for row in rows if row["by"] == NAME):
        key = ("case", "rows", "context", "name")
        other = next(row for row in rows if row["by"] != NAME and all(row[k] == ours[k] for k in key))
        figures = [ours["us"], other["us"], ours["floor_us"], ours["share_of_ceiling"], ours["worst_over_bound"]]
        scales = ("{:,.1f}", "{:,.1f}", "{:,.1f}", "{:.1%}", "{:.2f}")
        texts = ["-" if figure is None else scale.format(figure) for figure, scale in zip(figures, scales, strict=True)]
        shown.add_row(ours["case"], str(ours["rows"]), str(ours["context"]), *texts)
    return shown


if __name__ == "__main__":
    sys.exit(main())
