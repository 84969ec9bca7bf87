"""Compares an op with the float64 reference, element by element, against the error bound of its own inputs.

An output x of dtype d passes where

    |x - ref| <= err(ref) + 1/2 ulp_d(|ref| + err(ref))

with err from `error_bound` and the half ulp for the one rounding on output. Triton's interpreter truncates on
conversion to
bfloat16, so there the rounding term is a whole ulp. NaN and infinities must match exactly. Tensors changed in place
are compared
the same way where the reference wrote, and bit for bit everywhere else.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kimi_kernels import reference
from kimi_kernels.error_bound import TINY, Bounded, bounded
from kimi_kernels.op_specs import DTYPE_CLASSES, OPS

Tensor = torch.Tensor


@dataclass(frozen=True)
class Result:
    """Outcome of one comparison: worst error as a fraction of its bound, and where it was."""

    op: str
    ratio: float
    where: str = ""
    failure: str = ""

    @property
    def passed(self) -> bool:
        return not self.failure


class _Pool:
    """A pool that the reference reads and writes: reads fall through to the tensor, writes are kept aside."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor
        self.written: dict[int | tuple, Bounded] = {}
        self.shape, self.device = tensor.shape, tensor.device

    def __getitem__(self, index):
        if isinstance(index, int | tuple) and index in self.written:
            return self.written[index]
        return self.tensor[index]

    def __setitem__(self, index, value) -> None:
        self.written[index] = bounded(value)


def interpreted() -> bool:
    """True where Triton kernels run in the interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance between neighbouring numbers of `dtype` at |x|, in float64; the subnormal spacing near zero."""
    info = torch.finfo(dtype)
    magnitude = x.abs().clamp(min=info.tiny, max=info.max).double()
    return torch.exp2(torch.floor(torch.log2(magnitude))) * info.eps


def reference_bounds(op: str, args: tuple) -> tuple[list[Bounded | Tensor], dict[str, _Pool]]:
    """Outputs of the reference with their bounds, and the pools it wrote, for arguments of any dtype."""
    spec = OPS[op]
    pools: dict[str, _Pool] = {}
    call = []
    for name, arg in zip(spec.args, args, strict=True):
        if name in spec.inplace:
            arg = pools[name] = _Pool(arg)
        elif isinstance(arg, list | tuple):
            arg = [Bounded(t.double()) for t in arg]
        elif isinstance(arg, Tensor) and arg.is_floating_point() and name not in spec.pools:
            arg = Bounded(arg.double())
        call.append(arg)
    outputs = getattr(reference, op)(*call)
    if outputs is None:
        outputs = ()
    return list(outputs) if isinstance(outputs, tuple) else [outputs], pools


def compare_outputs(op: str, args: tuple, outputs, changed: dict[str, Tensor], bounds=None) -> Result:
    """Checks `outputs` (tensor, tuple or None) and the in-place arguments `changed` of a run of `op` on `args`
    (unchanged).

    `bounds` is `reference_bounds(op, args)`, for callers that compare several runs on the same arguments.
    """
    outputs = () if outputs is None else outputs if isinstance(outputs, tuple) else (outputs,)
    expected, pools = bounds or reference_bounds(op, args)
    spec = OPS[op]
    if len(outputs) != len(expected):
        return Result(op, float("inf"), failure=f"{op}: {len(outputs)} outputs, expected {len(expected)}")
    worst = Result(op, 0.0)
    if op == "moe_router":
        return _compare_router(args, outputs)
    kinds = {
        "act": _act_dtype(op, args),
        **{kind: dtypes[0] for kind, dtypes in DTYPE_CLASSES.items() if kind != "act"},
    }
    for (name, shape), got, want in zip(spec.outputs.items(), outputs, expected, strict=True):
        if got.dtype != kinds[shape.split()[-1]]:
            failure = f"{op}: {name} is {got.dtype}, expected {kinds[shape.split()[-1]]}"
            return Result(op, float("inf"), name, failure)
        worst = _worse(worst, _compare_tensor(op, name, got, want))
    for name, pool in pools.items():
        worst = _worse(worst, _compare_pool(op, name, changed[name], pool))
    return worst


def _act_dtype(op: str, args: tuple) -> torch.dtype | None:
    """Activation dtype of a call: that of its first `act` argument."""
    for arg, want in zip(args, OPS[op].args.values(), strict=True):
        if isinstance(want, str) and want.endswith(" act"):
            return arg.dtype if isinstance(arg, Tensor) else arg[0].dtype
    return None


def run_on_clones(op: str, fn: Callable, args: tuple):
    """Runs `fn` with the in-place arguments cloned; returns its outputs and the clones."""
    inplace = OPS[op].inplace
    changed = {name: arg.clone() for name, arg in zip(OPS[op].args, args, strict=True) if name in inplace}
    call = [changed.get(name, arg) for name, arg in zip(OPS[op].args, args, strict=True)]
    return fn(*call), changed


