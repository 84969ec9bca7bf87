"""What runs a decode step behind the flag: one small interface, and a choice that the log says once, with its reason.

    runner, why = pick_runner(config, weights, max_rows, device)
    logits = runner.step(state, batch, tokens)                     [R, VOCAB] act

`auto` takes the megakernel where there is one that runs here, else the Triton ops. `KIMI_SGLANG_RUNNER` names one; one
that is named and cannot run stops the server, it is never replaced by another.
"""

import importlib
import importlib.util
import os
from typing import Any, Protocol

import torch

from kimi_kernels.backends import BackendError, make_ops
from kimi_kernels.config import KimiConfig
from kimi_kernels.decode_step import decode_step
from kimi_kernels.state import Batch, State
from kimi_kernels.weights import ModelWeights

RUNNERS = ("auto", "megakernel", "triton", "reference")
VARIABLE = "KIMI_SGLANG_RUNNER"
MEGAKERNEL_MODULE = "cute_megakernel.runner"


class Runner(Protocol):
    """A decode step over an engine's pools: no host reads, current stream, the same kernels for the same rows."""

    name: str

    def step(self, state: State, batch: Batch, tokens: torch.Tensor) -> torch.Tensor:
        """Runs rows of `tokens` [R], updates `state` in place and returns logits [R, VOCAB] act."""


class OpsRunner:
    """`decode_step` over an ops namespace: the Triton ops, or the float64 reference for a check."""

    def __init__(self, config: KimiConfig, weights: ModelWeights, backend: str, device: torch.device):
        self.name = f"{backend} ops"
        self.config, self.weights = config, weights
        self.ops = make_ops(backend, device)
        # the sampler is the engine's: no kernel for a greedy token that nobody reads
        self.ops.argmax = lambda logits, vocab_start: (None, None)
        self.ops.all_reduce_max = lambda tokens, values: tokens

    def step(self, state: State, batch: Batch, tokens: torch.Tensor) -> torch.Tensor:
        return decode_step(self.ops, self.config, self.weights, state, batch, tokens).logits


def pick_runner(
    config: KimiConfig, weights: ModelWeights, max_rows: int, device: torch.device, wanted: str | None = None
) -> tuple[Runner, str]:
    """The runner and the reason for it. Raises ValueError, BackendError where the named one cannot run."""
    wanted = wanted or os.environ.get(VARIABLE, "auto")
    if wanted not in RUNNERS:
        raise ValueError(f"{VARIABLE} must be one of {RUNNERS}, got {wanted!r}")
    if wanted in ("triton", "reference"):
        return OpsRunner(config, weights, wanted, device), f"{VARIABLE}={wanted}"
    reason = megakernel_unsupported(config, max_rows, device)
    if reason is None:
        return megakernel_module().Runner(config, weights, max_rows), "it runs on this device"
    if wanted == "megakernel":
        raise BackendError(f"{VARIABLE}=megakernel: {reason}")
    return OpsRunner(config, weights, "triton", device), f"no megakernel: {reason}"


def megakernel_unsupported(config: KimiConfig, max_rows: int, device: torch.device) -> str | None:
    """Why the megakernel cannot run this model here, None where it can."""
    if device.type != "cuda":
        return f"device {device.type}"
    module = megakernel_module()
    return module if isinstance(module, str) else module.unsupported(config, max_rows, device)


def megakernel_module() -> Any:
    """The module of the megakernel, or in words why there is none.

    It offers `unsupported(config, max_rows, device) -> str | None` and `Runner(config, weights, max_rows)`.
    """
    if importlib.util.find_spec(MEGAKERNEL_MODULE) is None:
        return f"this version has no {MEGAKERNEL_MODULE}"
    try:
        return importlib.import_module(MEGAKERNEL_MODULE)
    except ImportError as error:
        return f"{MEGAKERNEL_MODULE} does not import: {error}"
