"""`kimi-kernels compare`: two backends side by side, op by op on the same inputs, against the bound of each op."""

import argparse
from dataclasses import asdict

from rich.console import Console

from kimi_kernels.backends import BACKENDS
from kimi_kernels.commands import UsageError, common
from kimi_kernels.compare_fused import FUSED, compare_fused
from kimi_kernels.compare_step import compare_step
from kimi_kernels.hf_config import load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model_arguments(parser)
    parser.add_argument("--left", choices=BACKENDS, default="reference", help="its outputs go on; default reference")
    parser.add_argument("--right", choices=BACKENDS, default="triton", help="default triton")
    parser.add_argument("--steps", type=common.positive, default=4, metavar="N", help="decode steps (default 4)")
    parser.add_argument(
        "--tokens", type=common.token_ids, default=[1], metavar="IDS", help="fed first, then greedy tokens (default 1)"
    )


def run(args: argparse.Namespace) -> dict:
    config = load_config(args.dir)
    local, layers = common.check_rank(args, config), common.pick_layers(args.layers, config)
    device = common.pick_device(args.device)
    common.check_tokens(args.tokens, args.steps, config)
    if args.left == args.right == FUSED:
        raise UsageError(f"--left and --right: {FUSED} taps one side only")
    for backend in sorted({args.left, args.right}):
        common.backend_ops(backend, device, config.dtype)
    weights = common.read_weights(args, config, layers, device)
    compare = compare_fused if FUSED in (args.left, args.right) else compare_step
    report = compare(args.left, args.right, local, weights, args.tokens, args.steps, device, progress=not args.json)
    return {
        "passed": report.passed,
        "failure": report.failure or None,
        "left": args.left,
        "right": args.right,
        "device": device,
        "steps": report.steps,
        "fed": report.fed,
        "ops": [asdict(op) for op in report.ops.values()],
    }


def show(result: dict, console: Console) -> None:
    title = "worst error as a fraction of its bound"
    table = common.plain_table(title, "op", ["calls", result["left"], result["right"]])
    table.add_column("worst at")
    for op in result["ops"]:
        worst = op["left_where"] if op["left_ratio"] > op["right_ratio"] else op["right_where"]
        table.add_row(op["op"], str(op["calls"]), f"{op['left_ratio']:.3f}", f"{op['right_ratio']:.3f}", worst)
    console.print(table)
    verdict = "every op within its bound" if result["passed"] else "an op left its bound"
    console.print(f"{result['steps']} steps, {verdict}")
