"""Every Triton kernel compiles for sm_90 at real shapes without a GPU, keeps its values in registers and fits shared
memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = [(config, tp, rows) for config, tp in (("k3", 8), ("k3", 16), ("kimi-linear-48b", 1)) for rows in (1, 8, 32)]
MAX_SHARED = 227 * 1024


@pytest.mark.parametrize("config, tp, rows", CASES)
def test_real_shapes_compile_without_spills(config, tp, rows):
    """Runs the step on CPU tensors of one rank with launches turned into compilations (in a process without the
    interpreter). Fault X01: an instruction of a later arch, as fma.rn.f32.bf16 of sm_100, does not assemble."""
    root = Path(__file__).parent.parent
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, __file__, config, str(tp), str(rows)],
        env=env,
        capture_output=True,
        text=True,
        cwd=root,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def main(name: str, tp: int, rows: int) -> int:
    import torch
    from compile_only import compile_only, resources

    from kimi_kernels.backends import make_ops
    from kimi_kernels.config import CONFIGS
    from kimi_kernels.decode_step import decode_step
    from kimi_kernels.meta_weights import meta_weights
    from kimi_kernels.state import Batch, State

    config = CONFIGS[name]
    # every kind of layer, and every length of the residual bank
    layers = [l for l in range(config.num_layers) if l < 2 or l == 3 or config.starts_block(l)]
    local, pages = config.shard(tp), 64
    state = State.zeros(local, rows, rows * pages, 64, "meta", layers)
    batch = Batch(
        slots=torch.empty(rows, dtype=torch.int32, device="meta"),
        is_new=torch.empty(rows, dtype=torch.bool, device="meta"),
        seq_lens=torch.empty(rows, dtype=torch.int32, device="meta"),
        page_table=torch.empty(rows, pages, dtype=torch.int32, device="meta"),
    )
    tokens = torch.empty(rows, dtype=torch.int64, device="meta")
    with compile_only() as kernels:
        decode_step(make_ops("triton", "meta"), local, meta_weights(config, tp, layers=layers), state, batch, tokens)
    bad, seen = [], {id(k): k for k in kernels}
    for kernel in seen.values():
        usage = resources(kernel)
        if usage["local"] or usage["stack"] or usage["shared"] > MAX_SHARED:
            bad.append(f"{kernel.metadata.name}: {usage}")
    sys.stdout.write("\n".join([f"{len(seen)} kernels", *bad]))
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
