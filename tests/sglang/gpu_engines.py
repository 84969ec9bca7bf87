"""Engines of SGLang on a GPU, all started at once, each in processes of its own; random weights of real layer sizes.

    kimi-linear   layers of Kimi-Linear-48B-A3B, the first LAYERS of 27
    k3            layers of one tensor-parallel rank of eight of Kimi K3, MXFP4 experts, in pages of 64 tokens
    small         Kimi-Linear with small dims: hundreds of requests in seconds

CUDA graphs, overlapped steps and the prefix cache with state are on, as in a server. States are noted for the cache
every 64 tokens, so that the continued requests below find states that decode steps made.
"""

import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from engine_jobs import ENVIRONMENT, FLAG, PER_OP, TEXT
from tiny_models import TINY_VISION

from kimi_kernels.config import K3, KIMI_LINEAR_48B, KimiConfig
from kimi_kernels.hf_config import write_config

HERE = Path(__file__).parent
LAYERS = 4
SECONDS = 300
MAX_ROWS = 8
ENGINE = dict(
    dtype="bfloat16",
    load_format="dummy",
    skip_tokenizer_init=True,
    attention_backend="triton",
    linear_attn_backend="triton",
    sampling_backend="pytorch",
    mamba_radix_cache_strategy="extra_buffer",
    mamba_track_interval=64,
    max_running_requests=MAX_ROWS,
    # SGLang wants up to five states a request: running, two it notes, cached ones
    max_mamba_cache_size=5 * MAX_ROWS,
    max_total_tokens=16384,
    context_length=2048,
    chunked_prefill_size=512,
    cuda_graph_bs_decode=[1, 2, 4, 8],
    # prefill is SGLang's own and starts in seconds without
    disable_prefill_cuda_graph=True,
    # of what the others leave: all sizes are given above
    mem_fraction_static=0.97,
    random_seed=0,
    watchdog_timeout=400,
    log_level="info",
)
MEGAKERNEL = (("KIMI_SGLANG_RUNNER", "megakernel"),)
K3_TEXT = (*TEXT, ("page_size", 64))


@dataclasses.dataclass(frozen=True)
class Job:
    family: str
    rounds: str
    arguments: tuple[tuple[str, object], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


JOBS = {
    "kimi-linear stock": Job("kimi-linear", "compared"),
    "kimi-linear flag": Job("kimi-linear", "compared", FLAG, MEGAKERNEL),
    "kimi-linear per-op": Job("kimi-linear", "compared", PER_OP),
    "k3 stock": Job("k3", "compared", K3_TEXT),
    "k3 flag": Job("k3", "compared", (*K3_TEXT, *FLAG), MEGAKERNEL),
    "small flag": Job("small", "churn", (*FLAG, ("max_running_requests", 12), ("max_mamba_cache_size", 60),
                      ("cuda_graph_bs_decode", [1, 2, 4, 8, 12])), MEGAKERNEL),
}  # fmt: skip


def configs(layers: int) -> dict[str, KimiConfig]:
    kimi_linear = dataclasses.replace(
        KIMI_LINEAR_48B, num_layers=layers, mla_layers=tuple(l for l in KIMI_LINEAR_48B.mla_layers if l < layers)
    )
    k3 = dataclasses.replace(K3.shard(8), num_layers=3, mla_layers=(2,), attn_res_block_size=2)
    small = dataclasses.replace(
        kimi_linear, num_layers=4, mla_layers=(1, 3), hidden_size=1024, vocab_size=4096, kda_heads=8, mla_heads=8,
        dense_size=2048, num_experts=32, top_k=4, expert_size=256, shared_size=256,
    )  # fmt: skip
    found = {"kimi-linear": kimi_linear, "k3": k3, "small": small}
    return {name: dataclasses.replace(one, eos_token_ids=(one.vocab_size - 1,)) for name, one in found.items()}


def write_model(directory: Path, config: KimiConfig) -> None:
    """A directory that holds a config and no weights."""
    released = write_config(config)
    if config.family == "k3":
        released["vision_config"] = TINY_VISION
        # nothing reads it, and transformers wants it even; the default is hidden_size over heads
        released["text_config"]["head_dim"] = config.kda_head_dim
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(released))


