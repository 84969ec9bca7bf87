"""`kimi-kernels decode`: greedy tokens of a prompt, as ids and, where the checkpoint has a tokenizer, as text."""

import argparse

from kimi_kernels.backends import BACKENDS
from kimi_kernels.commands import common, generation
from kimi_kernels.commands.generation import ShowingDecoder, show
from kimi_kernels.hf_config import load_config

__all__ = ["add_arguments", "run", "show"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    generation.add_arguments(parser)
    parser.add_argument("--backend", choices=BACKENDS, default="triton", help="default triton")


def run(args: argparse.Namespace) -> dict:
    config = load_config(args.dir)
    local, layers = common.check_rank(args, config), common.pick_layers(args.layers, config)
    device = common.pick_device(args.device)
    tokenizer, prompt, positions = generation.read_prompt(args, config)
    ops = common.backend_ops(args.backend, device, config.dtype)
    weights = common.read_weights(args, config, layers, device)
    decoder = ShowingDecoder(local, weights, args.backend, batch=1, context=positions, device=device, ops=ops)
    return generation.generate(args, decoder, tokenizer, prompt, layers, "decode", args.backend)
