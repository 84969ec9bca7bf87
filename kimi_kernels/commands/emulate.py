"""`kimi-kernels emulate`: the tokens of `decode`, from the megakernel's schedule run on the CPU with the reference ops.

The schedule is proved first, then virtual SMs walk it in a random order. Slow, and exact: it shows on any machine that
the schedule computes the step.
"""

import argparse
import importlib

import torch
from rich.console import Console
from tqdm import tqdm

from kimi_kernels.backends import make_ops
from kimi_kernels.commands import UsageError, common, decode
from kimi_kernels.config import KimiConfig
from kimi_kernels.decode_step import StepOutput
from kimi_kernels.decoder import Decoder
from kimi_kernels.hf_config import load_config
from kimi_kernels.weights import ModelWeights

MAX_SMS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model_arguments(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text, encoded by the tokenizer in DIR")
    prompt.add_argument("--tokens", type=common.token_ids, metavar="IDS", help="token ids such as 1,2,3")
    parser.add_argument("--new", type=common.positive, required=True, metavar="N", help="tokens to generate")
    parser.add_argument("--sms", type=common.positive, default=8, metavar="N", help="virtual SMs (default 8)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="order in which the SMs run (default 0)")


def run(args: argparse.Namespace) -> dict:
    if args.device == "cuda":
        raise UsageError("--device cuda: the emulator runs on the CPU")
    if args.sms > MAX_SMS:
        raise UsageError(f"--sms must be at most {MAX_SMS}, got {args.sms}")
    config = load_config(args.dir)
    local, layers = common.check_rank(args, config), common.pick_layers(args.layers, config)
    tokenizer = decode._tokenizer(args)
    prompt = args.tokens if args.prompt is None else tokenizer.encode(args.prompt)
    if not prompt:
        raise UsageError("the prompt has no tokens")
    positions = len(prompt) + args.new - 1  # the last new token is not fed back
    common.check_tokens(prompt, positions, config)
    weights = common.read_weights(args, config, layers, "cpu")
    decoder = EmulatedDecoder(local, weights, positions, args.sms, args.seed)
    disable = True if args.json else None  # None: tqdm asks whether stderr is a terminal
    with tqdm(total=positions, unit=" steps", desc="emulate", leave=False, disable=disable) as decoder.bar:
        generated = decoder.generate([prompt], args.new)
    tokens = generated.tokens[0]
    return {
        "tokens": tokens,
        "text": tokenizer.decode(tokens) if tokenizer else None,
        "prompt_tokens": prompt,
        "seconds_per_token": generated.seconds_per_token if args.new > 1 else None,
        "backend": "emulator",
        "device": "cpu",
        "tp": args.tp,
        "tp_rank": args.tp_rank,
        "layers": [layers.start, layers.stop],
    }


class EmulatedDecoder(Decoder):
    """A decoder of one sequence whose steps are launches of an emulated schedule."""

    bar: tqdm | None = None

    def __init__(self, config: KimiConfig, weights: ModelWeights, context: int, sms: int, seed: int):
        super().__init__(config, weights, "reference", context=context, ops=make_ops("reference"))
        emulator = importlib.import_module("cute_megakernel.emulator")
        validator = importlib.import_module("cute_megakernel.validate")
        self._emulator = emulator.Emulator(config, weights, self.state, rows=1, sms=sms, seed=seed)
        validator.validate(self._emulator.schedule)

    def _run(self) -> StepOutput:
        return self._emulator.step(self.tokens, self.batch)

    def step(self, tokens: torch.Tensor) -> StepOutput:
        output = super().step(tokens)
        if self.bar is not None:
            self.bar.update()
        return output


def show(result: dict, console: Console) -> None:
    decode.show(result, console)
