"""`kimi-kernels emulate`: the tokens of `decode`, from the megakernel's schedule run on the CPU with the reference ops.

The schedule is proved first, then virtual SMs walk it in a random order. Slow, and exact: it shows on any machine that
the schedule computes the step.
"""

import argparse
import importlib

from kimi_kernels.backends import make_ops
from kimi_kernels.commands import UsageError, common, generation
from kimi_kernels.commands.generation import ShowingDecoder, show
from kimi_kernels.config import KimiConfig
from kimi_kernels.decode_step import StepOutput
from kimi_kernels.hf_config import load_config
from kimi_kernels.weights import ModelWeights

MAX_SMS = 256

__all__ = ["add_arguments", "run", "show"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    generation.add_arguments(parser)
    parser.add_argument("--sms", type=common.positive, default=8, metavar="N", help="virtual SMs (default 8)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="order in which the SMs run (default 0)")


def run(args: argparse.Namespace) -> dict:
    if args.device == "cuda":
        raise UsageError("--device cuda: the emulator runs on the CPU")
    if args.sms > MAX_SMS:
        raise UsageError(f"--sms must be at most {MAX_SMS}, got {args.sms}")
    config = load_config(args.dir)
    local, layers = common.check_rank(args, config), common.pick_layers(args.layers, config)
    tokenizer, prompt, positions = generation.read_prompt(args, config)
    weights = common.read_weights(args, config, layers, "cpu")
    decoder = EmulatedDecoder(local, weights, positions, args.sms, args.seed)
    return generation.generate(args, decoder, tokenizer, prompt, layers, "emulate", "emulator")


class EmulatedDecoder(ShowingDecoder):
    """A decoder of one sequence whose steps are launches of an emulated schedule."""

    def __init__(self, config: KimiConfig, weights: ModelWeights, context: int, sms: int, seed: int):
        super().__init__(config, weights, "reference", context=context, ops=make_ops("reference"))
        emulator = importlib.import_module("cute_megakernel.emulator")
        validator = importlib.import_module("cute_megakernel.validate")
        self._emulator = emulator.Emulator(config, weights, self.state, rows=1, sms=sms, seed=seed)
        validator.validate(self._emulator.schedule)

    def _run(self) -> StepOutput:
        return self._emulator.step(self.tokens, self.batch)
