"""What runs a decode step behind the flag: one small interface, and a choice that the log says once, with its reason.

    runner, why = pick_runner(config, weights, max_rows, device)
    logits = runner.step(state, batch, tokens)                     [R, VOCAB] act, R up to runner.max_rows
    runner.check()                                                 raises where a step gave up

`auto` takes the megakernel where there is one that runs here, else the Triton ops. `KIMI_SGLANG_RUNNER` names one; one
that is named and cannot run stops the server, it is never replaced by another.
"""

import os
from typing import Protocol

import torch

from cute_megakernel.schedule_error import ScheduleError
from kimi_kernels.backends import BackendError, make_ops
from kimi_kernels.config import KimiConfig
from kimi_kernels.decode_step import decode_step
from kimi_kernels.state import Batch, State
from kimi_kernels.weights import ModelWeights
from sglang_integration import megakernel_runner

RUNNERS = ("auto", "megakernel", "triton", "reference")
VARIABLE = "KIMI_SGLANG_RUNNER"


class Runner(Protocol):
    """A decode step over an engine's pools: no host reads, current stream, the same kernels for the same rows."""

    name: str
    max_rows: int

    def step(self, state: State, batch: Batch, tokens: torch.Tensor) -> torch.Tensor:
        """Runs rows of `tokens` [R], updates `state` in place and returns logits [R, VOCAB] act."""

    def check(self) -> None:
        """Raises what went wrong in a step whose results the host has. Waits for nothing."""


class OpsRunner:
    """`decode_step` over an ops namespace: the Triton ops, or the float64 reference for a check."""

    def __init__(self, config: KimiConfig, weights: ModelWeights, max_rows: int, backend: str, device: torch.device):
        self.name = f"{backend} ops"
        self.config, self.weights, self.max_rows = config, weights, max_rows
        self.ops = make_ops(backend, device)
        # the sampler is the engine's: no kernel for a greedy token that nobody reads
        self.ops.argmax = lambda logits, vocab_start: (None, None)
        self.ops.all_reduce_max = lambda tokens, values: tokens

    def step(self, state: State, batch: Batch, tokens: torch.Tensor) -> torch.Tensor:
        return decode_step(self.ops, self.config, self.weights, state, batch, tokens).logits

    def check(self) -> None:
        """An op that fails raises by itself."""


def pick_runner(
    config: KimiConfig, weights: ModelWeights, max_rows: int, device: torch.device, wanted: str | None = None
) -> tuple[Runner, str]:
    """The runner and the reason for it. Raises ValueError, BackendError where the named one cannot run."""
    wanted = wanted or os.environ.get(VARIABLE, "auto")
    if wanted not in RUNNERS:
        raise ValueError(f"{VARIABLE} must be one of {RUNNERS}, got {wanted!r}")
    if wanted in ("triton", "reference"):
        return OpsRunner(config, weights, max_rows, wanted, device), f"{VARIABLE}={wanted}"
    reason = megakernel_runner.unsupported(config, weights, device)
    if reason is None:
        try:
            runner = megakernel_runner.MegakernelRunner(config, weights, max_rows)
        except ScheduleError as error:
            reason = str(error)
        else:
            limit = f"up to {runner.max_rows} rows: {runner.limit}"
            return runner, limit if runner.limit else "it runs on this device"
    if wanted == "megakernel":
        raise BackendError(f"{VARIABLE}=megakernel: {reason}")
    return OpsRunner(config, weights, max_rows, "triton", device), f"no megakernel: {reason}"
