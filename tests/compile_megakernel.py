"""Compiles the megakernel of one config for one architecture on a machine without a GPU and prints what it takes.

    python tests/compile_megakernel.py k3 8 1 sm_90a        config, tensor-parallel size, rows, architecture

One JSON object: registers, stack, local, shared (of the code itself and asked for at launch), kernels. The machine code
is left in the working directory.
"""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path


def main(name: str, tp: str, rows: str, arch: str) -> None:
    from cute_megakernel.build import compile_kernel
    from cute_megakernel.recording import record_step
    from cute_megakernel.schedule import make_schedule
    from cute_megakernel.shape import SharedLayout
    from kimi_kernels.config import CONFIGS

    config = CONFIGS[name]
    layers = None if config.num_layers < 10 else (0, *_one_of_each(config))
    recording = record_step(config, int(rows), int(tp), layers)
    shape = make_schedule(recording, config.shard(int(tp)), sms=132).shape
    Path("kernel.cubin").write_bytes(compile_kernel(shape, arch).__cubin__)
    result = resources(Path("kernel.cubin"))
    result["dynamic_shared"] = SharedLayout.of(shape).end
    sys.stdout.write(json.dumps(result) + "\n")


def _one_of_each(config) -> tuple[int, int]:
    """A KDA and an MLA layer with experts."""
    rest = [layer for layer in range(config.num_layers) if layer not in config.dense_layers]
    mla = next(layer for layer in rest if layer in config.mla_layers)
    return next(layer for layer in rest if layer not in config.mla_layers), mla


def resources(cubin: Path) -> dict[str, int]:
    """Registers and bytes of the kernels in a file, from `cuobjdump`: the largest, and how many there are."""
    found = find_spec("triton")
    assert found is not None and found.origin is not None
    tool = Path(found.origin).parent / "backends/nvidia/bin/cuobjdump"
    dump = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", dump)
    most = [max(map(int, column)) for column in zip(*lines, strict=True)]
    return dict(zip(("registers", "stack", "shared", "local"), most, strict=True)) | {"kernels": len(lines)}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main(*sys.argv[1:])
