"""`kimi-kernels make-mini`: writes a MINI checkpoint of one family."""

import argparse
from pathlib import Path

from rich.console import Console

from kimi_kernels.commands import UsageError

FAMILIES = ("k3", "kimi-linear")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", metavar="DIR", help="directory to write, created if needed")
    parser.add_argument("--family", choices=FAMILIES, required=True, help="which released format")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the random weights (default 0)")


def run(args: argparse.Namespace) -> dict:
    from kimi_kernels.mini import make_mini

    if not -(2**63) <= args.seed < 2**64:
        raise UsageError(f"--seed: expected an integer of 64 bits, got {args.seed}")
    directory = Path(args.dir)
    make_mini(directory, args.family, args.seed)
    files = sorted(path for path in directory.iterdir() if path.is_file())
    return {
        "directory": str(directory),
        "family": args.family,
        "seed": args.seed,
        "files": [path.name for path in files],
        "bytes": sum(path.stat().st_size for path in files),
    }


def show(result: dict, console: Console) -> None:
    console.print(
        f"{result['family']} checkpoint, seed {result['seed']}, in {result['directory']}: "
        f"{len(result['files'])} files, {result['bytes'] / 1e6:.2f} MB",
        soft_wrap=True,
    )
