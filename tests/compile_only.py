"""Compiles Triton kernels for sm_90 on a machine without a GPU: launches become compilations, nothing runs.

    with compile_only() as kernels:
        triton_ops.rms_norm(x, weight, 1e-5)        # CPU tensors; the returned values are garbage
    for kernel in kernels: print(kernel.metadata.name, resources(kernel))

Must run in a process without TRITON_INTERPRET.
"""

import os
import re
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class _Sm90Driver:
    """The few calls that compilation makes of a driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compile_only():
    """Yields the list that collects every kernel compiled inside the block."""
    assert os.environ.get("TRITON_INTERPRET", "0") == "0", "compile_only needs the compiler, not the interpreter"
    kernels = []
    run = JITFunction.run

    def compile_launch(self, *args, grid, warmup, **kwargs):
        kernels.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return kernels[-1]

    active = driver._active
    driver.set_active(_Sm90Driver())
    JITFunction.run = compile_launch
    try:
        yield kernels
    finally:
        JITFunction.run = run
        driver._active = active


def resources(kernel) -> dict[str, int]:
    """Registers, stack and local bytes of a compiled kernel, as `cuobjdump` reports them; shared bytes from its
    metadata."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(kernel.asm["cubin"])
        f.flush()
        out = subprocess.run([tool, "--dump-resource-usage", f.name], capture_output=True, text=True, check=True).stdout
    usage = {key.lower(): int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", out)}
    return {**usage, "shared": kernel.metadata.shared}


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A CPU tensor whose values never matter."""
    return torch.empty(shape, dtype=dtype)
