"""Runs the megakernel with every op's output tapped, then the page of the step again over what it handed on, and checks
each op alone: its bound is that of the inputs it had inside the fused kernel.

    report = compare_fused("triton", "megakernel", config, weights, tokens=[1, 2], steps=4, device="cuda")
    report.passed, report.failure, report.ops

The other side runs op by op on the same tapped inputs, on copies of what an op changes. The workspace is NaN before
each launch, so a tap that nothing wrote shows. What no row hands on is
computed again with the rounding of the op. The run stops at the first op, in the order of the step, over its bound.
"""

import math
from functools import partial
from types import SimpleNamespace

import torch

from kimi_kernels.backends import make_ops, rounded, single_rank
from kimi_kernels.compare import Result, assert_same_bits, compare_outputs, reference_bounds, run_on_clones
from kimi_kernels.compare_step import OpReport, OverBound, StepReport, check_feed, feed
from kimi_kernels.config import KimiConfig
from kimi_kernels.decode_step import StepOutput, decode_step
from kimi_kernels.decoder import Decoder
from kimi_kernels.op_specs import OPS
from kimi_kernels.places import Locator
from kimi_kernels.state import Batch, State
from kimi_kernels.weights import ModelWeights

Tensor = torch.Tensor
FUSED = "megakernel"


def compare_fused(
    left: str,
    right: str,
    config: KimiConfig,
    weights: ModelWeights,
    tokens: list[int],
    steps: int,
    device: torch.device | str = "cuda",
    progress: bool = False,
) -> StepReport:
    """`compare_step` where one side is the megakernel. Raises ValueError where both are, or neither."""
    if (left == FUSED) == (right == FUSED):
        raise ValueError(f"compare_fused: exactly one side must be {FUSED}, got {left} and {right}")
    check_feed("compare_fused", tokens, steps, weights)
    report = StepReport()
    side, other = ("left", right) if left == FUSED else ("right", left)
    decoder = _Walking(config, weights, FUSED, 1, steps, str(device), kernel_options={"taps": True})
    decoder.walk = Walk(config, weights, decoder.kernel, report, {other: make_ops(other, device)}, side)
    feed(decoder, tokens, steps, report, progress)
    return report


class _Walking(Decoder):
    """Steps through a Walk, without a graph."""

    walk: "Walk"

    def step(self, tokens: Tensor) -> StepOutput:
        self.use_graph = False
        return super().step(tokens)

    def _run(self) -> StepOutput:
        return self.walk.step(self.tokens, self.batch)


class Walk:
    """Judges the steps of one Megakernel with taps, and of the namespaces in `others` on the same inputs.

    `report` collects the worst errors; its `right` columns are the megakernel's where `side` is "right".
    Raises OverBound at the first op that leaves its bound.
    """

    def __init__(
        self,
        config: KimiConfig,
        weights: ModelWeights,
        kernel,
        report: StepReport,
        others: dict[str, SimpleNamespace] | None = None,
        side: str = "right",
    ):
        self.config, self.weights, self.kernel, self.report = config, weights, kernel, report
        self.others = others or {}
        self.side, self.other_side = side, "left" if side == "right" else "right"
        self._calls = kernel.schedule.recording.calls
        self._next = 0
        self._after: dict[int, Tensor] = {}  # by id of a pool before the step: the pool after it

    def step(self, tokens: Tensor, batch: Batch) -> StepOutput:
        """One launch, then its ops one by one."""
        state = self.kernel.state
        before = State(tuple(type(l)(**{n: p.clone() for n, p in vars(l).items()}) for l in state.layers))
        self.kernel.poison()
        output = self.kernel.step(tokens, batch)
        self.kernel.check()
        pairs = zip(before.layers, state.layers, strict=True)
        self._after = {id(p): vars(now)[name] for old, now in pairs for name, p in vars(old).items()}
        self._next, self._locator = 0, Locator(self.weights)
        ops = SimpleNamespace(**{op: partial(self._call, op) for op in OPS}, **single_rank())
        decode_step(ops, self.config, self.weights, before, batch, tokens)
        assert self._next == len(self._calls)
        return output

    def _call(self, op: str, *args):
        call = self._calls[self._next]
        assert call.op == op, f"recorded {call.op}, the page runs {op}"
        self._next += 1
        entry = self.report.ops.setdefault(op, OpReport(op))
        entry.calls += 1
        where = f"step {max(0, len(self.report.fed) - 1)}, {self._locator.locate(args)}"
        bounds = reference_bounds(op, args)
        pairs = zip(call.outputs, bounds[0], strict=True)
        taps = [self._handed_on(op, buffer.index, args, tuple(want.shape)) for buffer, want in pairs]
        outputs = tuple(tap for tap in taps if tap is not None)
        spec = OPS[op]
        changed = {n: self._after[id(arg)] for n, arg in zip(spec.args, args, strict=True) if n in spec.inplace}
        if len(outputs) < len(taps):
            again = rounded(op, torch.float32)(*args)
            outputs = again if isinstance(again, tuple) else (again,)
        else:
            own = tuple(_own_part(tap, tuple(want.shape)) for tap, want in zip(outputs, bounds[0], strict=True))
            result = _check_parts(op, outputs, own) or compare_outputs(op, args, own, changed, bounds)
            self._note(entry, self.side, FUSED, where, result)
        for name, ops in self.others.items():
            theirs, moved = run_on_clones(op, getattr(ops, op), args)
            self._note(entry, self.other_side, name, where, compare_outputs(op, args, theirs, moved, bounds))
        for name, arg in zip(spec.args, args, strict=True):
            if name in spec.inplace:
                arg.copy_(changed[name])
        return outputs if len(outputs) > 1 else outputs[0] if outputs else None

    def _handed_on(self, op: str, index: int, args: tuple, shape: tuple) -> Tensor | None:
        """The tapped output in the shape that the op gives it; wider where ranks are gathered."""
        tap = self.kernel.handed_on(index)
        if tap is None:
            return None
        if op == "mla_absorb_query":  # the kernel keeps the unrotated dims where the query is
            q, w_uk = args
            rows, heads, latent = q.shape[0], w_uk.shape[0], w_uk.shape[2]
            packed = tap[:, : heads * latent].reshape(rows, heads, latent)
            return torch.cat([packed, q[..., w_uk.shape[1] :]], dim=-1)
        return tap if tap.numel() > math.prod(shape) else tap.reshape(shape)

    def _note(self, entry: OpReport, side: str, backend: str, where: str, result: Result) -> None:
        if result.ratio > getattr(entry, f"{side}_ratio"):
            setattr(entry, f"{side}_ratio", result.ratio)
            setattr(entry, f"{side}_where", f"{where}, {result.where}".removesuffix(", "))
        if result.failure:
            raise OverBound(f"{where}, {side} side ({backend}): {result.failure}")


def _own_part(output: Tensor, shape: tuple) -> Tensor:
    """What this rank makes of an output that is gathered from all."""
    return output if tuple(output.shape) == shape else output[:, : shape[1]]


def _check_parts(op: str, outputs: tuple, own: tuple) -> Result | None:
    """Where this rank stands in for all ranks, their parts have equal bits."""
    for output, part in zip(outputs, own, strict=True):
        for other in output.split(part.shape[1], dim=1) if output.shape != part.shape else ():
            try:
                assert_same_bits(other, part, f"{op}: parts of two ranks")
            except AssertionError as error:
                return Result(op, float("inf"), failure=str(error))
    return None
