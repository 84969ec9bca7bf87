"""`kimi-kernels serve-check`: SGLang's engine without and with the plugin on the same prompts, side by side.

Each engine runs in processes of its own, one after the other, so that the next finds the device memory free; with
`--at-once` all start together and are timed one after the other. This module knows neither SGLang nor the plugin:
`sglang_integration.engine_run` is started as a program.
"""

import argparse
import importlib.util
import json
import random
import re
from collections.abc import Iterator

from rich.console import Console

from kimi_kernels.commands import UsageError
from kimi_kernels.commands.common import plain_table, positive
from kimi_kernels.commands.engines import run_engines
from kimi_kernels.hf_config import load_config

STOCK = "stock"
FLAG: dict[str, object] = {"enable_nvidia_megakernel": True}
# column -> arguments of sglang.Engine on top of the common ones, and variables of its environment
Variant = tuple[dict[str, object], dict[str, str]]
VARIANTS: dict[str, Variant] = {
    "flag": (FLAG, {}),
    "megakernel": (FLAG, {"KIMI_SGLANG_RUNNER": "megakernel"}),
    "triton": (FLAG, {"KIMI_SGLANG_RUNNER": "triton"}),
    "per-op": ({"linear_attn_decode_backend": "kimi_triton"}, {}),
}
LOG_LINE = re.compile(r"(NVIDIA megakernel: .*|kimi-kernels: .*)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", metavar="DIR", help="checkpoint directory that SGLang can serve")
    parser.add_argument(
        "--batch", type=_batches, default=[4], metavar="B,...", help="prompts at once, in turn (default 4)"
    )
    parser.add_argument("--prompt-length", type=positive, default=16, metavar="N", help="tokens each (default 16)")
    parser.add_argument("--new", type=positive, default=64, metavar="N", help="tokens to generate (default 64)")
    parser.add_argument(
        "--warm-up", type=positive, default=1, metavar="N", help="rounds before a timed one (default 1)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the random prompts (default 0)")
    parser.add_argument(
        "--against", type=_variants, default=["flag"], metavar="NAME,...",
        help=f"what runs beside stock, of {', '.join(VARIANTS)}; flag takes what runs here (default flag)",
    )  # fmt: skip
    parser.add_argument(
        "--engine", type=_settings, default={}, metavar="JSON", help="more arguments of sglang.Engine, as an object"
    )
    parser.add_argument(
        "--at-once", action="store_true",
        help="start all engines together: faster, and the device must hold them all (see --engine max_total_tokens)",
    )  # fmt: skip


def _batches(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def _variants(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in VARIANTS]:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(VARIANTS)}, got {unknown[0]!r}")
    return names


def _settings(text: str) -> dict:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return value


def run(args: argparse.Namespace) -> dict:
    config = load_config(args.dir)
    for package in ("sglang", "sglang_integration"):
        if importlib.util.find_spec(package) is None:
            raise UsageError(f'serve-check needs the package {package} (pip install "kimi-kernels[sglang]")')
    draw = random.Random(args.seed)
    prompts = [[draw.randrange(config.vocab_size) for _ in range(args.prompt_length)] for _ in range(max(args.batch))]
    rounds = [round_ for batch in args.batch for round_ in _rounds(prompts[:batch], args.new, args.warm_up)]
    common = {"model_path": args.dir, "skip_tokenizer_init": True, "disable_radix_cache": True, "log_level": "info"}
    variants: dict[str, Variant] = {STOCK: ({}, {})} | {name: VARIANTS[name] for name in args.against}
    jobs = {
        name: {"engine": {**common, **args.engine, **extra}, "rounds": rounds, "environment": environment}
        for name, (extra, environment) in variants.items()
    }
    results = run_engines(jobs, args.at_once)
    per_batch = len(rounds) // len(args.batch)
    return {
        "directory": args.dir,
        "new": args.new,
        "prompts": prompts,
        "start_seconds": {name: result["start_seconds"] for name, (result, _) in results.items()},
        "log": {name: LOG_LINE.findall(log) for name, (_, log) in results.items()},
        "batches": [
            {"batch": batch, **_compared({
                name: result["rounds"][index * per_batch : (index + 1) * per_batch]
                for name, (result, _) in results.items()
            }, args.new)}
            for index, batch in enumerate(args.batch)
        ],
    }  # fmt: skip


def _rounds(prompts: list[list[int]], new: int, warm_up: int) -> list[dict]:
    """Full rounds with logprobs, which cost time; then without: prefill alone, and full. Their difference is decode."""
    full, prefill = ({"prompts": prompts, "new": [count] * len(prompts)} for count in (new, 1))
    return [full | {"logprobs": True}] * warm_up + [prefill, full]


def _compared(rounds: dict[str, list[dict]], new: int) -> dict:
    """The last round with logprobs of each engine beside that of stock, and times."""
    stock, ours = rounds[STOCK][-3], {name: found[-3] for name, found in rounds.items() if name != STOCK}
    return {
        "ms_per_token": {name: _ms_per_token(found, new) for name, found in rounds.items()},
        "equal_tokens": {
            name: [_equal(a, b) for a, b in zip(stock["tokens"], mine["tokens"], strict=True)]
            for name, mine in ours.items()
        },
        "worst_logprob_difference": {name: max(_differences(stock, mine), default=0.0) for name, mine in ours.items()},
        "tokens": {name: found[-3]["tokens"] for name, found in rounds.items()},
        "logprobs": {name: found[-3]["logprobs"] for name, found in rounds.items()},
    }


def _ms_per_token(rounds: list[dict], new: int) -> float | None:
    """Of one decode step: the last round less its prefill, which the round before is; None where that is too short."""
    seconds = rounds[-1]["seconds"] - rounds[-2]["seconds"]
    return 1e3 * seconds / (new - 1) if new > 1 and seconds > 0 else None


def _equal(left: list[int], right: list[int]) -> int:
    """Tokens until the first that differs; after it the sequences are different texts."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b), len(left))


def _differences(stock: dict, ours: dict) -> Iterator[float]:
    """Differences of logprobs of tokens that both chose after the same text."""
    for theirs, mine, left, right in zip(
        stock["tokens"], ours["tokens"], stock["logprobs"], ours["logprobs"], strict=True
    ):
        same = _equal(theirs, mine)
        yield from (abs(a - b) for a, b in zip(left[:same], right[:same], strict=True))


def show(result: dict, console: Console) -> None:
    names = list(result["start_seconds"])
    table = plain_table("ms per token, tokens/s of one sequence", "batch", [*names, *(f"{n} equal" for n in names[1:])])
    for batch in result["batches"]:
        speeds = [batch["ms_per_token"][name] for name in names]
        shown = ["-" if speed is None else f"{speed:,.3f}, {1e3 / speed:,.1f}" for speed in speeds]
        all_tokens = batch["batch"] * result["new"]
        equal = [f"{sum(batch['equal_tokens'][name])} of {all_tokens}" for name in names[1:]]
        table.add_row(str(batch["batch"]), *shown, *equal)
    console.print(table)
    for name in names[1:]:
        worst = max(batch["worst_logprob_difference"][name] for batch in result["batches"])
        console.print(f"{name:10}  logprobs differ by {worst:.2e} at most, where the text is the same")
    for name in names:
        console.print(f"{name:10}  up after {result['start_seconds'][name]:.1f} s")
        for line in result["log"][name]:
            console.print(f"{'':10}  {line}", soft_wrap=True)
