"""`kimi-kernels trace`: one step of the megakernel, row by row and SM by SM."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

from kimi_kernels.backends import check_megakernel
from kimi_kernels.commands import common
from kimi_kernels.decoder import Decoder
from kimi_kernels.hf_config import load_config
from kimi_kernels.trace_report import chrome_trace, row_times

WARM_STEPS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model_arguments(parser)
    parser.add_argument("--rows", type=common.positive, default=1, metavar="R", help="sequences, 1 to 8 (default 1)")
    parser.add_argument("--context", type=common.positive, default=64, metavar="C", help="cached tokens (default 64)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write a Perfetto file (JSON) there")


def run(args: argparse.Namespace) -> dict:
    config = load_config(args.dir)
    local, layers = common.check_rank(args, config), common.pick_layers(args.layers, config)
    device = common.pick_device(args.device)
    context = args.context + WARM_STEPS + 1
    common.check_tokens([1], context, config)
    check_megakernel(device, config.dtype, args.rows)
    weights = common.read_weights(args, config, layers, device)
    options = {"trace": True}
    decoder = Decoder(local, weights, "megakernel", args.rows, context, device, kernel_options=options)
    kernel = decoder.kernel
    assert kernel is not None
    token = torch.ones(args.rows, dtype=torch.int64, device=device)
    token = decoder.step(token).tokens.clone()
    decoder.batch.seq_lens.fill_(args.context)  # positions that no step wrote hold zeros
    for _ in range(WARM_STEPS):
        token = decoder.step(token).tokens.clone()
    decoder.check()
    names = [row.name for row in kernel.schedule.rows]
    times = kernel.times.cpu().reshape(-1, len(names), 2)
    if args.output:
        args.output.write_text(json.dumps(chrome_trace(times, names)) + "\n")
    rows = [asdict(row) for row in row_times(times, names)]
    return {
        "device": device,
        "sms": times.shape[0],
        "rows": args.rows,
        "context": args.context,
        "step_us": max(row["end_us"] for row in rows),
        "table": rows,
        "output": str(args.output) if args.output else None,
    }


def show(result: dict, console: Console) -> None:
    title = "us since the first SM began; time of an SM with its waits"
    headings = ["SMs", "first\nstart", "median\nstart", "median\nend", "last\nend", "median\ntime", "max\ntime"]
    table = common.plain_table(title, "row", headings)
    figures = ("start_us", "start_median_us", "end_median_us", "end_us", "median_us", "max_us")
    for row in result["table"]:
        name = f"{row['row']} {row['name']}"
        table.add_row(name, str(row["sms"]), *(f"{row[figure]:.2f}" for figure in figures))
    console.print(table)
    console.print(f"step    {result['step_us']:,.2f} us on {result['sms']} SMs, with the cost of tracing")
    if result["output"]:
        console.print(f"file    {result['output']}", soft_wrap=True)
