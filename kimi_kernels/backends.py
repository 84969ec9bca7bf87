"""The namespaces that `decode_step` runs on: the reference, the Triton ops, and the collectives they share."""

import importlib
import os
from collections.abc import Callable
from types import SimpleNamespace

import torch

from kimi_kernels import reference
from kimi_kernels.collectives import single_rank
from kimi_kernels.op_specs import OPS

Tensor = torch.Tensor
BACKENDS = ("reference", "triton")


class BackendError(RuntimeError):
    """A backend that cannot run here; says what is missing."""


def make_ops(backend: str, device: torch.device | str = "cpu", collectives: dict[str, Callable] | None = None):
    """The ops namespace of `backend`. Raises BackendError naming what the backend needs and does not find."""
    if backend == "reference":
        functions = {name: rounded(name) for name in OPS}
    elif backend == "triton":
        functions = _triton_functions(torch.device(device))
    else:
        raise BackendError(f"backend must be one of {BACKENDS}, got {backend!r}")
    return SimpleNamespace(**functions, **(collectives or single_rank()))


def rounded(op: str, compute: torch.dtype = torch.float64) -> Callable:
    """The reference of `op` in `compute` precision, each output rounded once to the dtype that the op table gives
    it."""
    spec, function = OPS[op], getattr(reference, op)
    act = next((name for name, want in spec.args.items() if isinstance(want, str) and want.endswith(" act")), None)
    exact = {"f32": torch.float32, "i32": torch.int32, "i64": torch.int64}
    kinds = [want.split()[-1] for want in spec.outputs.values()]

    def run(*args):
        named = dict(zip(spec.args, args, strict=True))
        dtypes = {**exact, "act": named[act].dtype if act else None}
        first = next(iter(named))
        if named[first].is_floating_point():
            named[first] = named[first].to(compute)
        outputs = function(*named.values())
        if outputs is None:
            return None
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        outputs = tuple(o.to(dtypes[kind]) for o, kind in zip(outputs, kinds, strict=True))
        return outputs if len(outputs) > 1 else outputs[0]

    return run


def _triton_functions(device: torch.device) -> dict[str, Callable]:
    if device.type == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported
    try:
        knobs = importlib.import_module("triton").knobs
        triton_ops = importlib.import_module("triton_ops")
    except ImportError as error:
        raise BackendError(f"backend triton needs the package triton: {error}") from error
    if device.type == "cpu" and not knobs.runtime.interpret:
        raise BackendError("backend triton on a CPU needs TRITON_INTERPRET=1 before triton is first imported")
    if device.type == "cuda" and knobs.runtime.interpret:
        raise BackendError("backend triton on a GPU needs a process without TRITON_INTERPRET=1")
    return {name: getattr(triton_ops, name) for name in OPS}
