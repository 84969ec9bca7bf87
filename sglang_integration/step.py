"""The object behind the flag: decides per step on the host, runs covered steps through the runner.

Covered: decode, one token a request, up to 8 rows. Prefill, chunked and mixed batches, wider batches and steps that
want hidden states run SGLang's own forward; its log names the batch sizes whose CUDA graphs run this step.
"""

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from sglang_integration import compat
from sglang_integration.build import Extra, model_weights
from sglang_integration.runner import pick_runner
from sglang_integration.spec import model_config
from sglang_integration.views import PoolViews, step_batch

logger = logging.getLogger(__name__)


def build(model: Any, hf_config: Any, context: Any) -> "BuiltStep":
    """SGLang's call after weights are loaded and `spec.model_reasons` found nothing."""
    return BuiltStep(model, hf_config, context.widths)


class BuiltStep:
    """One model's decode step. `widths` are the row counts it takes."""

    draft_sampler = None

    @torch.no_grad()
    def __init__(self, model: Any, hf_config: Any, widths: tuple[int, ...]):
        start = time.perf_counter()
        self._text = compat.text_model(model)
        config = served_config(self._text, hf_config)
        extra = Extra()
        weights = model_weights(self._text, config, extra)
        self._views = PoolViews(config)
        self._runner, why = pick_runner(config, weights, max(widths), weights.embed.device)
        self.widths = tuple(width for width in widths if width <= self._runner.max_rows)
        self._summary = (
            f"{self._runner.name} ({why}); {extra.copied_bytes / 2**20:.1f} MiB copied, "
            f"{extra.kept_bytes / 2**20:.1f} MiB of MXFP4 kept, {time.perf_counter() - start:.1f} s"
        )
        self.steps = 0

    def summary(self) -> str:
        return self._summary

    def plan(self, input_ids: torch.Tensor, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The step to run, or None for SGLang's own forward. Reads shapes and host values only."""
        rows = int(input_ids.shape[0])
        unusual = any(arg is not None for arg in (*args, *kwargs.values()) if arg is not False)
        if unusual or rows not in self.widths or rows != forward_batch.batch_size:
            return None
        return compat.contract().Step(mode="decode", rows=rows) if compat.is_plain_decode(forward_batch) else None

    def check_launches(self) -> None:
        """Raises where a launch gave up whose results the host has; `compat.around_results` calls it."""
        self._runner.check()

    @torch.no_grad()
    def forward(
        self,
        step: Any,
        original: Callable,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Runs the step on SGLang's pools: new latents and states in place, logits for its sampler as the result."""
        running = compat.running_forward()
        state, batch = self._views.state(running), step_batch(running, forward_batch)
        logits = self._runner.step(state, batch, input_ids)
        compat.track_states(running, forward_batch)
        if self.steps == 0:
            logger.info("kimi-kernels: first covered step, %d rows", step.rows)
        self.steps += 1
        return compat.logits_output(self._text, logits, forward_batch)


def served_config(text: Any, hf_config: Any) -> Any:
    """Our config with what SGLang decided: activation dtype, and the eps its latent norms use (rms_norm_eps)."""
    config = model_config(hf_config, compat.act_dtype(text))
    if config.mla_layers:
        norm = text.model.layers[config.mla_layers[0]].self_attn.kv_a_layernorm
        config = dataclasses.replace(config, lora_eps=norm.variance_epsilon)
    return config
