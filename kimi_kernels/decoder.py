"""Greedy decoding of one model with one backend: owns state and batch, feeds tokens, replays a CUDA graph where there
is a GPU.

    decoder = Decoder(config, weights, "triton", batch=1, context=256, device="cuda")
    tokens = decoder.generate([[1, 2, 3]], new=16).tokens

A prompt is fed through decode steps, one token a step. On a GPU the Triton step is captured once, before the first
token, and replayed for every token: a replay allocates, compiles and synchronises nothing. So is the one launch of the
megakernel.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch

from kimi_kernels.backends import check_megakernel, make_megakernel, make_ops
from kimi_kernels.config import KimiConfig
from kimi_kernels.decode_step import StepOutput, decode_step
from kimi_kernels.state import Batch, State
from kimi_kernels.weights import ModelWeights

PAGE_SIZE = 64


@dataclass(frozen=True)
class Generated:
    """Result of `Decoder.generate`: new tokens per sequence, prompt excluded, and the time they took."""

    tokens: list[list[int]]
    logits: torch.Tensor  # [new, B, VOCAB] of the steps that chose a token
    seconds_per_token: float  # mean over steps after the first


class Decoder:
    """`config` and `weights` are one rank's; `batch` sequences of at most `context` tokens each.

    `ops` replaces the namespace of `backend`; `kernel_options` go to the Megakernel of backend megakernel.
    """

    def __init__(
        self,
        config: KimiConfig,
        weights: ModelWeights,
        backend: str,
        batch: int = 1,
        context: int = 256,
        device: str = "cpu",
        ops=None,
        kernel_options: dict | None = None,
    ):
        if batch < 1:
            raise ValueError(f"Decoder: batch must be at least 1, got {batch}")
        if context < 1 or context > config.max_positions:
            raise ValueError(f"Decoder: context must be in [1, {config.max_positions}], got {context}")
        self.config, self.weights, self.context = config, weights, context
        fused = backend == "megakernel"
        if fused:
            check_megakernel(device, config.dtype, batch)
        self.ops: Any = None if fused else ops or make_ops(backend, device)
        pages = -(-context // PAGE_SIZE)
        layers = [layer.index for layer in weights.layers]
        self.state = State.zeros(config, batch, batch * pages, PAGE_SIZE, device, layers)
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        self.batch = Batch(
            slots=torch.arange(batch, dtype=torch.int32, device=device),
            is_new=torch.ones(batch, dtype=torch.bool, device=device),
            seq_lens=torch.zeros(batch, dtype=torch.int32, device=device),
            page_table=torch.arange(batch * pages, dtype=torch.int32, device=device).reshape(batch, pages),
        )
        self.kernel = make_megakernel(config, weights, self.state, batch, **(kernel_options or {})) if fused else None
        self.use_graph = torch.device(device).type == "cuda" and backend != "reference"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: StepOutput | None = None
        self._length = 0  # tokens that each sequence holds

    def step(self, tokens: torch.Tensor) -> StepOutput:
        """Appends `tokens` [B] to their sequences and returns the next tokens and logits; valid until the next step.

        Raises ValueError for a wrong shape or dtype, and where the sequences would outgrow `context`.
        """
        if tokens.shape != self.tokens.shape or tokens.dtype not in (torch.int32, torch.int64):
            got = f"{list(tokens.shape)} {tokens.dtype}"
            raise ValueError(f"step: tokens must be [{len(self.tokens)}] int32 or int64, got {got}")
        if self._length >= self.context:
            raise ValueError(f"step: the sequences already hold {self._length} tokens, context is {self.context}")
        self._length += 1
        if self.use_graph and self._graph is None:
            self._capture()
        self.tokens.copy_(tokens)
        self.batch.seq_lens.add_(1)
        if self._graph is not None:
            self._graph.replay()
        else:
            self._output = self._run()
        self.batch.is_new.fill_(False)
        assert self._output is not None
        return self._output

    def generate(self, prompts: list[list[int]], new: int) -> Generated:
        """Feeds `prompts` (equal lengths) and chooses `new` tokens greedily. Raises ValueError before anything runs."""
        self._check_prompts(prompts, new)
        self.batch.is_new.fill_(True)
        self.batch.seq_lens.fill_(0)
        self._length = 0
        device = self.tokens.device
        feed = torch.tensor(prompts, device=device).T  # [prompt length, B]
        if self.use_graph and self._graph is None:
            self._capture()
        chosen: list[torch.Tensor] = []
        logits: list[torch.Tensor] = []
        start = 0.0
        for i in range(len(prompts[0]) + new - 1):
            output = self.step(feed[i] if i < len(feed) else chosen[-1])
            if i >= len(feed) - 1:
                chosen.append(output.tokens.clone())
                logits.append(output.logits.clone())
            if i == len(feed) - 1:
                start = _now(device)
        seconds = (_now(device) - start) / max(1, new - 1)
        self.check()
        if not all(bool(torch.isfinite(step).all()) for step in logits):
            raise ValueError("generate: the logits are not finite: weights or state hold NaN or infinities")
        tokens = torch.stack(chosen, dim=1).tolist() if chosen else [[] for _ in prompts]
        return Generated(tokens, torch.stack(logits), seconds if new > 1 else float("nan"))

    def check(self) -> None:
        """Waits for the device; raises MegakernelError if a launch of the megakernel could not finish."""
        if self.kernel is not None:
            self.kernel.check()

    def _run(self) -> StepOutput:
        if self.kernel is not None:
            return self.kernel.step(self.tokens, self.batch)
        return decode_step(self.ops, self.config, self.weights, self.state, self.batch, self.tokens)

    def _capture(self) -> None:
        """Compiles and loads every kernel on padding rows, which change no state, then records the step as a graph."""
        slots, seq_lens = self.batch.slots.clone(), self.batch.seq_lens.clone()
        self.batch.slots.fill_(self.batch.first_valid_slot - 1)
        self.batch.seq_lens.fill_(0)
        self._run()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = self._run()
        self.batch.slots.copy_(slots)
        self.batch.seq_lens.copy_(seq_lens)

    def _check_prompts(self, prompts: list[list[int]], new: int) -> None:
        batch, vocab = self.tokens.shape[0], self.weights.embed.shape[0]
        if new < 1:
            raise ValueError(f"generate: new must be at least 1, got {new}")
        if len(prompts) != batch or len({len(p) for p in prompts}) != 1 or not prompts[0]:
            raise ValueError(f"generate: prompts must be {batch} non-empty lists of one length")
        positions = len(prompts[0]) + new - 1
        if positions > self.context:
            raise ValueError(
                f"generate: prompt of {len(prompts[0])} and {new} new tokens need {positions} positions, "
                f"context is {self.context}"
            )
        bad = [t for p in prompts for t in p if not 0 <= t < vocab]
        if bad:
            raise ValueError(f"generate: token ids must be in [0, {vocab}), got {bad[:8]}")


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
