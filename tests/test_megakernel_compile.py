"""The megakernel compiles for Hopper and Blackwell without a GPU, within its plan of registers and shared memory.

Fault X01: an instruction that only one of the two has fails here, not on the machine that lacks it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cute_megakernel.shape import SHARED_BYTES

ROOT = Path(__file__).parent.parent
REGISTERS = 96  # 17 warps, handed out in fours, have no more of an SM's 65536
# the most seen, cause open: at 96 registers a thread the wide arrays of K3 do not all stay in them; only to be lowered
STACK_BYTES = {"k3": 104, "kimi-linear-48b": 104, "k3-mini": 0, "kimi-linear-mini": 0}
STATIC_SHARED_BYTES = 1024  # the system's own, on both architectures

CASES = [
    ("k3-mini", 1, 2, "sm_90a"),
    ("kimi-linear-mini", 1, 2, "sm_100a"),
    ("kimi-linear-48b", 1, 1, "sm_90a"),
    ("kimi-linear-48b", 1, 8, "sm_90a"),
    ("k3", 8, 1, "sm_90a"),
    ("k3", 8, 8, "sm_90a"),
    ("k3", 8, 8, "sm_100a"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_kernel_compiles_within_its_plan(case, tmp_path):
    script = ROOT / "tests/compile_megakernel.py"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, script, *map(str, case)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    used = json.loads(done.stdout.splitlines()[-1])
    assert used["registers"] <= REGISTERS
    assert used["local"] == 0
    assert used["stack"] <= STACK_BYTES[case[0]]
    assert used["shared"] <= STATIC_SHARED_BYTES
    assert used["dynamic_shared"] <= SHARED_BYTES
    assert used["kernels"] == 1
