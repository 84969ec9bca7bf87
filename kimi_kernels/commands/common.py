"""Arguments and checks that several commands share. Everything is checked before weights are read."""

import argparse
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch
from rich import box
from rich.table import Table

from kimi_kernels.backends import check_megakernel, make_ops
from kimi_kernels.checkpoint import load_weights
from kimi_kernels.commands import PROGRAM, UsageError
from kimi_kernels.config import TP_SIZES, KimiConfig
from kimi_kernels.weights import ModelWeights

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tiktoken.model")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The checkpoint and the part of it that is loaded."""
    parser.add_argument("dir", metavar="DIR", help="checkpoint directory: config.json and safetensors")
    add_tp_argument(parser)
    parser.add_argument(
        "--tp-rank",
        type=int,
        default=0,
        metavar="R",
        help="slice to run, alone: sums stay partial (default 0)",
    )
    parser.add_argument("--layers", type=layer_slice, metavar="A:B", help="only layers A to B-1, 0-based (default all)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default auto: cuda if any")


def add_tp_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tp",
        type=int,
        default=1,
        choices=TP_SIZES,
        metavar="N",
        help=f"tensor-parallel size, one of {', '.join(map(str, TP_SIZES))} (default 1)",
    )


def positive(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return value


def token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected token ids such as 1,2,3, got {text!r}") from None


def layer_slice(text: str) -> slice:
    start, colon, stop = text.partition(":")
    try:
        if colon:
            return slice(int(start or 0), int(stop) if stop else None)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected A:B such as 0:4, got {text!r}")


def pick_layers(layers: slice | None, config: KimiConfig) -> range:
    """Layer indices of `--layers`. Raises UsageError where they are not layers of the model."""
    count = config.num_layers
    start, stop = (0, count) if layers is None else (layers.start, count if layers.stop is None else layers.stop)
    if not 0 <= start < stop <= count:
        raise UsageError(f"--layers {start}:{stop}: needs 0 <= A < B <= {count}, the layers of this model")
    return range(start, stop)


def check_rank(args: argparse.Namespace, config: KimiConfig) -> KimiConfig:
    """The config of one rank. Raises where --tp does not divide the model or --tp-rank is none of its ranks."""
    local = config.shard(args.tp)
    if not 0 <= args.tp_rank < args.tp:
        raise UsageError(f"--tp-rank must be in [0, {args.tp}), got {args.tp_rank}")
    return local


def check_tokens(tokens: list[int], steps: int, config: KimiConfig) -> None:
    """Raises UsageError for ids outside the vocabulary or more steps than the model has positions."""
    if bad := [token for token in tokens if not 0 <= token < config.vocab_size]:
        raise UsageError(f"token ids must be in [0, {config.vocab_size}), got {', '.join(map(str, bad[:8]))}")
    if steps > config.max_positions:
        raise UsageError(f"{steps} positions are needed, the model has {config.max_positions}")


def pick_device(name: str) -> str:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UsageError("--device cuda: no CUDA device here")
    return name if name != "auto" else "cuda" if available else "cpu"


def backend_ops(backend: str, device: str, dtype: torch.dtype | None = None) -> SimpleNamespace | None:
    """The ops of a backend, None for the megakernel; a note on stderr when Triton will be slow. Raises BackendError
    naming what is missing."""
    if backend == "megakernel":
        check_megakernel(device, dtype)
        return None
    ops = make_ops(backend, device)
    if backend == "triton" and device == "cpu":
        reason = "device cpu" if torch.cuda.is_available() else "no CUDA device"
        sys.stderr.write(f"{PROGRAM}: {reason}: Triton runs in its interpreter, slowly\n")
        # the interpreter computes in numpy, which warns of an overflow where a GPU just gives infinity
        warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")
    return ops


def read_weights(args: argparse.Namespace, config: KimiConfig, layers: range, device: str) -> ModelWeights:
    """`config` is the whole model's."""
    every = len(layers) == config.num_layers
    return load_weights(args.dir, config, args.tp, args.tp_rank, None if every else layers, device)


def load_tokenizer(directory: str):
    """The tokenizer in `directory`. Raises UsageError that says what is missing."""
    if not any((Path(directory) / name).exists() for name in TOKENIZER_FILES):
        raise UsageError(f"{directory} has no tokenizer ({', '.join(TOKENIZER_FILES)}): pass --tokens")
    try:
        import transformers
    except ImportError as error:
        raise UsageError(f'text needs the package transformers (pip install "kimi-kernels[text]"): {error}') from error
    transformers.logging.set_verbosity_error()
    try:
        return transformers.AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises many types here; the code of a checkpoint is never run
        raise UsageError(f"{directory}: its tokenizer cannot be loaded: {error}") from error


def plain_table(title: str | None, left: str, right: list[str]) -> Table:
    """A table of one text column and number columns that fits a terminal of 80 columns."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(left, no_wrap=True)
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
