"""Times the megakernel of one rank with random weights for several caps on what is in flight to an SM.

    python benchmarks/megakernel.py --config k3 --tp 8 --layers 1:9 --in-flight 3,4,6,8

Prints one JSON object a cap: microseconds per step (median, 20th and 80th percentile of the replays). Correctness is
the business of `kimi-kernels bench --backend megakernel` and of the tests; this sweep looks for NaN and no more.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kimi_kernels.backends import make_ops
from kimi_kernels.bench_layers import SHARDED
from kimi_kernels.bench_megakernel import FusedBench
from kimi_kernels.bench_rows import Bench
from kimi_kernels.commands.common import layer_slice, pick_layers
from kimi_kernels.config import CONFIGS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="kimi-linear-48b", choices=CONFIGS)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024, help="tokens already in the cache")
    parser.add_argument("--layers", type=layer_slice, metavar="A:B", help="default all")
    parser.add_argument("--sharded", action="store_true", help=f"{', '.join(SHARDED)} cut over the ranks too")
    parser.add_argument("--in-flight", default="6", metavar="A,B", help="copies of 16 KiB, default 6")
    args = parser.parse_args()
    config = CONFIGS[args.config]
    generator = torch.Generator("cuda").manual_seed(0)
    bench = Bench(config, args.tp, args.rows, args.context, make_ops("triton", "cuda"), generator)
    fused, layers = FusedBench(bench), pick_layers(args.layers, config)
    for cap in map(int, args.in_flight.split(",")):
        timing = fused.time_step(layers, args.sharded, in_flight=cap)
        shown = {"config": args.config, "tp": args.tp, "rows": args.rows, "layers": len(layers), "in_flight": cap}
        times = {"us": timing.us, "p20_us": timing.p20_us, "p80_us": timing.p80_us}
        sys.stdout.write(json.dumps(shown | times) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
