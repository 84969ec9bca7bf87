"""Times the whole Triton step of one rank at real size, with random weights, under one CUDA graph.

    python benchmarks/whole_model.py --config kimi-linear-48b --new 64
    python benchmarks/whole_model.py --config k3 --tp 16 --context 1024

Prints one JSON object: time per token (median of the graph replays), bytes that every implementation must move, the
time they take at the read ceiling, and launches per token. All-reduces are left out: the rank runs alone.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kimi_kernels.bench_megakernel import random_model
from kimi_kernels.config import CONFIGS
from kimi_kernels.decoder import Decoder
from kimi_kernels.meta_weights import meta_weights
from kimi_kernels.traffic import floor_us, record_step, total_bytes

CEILING_TB_PER_S = 4.56  # read ceiling of an H200 (MEASURED.md)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="kimi-linear-48b", choices=CONFIGS)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024, help="tokens already in the cache")
    parser.add_argument("--new", type=int, default=64, help="timed tokens")
    args = parser.parse_args()
    config = CONFIGS[args.config]
    calls = record_step(config, args.tp, args.batch, args.context)
    generator = torch.Generator("cuda").manual_seed(0)
    weights = random_model(meta_weights(config, args.tp), generator)
    decoder = Decoder(config.shard(args.tp), weights, "triton", args.batch, args.context + args.new + 8, "cuda")
    times = time_steps(decoder, args.context, args.new)
    nbytes = total_bytes(calls)
    result = {
        "gpu": torch.cuda.get_device_name(),
        "config": args.config,
        "tp": args.tp,
        "batch": args.batch,
        "context": args.context,
        "ms_per_token": statistics.median(times),
        "ms_p20_p80": [sorted(times)[len(times) // 5], sorted(times)[len(times) * 4 // 5]],
        "bytes": nbytes,
        "floor_ms": floor_us(nbytes, CEILING_TB_PER_S) / 1e3,
        "weights_gib": sum(t.nbytes for t in _tensors(weights)) / 2**30,
        "op_calls": len(calls),
    }
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


def time_steps(decoder: Decoder, context: int, new: int) -> list[float]:
    """Milliseconds of each replay, by CUDA events; the cache holds zeros up to `context`."""
    token = torch.ones(decoder.tokens.shape[0], dtype=torch.int64, device="cuda")
    for _ in range(3):
        token = decoder.step(token).tokens.clone()
    decoder.batch.seq_lens.fill_(context)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(new + 1)]
    events[0].record()
    for event in events[1:]:
        token = decoder.step(token).tokens
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]


def _tensors(owner):
    for value in vars(owner).values():
        if isinstance(value, torch.Tensor):
            yield value
        elif dataclasses.is_dataclass(value):
            yield from _tensors(value)
        elif isinstance(value, tuple):
            for item in value:
                yield from _tensors(item)


if __name__ == "__main__":
    sys.exit(main())
