"""`kimi-kernels info`: bytes of a decode step by op and by part of the model, and the floor they set."""

import argparse
import re

from rich.console import Console

from kimi_kernels.commands import UsageError
from kimi_kernels.commands.common import add_tp_argument, plain_table, positive
from kimi_kernels.config import CONFIGS
from kimi_kernels.hf_config import load_config
from kimi_kernels.hf_fields import MAX_INTEGER
from kimi_kernels.meta_weights import meta_weights
from kimi_kernels.op_specs import OPS
from kimi_kernels.places import PARTS
from kimi_kernels.traffic import OpCall, floor_us, record_step, resident_bytes, sequence_bytes, total_bytes

CONTEXT = 1024  # or as many positions as the model has
OVERFLOW = re.compile("overflow", re.IGNORECASE)
READ_TB_PER_S = 4.56  # one H200, long reads, measured


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("dir", metavar="DIR", nargs="?", help="checkpoint directory; only config.json is read")
    model.add_argument("--config", choices=CONFIGS, metavar="NAME", help=f"built-in config: {', '.join(CONFIGS)}")
    add_tp_argument(parser)
    parser.add_argument("--rows", type=positive, default=1, metavar="R", help="sequences, one token each (default 1)")
    parser.add_argument(
        "--context", type=positive, metavar="C", help=f"cached tokens of each (default {CONTEXT}, or all if fewer)"
    )
    parser.add_argument(
        "--bandwidth", type=_bandwidth, default=READ_TB_PER_S, metavar="TB/S", help=f"default {READ_TB_PER_S}, an H200"
    )


def _bandwidth(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number of TB/s, got {text!r}")
    return value


def run(args: argparse.Namespace) -> dict:
    config = CONFIGS[args.config] if args.config else load_config(args.dir)
    context = min(CONTEXT, config.max_positions) if args.context is None else args.context
    if context > config.max_positions:
        raise UsageError(f"--context {context}: the model has {config.max_positions} positions")
    if args.rows > MAX_INTEGER:
        raise UsageError(f"--rows: expected at most {MAX_INTEGER}, got {args.rows}")
    try:
        calls = record_step(config, args.tp, args.rows, context)
    except (RuntimeError, TypeError, OverflowError) as error:  # torch's for sizes beyond int64, meta tensors too
        if not OVERFLOW.search(str(error)):
            raise
        raise UsageError(f"a tensor of this model with {args.rows} rows and context {context} is too large") from error
    total = total_bytes(calls)
    by_op = [_line("op", op, [c for c in calls if c.op == op], total, args.bandwidth) for op in OPS]
    by_part = [_line("part", part, [c for c in calls if c.part == part], total, args.bandwidth) for part in PARTS]
    return {
        "model": args.config or args.dir,
        "family": config.family,
        "tp": args.tp,
        "rows": args.rows,
        "context": context,
        "bandwidth_tb_per_s": args.bandwidth,
        "bytes_per_step": total,
        "bytes_per_token": total / args.rows,
        "activation_bytes_per_step": sum(call.activation_bytes for call in calls),
        "floor_us": floor_us(total, args.bandwidth),
        "resident_weight_bytes": resident_bytes(meta_weights(config, args.tp)),
        "state_bytes_per_sequence": sequence_bytes(config.shard(args.tp), context),
        "ops": [line for line in by_op if line["calls"]],
        "parts": [line for line in by_part if line["calls"]],
    }


def _line(kind: str, name: str, calls: list[OpCall], total: int, bandwidth: float) -> dict:
    moved = total_bytes(calls)
    return {
        kind: name,
        "calls": len(calls),
        "weight_bytes": sum(call.weight_bytes for call in calls),
        "state_bytes": sum(call.state_bytes for call in calls),
        "activation_bytes": sum(call.activation_bytes for call in calls),
        "share": moved / total,
        "floor_us": floor_us(moved, bandwidth),
    }


def show(result: dict, console: Console) -> None:
    title = f"{result['model']}  tp {result['tp']}, rows {result['rows']}, context {result['context']}, one rank"
    for kind in ("part", "op"):
        headings = ["calls", "weights\nMB", "state\nMB", "activations\nMB", "share\n%", "floor\nus"]
        table = plain_table(title if kind == "part" else None, kind, headings)
        for line in result[f"{kind}s"]:
            sizes = [f"{line[f'{what}_bytes'] / 1e6:,.2f}" for what in ("weight", "state", "activation")]
            table.add_row(
                line[kind], str(line["calls"]), *sizes, f"{100 * line['share']:.1f}", f"{line['floor_us']:,.1f}"
            )
        console.print(table)
    console.print(
        f"per step    {result['bytes_per_step'] / 1e6:,.1f} MB of weights and state, "
        f"{result['bytes_per_token'] / 1e6:,.1f} MB per token\n"
        f"floor       {result['floor_us']:,.1f} us at {result['bandwidth_tb_per_s']} TB/s\n"
        f"resident    {result['resident_weight_bytes'] / 1e9:,.2f} GB of weights, "
        f"{result['state_bytes_per_sequence'] / 1e6:,.2f} MB of state per sequence",
        soft_wrap=True,
    )