def compared(config: KimiConfig) -> list[dict]:
    """Twelve requests for eight places; the same continued, twice; and what prefill makes of their tokens."""
    draw = random.Random(0)
    lengths = (1, 3, 17, 40, 50, 60, 63, 64, 65, 130, 200, 600)
    prompts = [[draw.randrange(config.vocab_size) for _ in range(length)] for length in lengths]
    more = [draw.randrange(config.vocab_size) for _ in range(3)]
    return [
        {"kind": "batch", "prompts": prompts, "new": [32 + 2 * i for i in range(len(prompts))]},
        {"kind": "continue", "of": 0, "append": more, "new": 16},
        {"kind": "continue", "of": 0, "append": more, "new": 16, "flush": True},
        {"kind": "score", "of": 0},
    ]


def churn(config: KimiConfig, count: int = 500) -> list[dict]:
    """Requests of mixed lengths that arrive in bursts; one in seven is stopped, some before their first token."""
    draw = random.Random(0)
    shared = [draw.randrange(config.vocab_size) for _ in range(130)]
    prompts, arrive, now = [], [], 0.0
    for index in range(count):
        own = [draw.randrange(config.vocab_size) for _ in range(draw.randrange(1, 120))]
        prompts.append(shared[: draw.choice((64, 130))] + own if index % 5 == 0 else own)
        now += draw.expovariate(100) if index % 50 else 0.5
        arrive.append(now)
    stop = [draw.randrange(6) if index % 7 == 3 else None for index in range(count)]
    new = [draw.randrange(1, 24) for _ in range(count)]
    return [
        {"kind": "churn", "prompts": prompts, "new": new, "arrive": arrive, "stop_after": stop},
        {"kind": "alone", "of": 0, "flush": True},
        {"kind": "score", "of": 1},
    ]


ROUNDS = {"compared": compared, "churn": churn}


class Engines:
    """Starts an engine for each name; `outcome(name)` gives its rounds and its log once `wait` is over."""

    def __init__(self, folder: Path, layers: int, names: tuple[str, ...] = tuple(JOBS)):
        self._folder, self._running, self.configs = folder, {}, configs(layers)
        self._end = time.monotonic() + SECONDS
        for family, config in self.configs.items():
            write_model(folder / family, config)
        for number, name in enumerate(names):
            self._running[name] = self._start(number, name)

    def wait(self) -> None:
        """Until all have ended, SECONDS at most."""
        for process in self._running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, self._end - time.monotonic()))

    def outcome(self, name: str) -> tuple[list[dict], str]:
        """Raises AssertionError with the end of the log where the engine failed or is not done."""
        code, log = self._running[name].poll(), self._file(name, "log").read_text()
        assert code == 0, f"{name}: {'not done' if code is None else f'ended with {code}'}\n{log[-6000:]}"
        return json.loads(self._file(name, "json").read_text()), log

    def close(self) -> None:
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _file(self, name: str, suffix: str) -> Path:
        return self._folder / f"{name.replace(' ', '-')}.{suffix}"

    def _start(self, number: int, name: str) -> subprocess.Popen:
        job = JOBS[name]
        ports = {"port": 30000 + 50 * number, "nccl_port": 30010 + 50 * number}
        engine = {**ENGINE, "model_path": str(self._folder / job.family), **ports, **dict(job.arguments)}
        rounds = ROUNDS[job.rounds](self.configs[job.family])
        self._file(name, "job").write_text(json.dumps({"engine": engine, "rounds": rounds}))
        command = [sys.executable, str(HERE / "gpu_rounds.py"), str(self._file(name, "job"))]
        with self._file(name, "log").open("w") as log:
            return subprocess.Popen(
                [*command, str(self._file(name, "json"))],
                env=environment() | dict(job.environment),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def environment() -> dict[str, str]:
    """That of this process without what the engines on a CPU need, and with the plugin that fills in weights."""
    kept = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    paths = [str(HERE / "random_weights"), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]
    return kept | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "2"}
