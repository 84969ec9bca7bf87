"""Runs decode steps on two backends at once, op by op on the same inputs, and checks both against the float64 bound.

    report = compare_step("reference", "triton", config, weights, tokens=[1, 2], steps=4)
    report.passed, report.failure, report.ops

What the left side computes goes on to the next op, so an error of the right side never spreads: each op is judged
alone. The pools start as NaN, so that reading what no step wrote shows. The run stops at the first op over its bound.
"""

from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import torch
from tqdm import tqdm

from kimi_kernels.backends import make_ops, single_rank
from kimi_kernels.compare import Result, assert_same_bits, compare_outputs, reference_bounds
from kimi_kernels.config import KimiConfig
from kimi_kernels.decoder import Decoder
from kimi_kernels.op_specs import OPS
from kimi_kernels.places import Locator
from kimi_kernels.traffic import argument_kind
from kimi_kernels.weights import ModelWeights

Tensor = torch.Tensor


@dataclass
class OpReport:
    """One op over all its calls: worst error of each side as a fraction of its bound, and where that was."""

    op: str
    calls: int = 0
    left_ratio: float = 0.0
    left_where: str = ""
    right_ratio: float = 0.0
    right_where: str = ""


@dataclass
class StepReport:
    """Outcome of `compare_step`; `failure` is empty or says which op of which side left its bound, and where."""

    ops: dict[str, OpReport] = field(default_factory=dict)  # in the order of the step
    steps: int = 0  # completed
    fed: list[int] = field(default_factory=list)  # the token of each step
    failure: str = ""

    @property
    def passed(self) -> bool:
        return not self.failure


class OverBound(Exception):
    """Ends the run; its text is the failure."""


def compare_step(
    left: str,
    right: str,
    config: KimiConfig,
    weights: ModelWeights,
    tokens: list[int],
    steps: int,
    device: torch.device | str = "cpu",
    right_ops: SimpleNamespace | None = None,
    progress: bool = False,
) -> StepReport:
    """Feeds `tokens`, then the greedy continuation, `steps` steps in all. `config` and `weights` are one rank's.

    `right_ops` replaces the namespace of backend `right`. Raises ValueError for tokens or steps that cannot run.
    """
    check_feed("compare_step", tokens, steps, weights)
    report = StepReport()
    sides = {"left": (left, make_ops(left, device)), "right": (right, right_ops or make_ops(right, device))}
    pair = _Pair(sides, weights, report)
    # backend "reference": the pair runs on the host side step by step, never in a graph
    decoder = Decoder(config, weights, "reference", 1, steps, str(device), ops=pair.namespace())
    for layer in decoder.state.layers:
        for pool in vars(layer).values():
            pool.fill_(torch.nan)
    token = tokens[0]
    try:
        for step in tqdm(range(steps), unit="step", disable=None if progress else True):
            token = tokens[step] if step < len(tokens) else token
            report.fed.append(token)
            output = decoder.step(torch.tensor([token], device=device))
            token = int(output.tokens[0])
            report.steps += 1
    except OverBound as failure:
        report.failure = str(failure)
    return report


def check_feed(caller: str, tokens: list[int], steps: int, weights: ModelWeights) -> None:
    """Raises ValueError for tokens or steps that cannot run."""
    if steps < 1 or not tokens:
        raise ValueError(f"{caller}: needs at least one step and one token, got {steps} and {tokens}")
    vocab = weights.embed.shape[0]
    if bad := [token for token in tokens if not 0 <= token < vocab]:
        raise ValueError(f"{caller}: token ids must be in [0, {vocab}), got {bad[:8]}")


class _Pair:
    """Two namespaces run as one."""

    def __init__(self, sides: dict[str, tuple[str, SimpleNamespace]], weights: ModelWeights, report: StepReport):
        self.sides, self.locator, self.report = sides, Locator(weights), report

    def namespace(self) -> SimpleNamespace:
        return SimpleNamespace(**{op: partial(self._call, op) for op in OPS}, **single_rank())

    def _call(self, op: str, *args):
        """Runs both sides, the right one on copies of what the op changes; returns the left outputs."""
        spec, place = OPS[op], self.locator.locate(args)
        self.report.ops.setdefault(op, OpReport(op)).calls += 1
        where = f"step {len(self.report.fed) - 1}, {place}"
        before = tuple(_copy(arg) if _may_change(op, name) else arg for name, arg in zip(spec.args, args, strict=True))
        copies = tuple(_copy(arg) if name in spec.inplace else arg for name, arg in zip(spec.args, args, strict=True))
        bounds = reference_bounds(op, before)
        self._judge("right", op, before, copies, bounds, where)
        return self._judge("left", op, before, args, bounds, where)

    def _judge(self, side: str, op: str, before: tuple, args: tuple, bounds: tuple, where: str):
        """Runs `op` of one side on `args`, which hold what `before` holds, and checks all that it wrote."""
        backend, ops = self.sides[side]
        outputs = getattr(ops, op)(*args)
        changed = {name: arg for name, arg in zip(OPS[op].args, args, strict=True) if name in OPS[op].inplace}
        result = _input_changes(op, before, args) or compare_outputs(op, before, outputs, changed, bounds)
        entry = self.report.ops[op]
        if result.ratio > getattr(entry, f"{side}_ratio"):
            setattr(entry, f"{side}_ratio", result.ratio)
            setattr(entry, f"{side}_where", f"{where}, {result.where}".removesuffix(", "))
        if result.failure:
            raise OverBound(f"{where}, {side} side ({backend}): {result.failure}")
        return outputs


def _may_change(op: str, name: str) -> bool:
    """In-place arguments, and the rows of this step, which a wrong op could overwrite for the ops after it."""
    want = OPS[op].args[name]
    return name in OPS[op].inplace or (isinstance(want, str) and argument_kind(want) == "input")


def _copy(value):
    return [tensor.clone() for tensor in value] if isinstance(value, list) else value.clone()


def _input_changes(op: str, before: tuple, args: tuple) -> Result | None:
    """A failure where an argument that is only read was written."""
    for name, was, now in zip(OPS[op].args, before, args, strict=True):
        if was is now or name in OPS[op].inplace:
            continue
        for a, b in zip(was, now, strict=True) if isinstance(was, list) else [(was, now)]:
            try:
                assert_same_bits(b, a, f"{op}: argument {name} was changed")
            except AssertionError as error:
                return Result(op, float("inf"), name, str(error))
    return None
