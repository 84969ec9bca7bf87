"""`kimi-kernels serve-check`: SGLang's engine without and with the flag on the same prompts, side by side.

Each engine runs in a process of its own, one after the other, so that the second finds the device memory free. This
module knows neither SGLang nor the plugin: `sglang_integration.engine_run` is started as a program.
"""

import argparse
import importlib.util
import json
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from kimi_kernels.commands import UsageError
from kimi_kernels.commands.common import plain_table, positive
from kimi_kernels.hf_config import load_config

PROGRAM = "sglang_integration.engine_run"
STOCK = "stock"
# column -> arguments of sglang.Engine on top of the common ones
VARIANTS: dict[str, dict[str, object]] = {
    "flag": {"enable_nvidia_megakernel": True},
    "per-op": {"linear_attn_decode_backend": "kimi_triton"},
}
LOG_LINE = re.compile(r"(NVIDIA megakernel: .*|kimi-kernels: .*)")
ERROR_LINES = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", metavar="DIR", help="checkpoint directory that SGLang can serve")
    parser.add_argument("--batch", type=positive, default=4, metavar="B", help="prompts at once (default 4)")
    parser.add_argument("--prompt-length", type=positive, default=16, metavar="N", help="tokens each (default 16)")
    parser.add_argument("--new", type=positive, default=64, metavar="N", help="tokens to generate (default 64)")
    parser.add_argument(
        "--warm-up", type=positive, default=1, metavar="N", help="rounds before the timed one (default 1)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the random prompts (default 0)")
    parser.add_argument("--against", choices=VARIANTS, default="flag", help="what runs beside stock (default flag)")
    parser.add_argument(
        "--engine", type=_settings, default={}, metavar="JSON", help="more arguments of sglang.Engine, as an object"
    )


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
    prompts = [[draw.randrange(config.vocab_size) for _ in range(args.prompt_length)] for _ in range(args.batch)]
    # one token is prefill alone: the difference to a full round is the decode steps
    full, prefill = ({"prompts": prompts, "new": [new] * args.batch} for new in (args.new, 1))
    rounds = [full] * args.warm_up + [prefill, full]
    common = {"model_path": args.dir, "skip_tokenizer_init": True, "disable_radix_cache": True, "log_level": "info"}
    results, logs = {}, {}
    variants: dict[str, dict[str, object]] = {STOCK: {}, args.against: VARIANTS[args.against]}
    for name, extra in variants.items():
        job = {"engine": {**common, **args.engine, **extra}, "rounds": rounds}
        results[name], logs[name] = _run_engine(name, job)
    stock, ours = (results[name]["rounds"][-1] for name in (STOCK, args.against))
    return {
        "directory": args.dir,
        "against": args.against,
        "batch": args.batch,
        "new": args.new,
        "prompts": prompts,
        "tokens": {STOCK: stock["tokens"], args.against: ours["tokens"]},
        "logprobs": {STOCK: stock["logprobs"], args.against: ours["logprobs"]},
        "equal_tokens": [_equal(a, b) for a, b in zip(stock["tokens"], ours["tokens"], strict=True)],
        "worst_logprob_difference": _worst(stock, ours),
        "ms_per_token": {name: _ms_per_token(result["rounds"], args.new) for name, result in results.items()},
        "log": LOG_LINE.findall(logs[args.against]),
    }


def _run_engine(name: str, job: dict) -> tuple[dict, str]:
    """Result and log of one engine. Raises UsageError with the end of the log where it did not get that far."""
    with tempfile.TemporaryDirectory() as folder:
        job_file, result_file = Path(folder) / "job.json", Path(folder) / "result.json"
        job_file.write_text(json.dumps(job))
        command = [sys.executable, "-m", PROGRAM, str(job_file), str(result_file)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            end = "\n  ".join(done.stdout.strip().splitlines()[-ERROR_LINES:])
            raise UsageError(f"the {name} engine ended with {done.returncode}:\n  {end}")
        return json.loads(result_file.read_text()), done.stdout


def _ms_per_token(rounds: list[dict], new: int) -> float | None:
    """Of one decode step: the last round less its prefill, which the round before is; None where that is too short."""
    seconds = rounds[-1]["seconds"] - rounds[-2]["seconds"]
    return 1e3 * seconds / (new - 1) if new > 1 and seconds > 0 else None


def _equal(left: list[int], right: list[int]) -> int:
    """Tokens until the first that differs; after it the sequences are different texts."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b), len(left))


def _worst(stock: dict, ours: dict) -> float:
    """Largest difference of logprobs of tokens that both chose after the same text."""
    differences = [0.0]
    for theirs, mine, left, right in zip(
        stock["tokens"], ours["tokens"], stock["logprobs"], ours["logprobs"], strict=True
    ):
        same = _equal(theirs, mine)
        differences += [abs(a - b) for a, b in zip(left[:same], right[:same], strict=True)]
    return max(differences)


def show(result: dict, console: Console) -> None:
    names = [STOCK, result["against"]]
    table = plain_table("greedy tokens", "prompt", ["equal", "of"])
    for index, equal in enumerate(result["equal_tokens"]):
        table.add_row(str(index), str(equal), str(result["new"]))
    console.print(table)
    console.print(f"logprobs    differ by {result['worst_logprob_difference']:.2e} at most, where the text is the same")
    for name in names:
        if (speed := result["ms_per_token"][name]) is not None:
            rate = f"{1e3 / speed:,.1f} tokens/s for each of {result['batch']}"
            console.print(f"{name:10}  {speed:,.3f} ms per token, {rate}")
    for line in result["log"]:
        console.print(f"log         {line}", soft_wrap=True)
