"""The console script `kimi-kernels`: picks the command, prints its result as text or JSON, bad input as one line.

    kimi-kernels decode DIR --tokens 1,2,3 --new 16 --backend triton --json

Exit codes: 0 done, 1 a comparison failed, 2 bad input, 130 interrupted, 141 the reader of stdout went away.
A command module has `add_arguments(parser)`, `run(args) -> dict` (the JSON object) and `show(result, console)`.
"""

import argparse
import importlib
import json
import math
import os
import re
import sys
from typing import NamedTuple, NoReturn

import torch
from rich.console import Console

from kimi_kernels.backends import BackendError
from kimi_kernels.commands import PROGRAM, UsageError


class Command(NamedTuple):
    module: str
    help: str
    example: str


COMMANDS = {
    "make-mini": Command(
        "kimi_kernels.commands.make_mini",
        "write a small checkpoint in the released format of a family",
        "make-mini k3-mini --family k3",
    ),
    "info": Command(
        "kimi_kernels.commands.info",
        "bytes that a decode step moves, by op, and the time they take at least",
        "info --config k3 --tp 8 --rows 1 --context 4096",
    ),
    "decode": Command(
        "kimi_kernels.commands.decode",
        "generate tokens greedily and time them",
        "decode k3-mini --tokens 1,2,3 --new 16 --backend triton",
    ),
    "emulate": Command(
        "kimi_kernels.commands.emulate",
        "generate tokens by the megakernel's schedule, run on the CPU",
        "emulate k3-mini --tokens 1,2,3 --new 4",
    ),
    "compare": Command(
        "kimi_kernels.commands.compare",
        "run two backends op by op on the same inputs and check both against the error bound",
        "compare k3-mini --left reference --right triton --steps 4",
    ),
    "trace": Command(
        "kimi_kernels.commands.trace",
        "run a step of the megakernel and say when each SM was at each row",
        "trace k3-mini --output step.json",
    ),
    "bench": Command(
        "kimi_kernels.bench",
        "time every op on the GPU, correctness first",
        "bench --config k3 --tp 8 --rows 1",
    ),
    "serve-check": Command(
        "kimi_kernels.commands.serve_check",
        "run SGLang's engine without and with the flag and compare tokens, logprobs and speed",
        "serve-check DIR --batch 4 --new 64",
    ),
}


ALLOCATION = re.compile("allocate memory|out of memory|Storage size calculation overflowed")  # torch's RuntimeErrors


class PipeConsole(Console):
    """Lets main see that the reader of stdout went away; rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        raise BrokenPipeError


class Parser(argparse.ArgumentParser):
    """Raises where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    try:
        code = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except (ValueError, BackendError, OSError, torch.OutOfMemoryError) as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the exit of Python flushes once more
            return 141
        _error(str(error))
        return 2
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not ALLOCATION.search(str(error)):
            raise
        _error(f"out of memory: {str(error).strip().splitlines()[0]}" if str(error).strip() else "out of memory")
        return 2
    except KeyboardInterrupt:
        return 130


def _run(argv: list[str]) -> int:
    name = _top_parser().parse_args(argv[:1]).command
    command = COMMANDS[name]
    module = importlib.import_module(command.module)
    parser = Parser(
        prog=f"{PROGRAM} {name}",
        description=command.help,
        epilog=f"example: {PROGRAM} {command.example}",
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    args = parser.parse_args(argv[1:])
    result = module.run(args)
    if args.json:
        sys.stdout.write(json.dumps(_plain(result), allow_nan=False) + "\n")
    else:
        module.show(result, PipeConsole(markup=False, highlight=False))
    if result.get("passed", True):
        return 0
    _error(result["failure"])
    return 1


def _top_parser() -> Parser:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items()]
    examples = [f"  {PROGRAM} {command.example}" for command in COMMANDS.values()]
    parser = Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} COMMAND [--help] [--json] ...",
        description="Decode kernels for Kimi K3 and Kimi-Linear.",
        epilog="\n".join(["commands:", *lines, "", "examples:", *examples]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of those below")
    return parser


def _error(message: str) -> None:
    """One line on stderr; indented lines below a first one are the items it announces."""
    announced = re.sub(r"\A([^\n]*?):?\n\s+", r"\1: ", message.strip())
    line = re.sub(r"\n\s*", "; ", re.sub(r":\n\s*", ": ", announced))
    sys.stderr.write(f"{PROGRAM}: error: {line}\n")


def _plain(value):
    """`value` with NaN and infinities, which JSON does not have, as null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main())
