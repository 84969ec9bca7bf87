"""`kimi-kernels bench`: times of ops and layers on the GPU, correctness first, other packages beside ours.

Each op runs at the shapes that one decode step gives it. It is compared with the float64 reference on those inputs;
only where that passes is it timed: one CUDA graph with a call per distinct input set, more than 220 MB in total so that
L2 is cold (ops with too little data for that are marked warm), median of 15 replays. The read ceiling that the shares
refer to is measured in the same run. A row that fails says why; the run goes on and ends with exit code 1.
`--backend megakernel` measures layers and model of the fused kernel and of the Triton ops (`bench_megakernel.py`).
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from rich.console import Console

from kimi_kernels import bench_cases, bench_inputs, bench_timing
from kimi_kernels.backends import BackendError, check_megakernel, make_ops
from kimi_kernels.bench_cases import Case, step_cases
from kimi_kernels.bench_layers import chain_specs
from kimi_kernels.bench_megakernel import NAME as FUSED
from kimi_kernels.bench_megakernel import FusedBench
from kimi_kernels.bench_peers import PEERS
from kimi_kernels.bench_rows import OURS, Bench, Row
from kimi_kernels.bench_timing import read_ceiling, time_graph
from kimi_kernels.commands import UsageError
from kimi_kernels.commands.common import add_tp_argument, plain_table, positive
from kimi_kernels.config import CONFIGS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", choices=CONFIGS, default="k3", metavar="NAME", help=f"{', '.join(CONFIGS)}")
    add_tp_argument(parser)
    parser.add_argument("--rows", type=positive, default=1, metavar="R", help="sequences, one token each (default 1)")
    parser.add_argument("--context", type=positive, default=1024, metavar="C", help="cached tokens (default 1024)")
    parser.add_argument("--ops", metavar="A,B", help="only these ops, or op/weight such as linear/lm_head")
    parser.add_argument(
        "--layers", action=argparse.BooleanOptionalAction, help="time whole layers too (default: without --ops)"
    )
    parser.add_argument(
        "--backend", choices=(OURS, FUSED), default=OURS, help=f"{FUSED}: layers and model only (default {OURS})"
    )
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help="time other packages")
    parser.add_argument("--seed", type=int, help="of the random inputs (default: a fresh one)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the JSON there, after every row")


def run(args: argparse.Namespace) -> dict:
    config = CONFIGS[args.config]
    config.shard(args.tp)
    if args.context > config.max_positions:
        raise UsageError(f"--context {args.context}: the model has {config.max_positions} positions")
    cases = pick_cases(step_cases(config, args.tp, args.rows, args.context), args.ops)
    if not torch.cuda.is_available():
        raise BackendError("bench needs a CUDA GPU, and torch sees none here")
    if args.backend == FUSED:
        check_megakernel("cuda", config.dtype, args.rows)
    seed = int.from_bytes(os.urandom(4), "big") if args.seed is None else args.seed
    result = {**describe_run(args, seed), "passed": False, "failure": "not finished", "results": []}
    progress = Console(stderr=True, highlight=False)

    def report(row: Row) -> None:
        result["results"].append(asdict(row))
        progress.print(_progress_line(row), soft_wrap=True, markup=False)
        if args.output:
            write_json(args.output, result)

    ceiling, failures = None, []
    try:
        ceiling, shapes = read_ceiling()
        result["read_ceiling"] = {"gb_per_s": ceiling / 1e9, "bytes": bench_timing.CEILING_BYTES, "shapes": shapes}
        progress.print(f"read ceiling {ceiling / 1e9:,.0f} GB/s")
    except Exception as error:
        failures.append(f"read ceiling: {type(error).__name__}: {error}")
    generator = torch.Generator("cuda").manual_seed(seed)
    bench = Bench(
        config, args.tp, args.rows, args.context, make_ops("triton", "cuda"), generator, time_graph, ceiling, report
    )
    if args.backend == FUSED:
        FusedBench(bench).measure()
    else:
        for case in cases:
            bench.measure_op(case, PEERS.get(case.op, ()) if args.peers else ())
        if args.layers or (args.layers is None and args.ops is None):
            for spec in chain_specs(config, args.tp):
                bench.measure_layer(spec)
    result["machine_after"] = describe_clocks()
    failures += [f"{row.name} by {row.by}: {row.failure}" for row in bench.rows if row.failure]
    result |= {"passed": not failures, "failure": "\n".join(failures)}
    if args.output:
        write_json(args.output, result)
    return result


def pick_cases(cases: list[Case], wanted: str | None) -> list[Case]:
    """The cases that `--ops` names, by op or by full name. Raises UsageError for a name that none has."""
    if wanted is None:
        return cases
    names = [name.strip() for name in wanted.split(",")]
    known = {case.op for case in cases} | {case.name for case in cases}
    if unknown := [name for name in names if name not in known]:
        listed = ", ".join(sorted(case.name for case in cases))
        raise UsageError(f"--ops {','.join(unknown)}: not among the ops of this step, which are {listed}")
    return [case for case in cases if case.op in names or case.name in names]


def show(result: dict, console: Console) -> None:
    machine, ceiling = result["machine"], result.get("read_ceiling", {}).get("gb_per_s")
    title = f"{result['config']}  tp {result['tp']}, rows {result['rows']}, context {result['context']}, one rank"
    table = plain_table(title, "op", ["us", "p20-p80", "MB", "GB/s", "share\n%", "error"])
    table.add_column("by")
    for row in result["results"]:
        table.add_row(row["name"] if row["kind"] != "peer" else "", *_cells(row), _remark(row))
    console.print(table)
    rate = f"{ceiling:,.0f} GB/s read ceiling, measured" if ceiling else "no read ceiling"
    console.print(
        f"{machine['gpu']}, {machine['sms']} SMs, driver {machine.get('driver_version', 'unknown')}; {rate}\n"
        "us: median per call in one CUDA graph; error: ours as a fraction of its bound, others relative (r)\n"
        "warm: too little data to leave the cache; layers: bytes are weights and state",
        soft_wrap=True,
        highlight=False,
    )


def _cells(row: dict) -> list[str]:
    if row["us"] is None:
        return ["failed" if row["failure"] else "-", "", "", "", "", ""]
    error = "" if row["worst_over_bound"] is None else f"{row['worst_over_bound']:.2f}"
    if row["relative_error"] is not None:
        error = f"{row['relative_error']:.1e} r"
    share = "" if row["share_of_ceiling"] is None else f"{100 * row['share_of_ceiling']:.1f}"
    spread = f"{row['p20_us']:.2f}-{row['p80_us']:.2f}"
    return [f"{row['us']:.2f}", spread, f"{row['bytes'] / 1e6:,.2f}", f"{row['gb_per_s']:,.0f}", share, error]


def _remark(row: dict) -> str:
    remarks = [row["note"], "" if row["cold"] or row["us"] is None else "warm", row["missing"]]
    return ", ".join([row["by"], *(remark for remark in remarks if remark)])


def _progress_line(row: Row) -> str:
    value = f"{row.us:9.2f} us" if row.us is not None else f"failed: {row.failure}" if row.failure else row.missing
    return f"{row.name:30} {row.by:32} {value}"


def describe_run(args: argparse.Namespace, seed: int) -> dict:
    """Everything needed to read the numbers: machine, versions, commit, command line, shapes, inputs."""
    return {
        **describe_machine(),
        "config": args.config,
        "tp": args.tp,
        "rows": args.rows,
        "context": args.context,
        "backend": args.backend,
        "seed": seed,
        "inputs": bench_inputs.DISTRIBUTION,
        "cold_bytes": bench_cases.COLD_BYTES,
        "replays": bench_timing.REPLAYS,
    }


def describe_machine() -> dict:
    """Machine, versions, commit and command line."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "machine": {
            "gpu": properties.name,
            "sms": properties.multi_processor_count,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
            **describe_clocks(),
        },
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "packages": {name: _version(name) for name in ("triton", "fla-core", "nvidia-cutlass-dsl")},
        "commit": _command_output(
            "git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"
        ),
        "command": sys.argv,
    }


def describe_clocks() -> dict[str, str]:
    """Driver, clocks and power as nvidia-smi gives them; empty where it does not run."""
    fields = (
        "driver_version",
        "clocks.sm",
        "clocks.mem",
        "clocks.max.sm",
        "power.draw",
        "power.limit",
        "temperature.gpu",
    )
    line = _command_output("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0")
    values = [value.strip() for value in (line or "").splitlines()[:1] for value in value.split(",")]
    return dict(zip(fields, values, strict=True)) if len(values) == len(fields) else {}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _command_output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def write_json(path: Path, result: dict) -> None:
    """The whole file or none of it."""
    partial_path = path.with_name(path.name + ".partial")
    partial_path.write_text(json.dumps(result, indent=1) + "\n")
    partial_path.replace(path)


def main(argv: list[str] | None = None) -> int:
    from kimi_kernels import cli

    return cli.main(["bench", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
