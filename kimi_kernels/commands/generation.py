"""What `decode` and `emulate` share: a prompt of ids or text in, greedy tokens out, a progress bar meanwhile."""

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console
from tqdm import tqdm

from kimi_kernels.commands import PROGRAM, UsageError, common
from kimi_kernels.config import KimiConfig
from kimi_kernels.decode_step import StepOutput
from kimi_kernels.decoder import Decoder


class ShowingDecoder(Decoder):
    """Moves a progress bar at every step."""

    bar: tqdm | None = None

    def step(self, tokens: torch.Tensor) -> StepOutput:
        output = super().step(tokens)
        if self.bar is not None:
            self.bar.update()
        return output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Checkpoint, prompt and number of new tokens."""
    common.add_model_arguments(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text, encoded by the tokenizer in DIR")
    prompt.add_argument("--tokens", type=common.token_ids, metavar="IDS", help="token ids such as 1,2,3")
    parser.add_argument("--new", type=common.positive, required=True, metavar="N", help="tokens to generate")


def read_prompt(args: argparse.Namespace, config: KimiConfig) -> tuple:
    """Tokenizer or None, ids of the prompt, and the positions that prompt and new tokens take. Raises UsageError."""
    tokenizer = _tokenizer(args)
    prompt = args.tokens if args.prompt is None else tokenizer.encode(args.prompt)
    if not prompt:
        raise UsageError("the prompt has no tokens")
    positions = len(prompt) + args.new - 1  # the last new token is not fed back
    common.check_tokens(prompt, positions, config)
    return tokenizer, prompt, positions


def generate(
    args: argparse.Namespace,
    decoder: ShowingDecoder,
    tokenizer,
    prompt: list[int],
    layers: range,
    name: str,
    backend: str,
) -> dict:
    """The result of command `name`."""
    steps = len(prompt) + args.new - 1
    disable = True if args.json else None  # None: tqdm asks whether stderr is a terminal
    with tqdm(total=steps, unit=" steps", desc=name, leave=False, disable=disable) as decoder.bar:
        generated = decoder.generate([prompt], args.new)
    tokens = generated.tokens[0]
    return {
        "tokens": tokens,
        "text": tokenizer.decode(tokens) if tokenizer else None,
        "prompt_tokens": prompt,
        "seconds_per_token": generated.seconds_per_token if args.new > 1 else None,
        "backend": backend,
        "device": decoder.tokens.device.type,
        "tp": args.tp,
        "tp_rank": args.tp_rank,
        "layers": [layers.start, layers.stop],
    }


def show(result: dict, console: Console) -> None:
    lines = [f"tokens  {', '.join(map(str, result['tokens']))}"]
    if result["text"] is not None:
        lines.append(f"text    {result['text']}")
    if result["seconds_per_token"] is not None:
        lines.append(f"time    {1e3 * result['seconds_per_token']:,.3f} ms per token")
    where = f"{result['backend']} on {result['device']}"
    part = f", rank {result['tp_rank']} of {result['tp']}" if result["tp"] > 1 else ""
    lines.append(f"run     {where}{part}, layers {result['layers'][0]}:{result['layers'][1]}")
    console.print("\n".join(lines), soft_wrap=True)


def _tokenizer(args: argparse.Namespace):
    """Needed for --prompt; with --tokens, None where there is none, and a note where it cannot be used."""
    if args.prompt is not None:
        return common.load_tokenizer(args.dir)
    if not any((Path(args.dir) / name).exists() for name in common.TOKENIZER_FILES):
        return None
    try:
        return common.load_tokenizer(args.dir)
    except UsageError as error:
        sys.stderr.write(f"{PROGRAM}: ids only: {' '.join(str(error).split())}\n")
        return None
