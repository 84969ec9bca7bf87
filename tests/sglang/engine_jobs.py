"""Real engines of SGLang on tiny checkpoints, two at a time.

One workload for all: six requests of mixed lengths at once, prefill in chunks of 16 mixed with running decodes, prefix
cache with state, and the same six again, which then hit the cache. What differs is who decodes.
"""

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tiny_models import TINY, write_tiny

HERE = Path(__file__).parent
SHIM = HERE / "shim"
AT_ONCE = int(os.environ.get("SGLANG_TEST_ENGINES", "2"))
SECONDS = 240
# greedy: chosen so that decodes run beside prefill chunks, alone and together
NEW = (2, 4, 2, 4, 3, 4)
ENGINE = dict(
    device="cpu",
    dtype="float32",
    skip_tokenizer_init=True,
    disable_cuda_graph=True,
    attention_backend="triton",
    # Triton programs are slow in the interpreter, and one split serves short contexts
    triton_attention_num_kv_splits=1,
    mem_fraction_static=0.3,
    # the host imported everything; a warm-up request would be a third of the work
    skip_server_warmup=True,
    max_total_tokens=2048,
    max_mamba_cache_size=40,
    max_running_requests=6,
    context_length=512,
    chunked_prefill_size=16,
    enable_mixed_chunk=True,
    # what SGLang allows on a CPU: prefix cache without extra state buffers, no overlap of steps
    mamba_radix_cache_strategy="no_buffer",
    disable_overlap_schedule=True,
    random_seed=0,
    watchdog_timeout=1200,
    log_level="info",
)
ENVIRONMENT = dict(
    TRITON_INTERPRET="1",
    SGLANG_MAMBA_CONV_DTYPE="float32",
    # compiling SGLang's small torch functions takes 40 s and gains nothing here
    TORCHDYNAMO_DISABLE="1",
    OMP_NUM_THREADS="1",
    PYTHONPATH=str(SHIM),
    PYTHONWARNINGS="ignore",
)


@dataclass(frozen=True)
class Job:
    """One engine: `arguments` and `environment` on top of the common ones, `requests` of the workload it runs."""

    family: str
    arguments: tuple[tuple[str, object], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    requests: tuple[int, ...] = tuple(range(6))
    rounds: int = 2
    new: tuple[int, ...] = NEW


FLAG = (("enable_nvidia_megakernel", True),)
PER_OP = (("linear_attn_decode_backend", "kimi_triton"),)
REFERENCE = (("KIMI_SGLANG_RUNNER", "reference"),)
TEXT = (("enable_multimodal", False),)
JOBS = {
    "kimi-linear stock": Job("kimi-linear"),
    "kimi-linear flag": Job("kimi-linear", FLAG, REFERENCE),
    "kimi-linear per-op": Job("kimi-linear", PER_OP),
    "k3 stock": Job("k3"),
    "k3 flag": Job("k3", FLAG, REFERENCE),
    "k3 per-op": Job("k3", PER_OP),
    # the Triton ops in the interpreter take seconds a step: fewer requests, fewer tokens
    "kimi-linear flag, triton": Job("kimi-linear", FLAG, (), (3, 5), 1, (3,) * 6),
    "k3 flag, triton": Job("k3", FLAG, (), (3, 5), 1, (3,) * 6),
    # the multimodal class over MXFP4 experts; text alone needs no image processor
    "k3-released stock": Job("k3-released", TEXT, (), (1, 3, 5), 1, (3,) * 6),
    "k3-released flag": Job("k3-released", (*TEXT, *FLAG), REFERENCE, (1, 3, 5), 1, (3,) * 6),
}


@dataclass(frozen=True)
class Outcome:
    rounds: list[dict]
    log: str


def prompts() -> list[list[int]]:
    """Six prompts; three share prefixes of 20 to 40 tokens, one is a single token."""
    draw = random.Random(0)

    def ids(count: int) -> list[int]:
        return [draw.randrange(3, 250) for _ in range(count)]

    base = ids(40)
    return [base + [7], base[:20] + [9, 9], ids(23), [5], base[:33], ids(3)]


class Engines:
    """Starts a host for all jobs at once; `outcome(name)` waits for one."""

    def __init__(self, folder: Path, names: tuple[str, ...] = tuple(JOBS)):
        self.folder, self.names = folder, names
        for family in TINY:
            write_tiny(folder / family, family)
        for name in names:
            self._base(name).with_suffix(".job").write_text(json.dumps(self._job(JOBS[name])))
        command = [
            sys.executable,
            str(HERE / "engine_host.py"),
            str(AT_ONCE),
            *(str(self._base(name)) for name in names),
        ]
        self._log = (folder / "host.log").open("w")
        self._host = subprocess.Popen(
            command, env={**os.environ, **ENVIRONMENT}, stdout=self._log, stderr=subprocess.STDOUT
        )

    def outcome(self, name: str) -> Outcome:
        """Raises AssertionError with the end of the log where the engine did not finish."""
        over, deadline = self._base(name).with_suffix(".rc"), time.monotonic() + SECONDS
        while not over.exists():
            host = f"the host ended:\n{(self.folder / 'host.log').read_text()[-3000:]}"
            assert self._host.poll() is None or over.exists(), host
            assert time.monotonic() < deadline, f"{name} did not finish in {SECONDS} s"
            time.sleep(0.2)
        log = self._base(name).with_suffix(".log").read_text()
        assert int(over.read_text()) == 0, f"{name} failed:\n{log[-3000:]}"
        return Outcome(json.loads(self._base(name).with_suffix(".json").read_text())["rounds"], log)

    def close(self) -> None:
        self._host.terminate()
        self._host.wait()
        self._log.close()

    def _base(self, name: str) -> Path:
        return self.folder / name.replace(" ", "-").replace(",", "")

    def _job(self, job: Job) -> dict:
        round_ = {"prompts": [prompts()[i] for i in job.requests], "new": [job.new[i] for i in job.requests]}
        round_ |= {"logprobs": True}
        engine = {**ENGINE, "model_path": str(self.folder / job.family), **dict(job.arguments)}
        return {"engine": engine, "rounds": [round_] * job.rounds, "environment": dict(job.environment)}