def check_op(op: str, fn: Callable, *args) -> Result:
    """Runs `fn` as `op` on clones of `args` and raises AssertionError where it leaves the bound of the reference."""
    outputs, changed = run_on_clones(op, fn, args)
    result = compare_outputs(op, args, outputs, changed)
    assert result.passed, result.failure
    return result


def assert_same_bits(a: Tensor, b: Tensor, what: str = "tensors") -> None:
    """Fails unless a and b hold the same bytes (NaN equals the same NaN)."""
    assert a.shape == b.shape and a.dtype == b.dtype, f"{what}: {a.shape} {a.dtype} against {b.shape} {b.dtype}"
    differ = _bits(a) != _bits(b)
    if bool(differ.any()):
        index = tuple(differ.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(differ.sum())} elements differ, first at {index}: {a[index]} against {b[index]}"
        )


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def _worse(a: Result, b: Result) -> Result:
    if a.failure or b.failure:
        return a if a.failure else b
    return b if b.ratio > a.ratio else a


def _compare_tensor(op: str, name: str, got: Tensor, want: Bounded | Tensor) -> Result:
    if not isinstance(want, Bounded) and not want.is_floating_point():
        return _compare_exact(op, name, got, want)
    want = bounded(want)
    if got.shape != want.shape:
        return Result(op, float("inf"), name, f"{op}: {name} has shape {list(got.shape)}, expected {list(want.shape)}")
    if got.numel() == 0:
        return Result(op, 0.0, name)
    ref, limit = want.value, rounding_limit(want, got.dtype)
    error = (got.double() - ref).abs()
    # NaN and infinities agree exactly, or the reference is so close to the largest number that rounding decides
    largest = torch.finfo(got.dtype).max
    agree = (got.isnan() & ref.isnan()) | (got.double() == ref)
    overflow = got.isinf() & (ref.abs() + limit >= largest) & (got.sign() == ref.sign())
    ratio = torch.where(agree | overflow, 0.0, torch.nan_to_num(error / limit, nan=torch.inf))
    flat = int(ratio.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), ratio.shape))
    worst = float(ratio.flatten()[flat])
    failure = ""
    if worst > 1:
        failure = (
            f"{op}: {name}{list(index)} = {float(got[index]):.9g}, reference {float(ref[index]):.9g}, "
            f"error {float(error[index]):.3g} is {worst:.3g} times its bound {float(limit[index]):.3g} "
            f"({int((ratio > 1).sum())} of {ratio.numel()} elements over)"
        )
    return Result(op, worst, f"{name}{list(index)}", failure)


def rounding_limit(want: Bounded, dtype: torch.dtype) -> Tensor:
    """Error that a correct kernel may make: its float32 arithmetic plus one rounding to `dtype`."""
    spacing = ulp(want.value.abs() + want.err, dtype)
    if interpreted() and dtype == torch.bfloat16:
        return want.err + spacing + TINY  # truncates, and converts subnormals to other subnormals
    return want.err + 0.5 * spacing


def _compare_exact(op: str, name: str, got: Tensor, want: Tensor) -> Result:
    if got.shape == want.shape and bool((got.long() == want.long()).all()):
        return Result(op, 0.0, name)
    return Result(op, float("inf"), name, f"{op}: {name} is {got.tolist()}, expected {want.tolist()}")


def _compare_pool(op: str, name: str, got: Tensor, pool: _Pool) -> Result:
    worst = Result(op, 0.0)
    untouched = pool.tensor.clone()
    for index, want in pool.written.items():
        worst = _worse(worst, _compare_tensor(op, f"{name}[{index}]", got[index], want))
        untouched[index] = got[index]
    try:
        assert_same_bits(got, untouched, f"{op}: {name} outside the slots it may write")
    except AssertionError as error:
        return Result(op, float("inf"), name, str(error))
    return worst


def _compare_router(args: tuple, outputs: tuple) -> Result:
    """Picks may differ only between experts whose keys are closer than their bounds; weights are compared per
    expert."""
    (ids, weights), (logits, bias, top_k, scaling) = outputs, args
    op = "moe_router"
    raw: Any = Bounded(logits.double())
    scores = torch.nan_to_num(torch.sigmoid(raw), nan=0.0)
    key = scores + bias
    worst = Result(op, 0.0)
    for r, picked in enumerate(ids.tolist()):
        rest = sorted(set(range(key.shape[1])) - set(picked))
        if len(set(picked)) != top_k or len(rest) != key.shape[1] - top_k:
            return Result(
                op, float("inf"), f"row {r}", f"{op}: row {r} picks {picked}, not {top_k} distinct expert ids"
            )
        key_r = key[r]
        low, high = key_r[picked], key_r[rest]
        if rest and bool((high.value - high.err).amax() > (low.value + low.err).amin()):
            want = torch.argsort(key_r.value, descending=True, stable=True)[:top_k].tolist()
            return Result(op, float("inf"), f"row {r}", f"{op}: row {r} picks {picked}, expected {want}")
        chosen = scores[r][picked]
        want = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scaling
        worst = _worse(worst, _compare_tensor(op, f"topk_weights[{r}]", weights[r], want))
    return worst
