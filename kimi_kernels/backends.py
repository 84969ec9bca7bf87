"""What runs a step: the namespaces that `decode_step` runs on (the reference, the Triton ops, and the collectives they
share), and the megakernel, which is no namespace but a whole step.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable
from types import SimpleNamespace

import torch

from kimi_kernels import reference
from kimi_kernels.collectives import single_rank
from kimi_kernels.config import KimiConfig
from kimi_kernels.op_specs import OPS
from kimi_kernels.state import State
from kimi_kernels.weights import ModelWeights

Tensor = torch.Tensor
BACKENDS = ("reference", "triton", "megakernel")
MEGAKERNEL_CAPABILITIES = (9, 10)  # sm_90a, sm_100a


class BackendError(RuntimeError):
    """A backend that cannot run here, or to the end; says what is missing."""


def make_ops(backend: str, device: torch.device | str = "cpu", collectives: dict[str, Callable] | None = None):
    """The ops namespace of `backend`. Raises BackendError naming what the backend needs and does not find."""
    if backend == "reference":
        functions = {name: rounded(name) for name in OPS}
    elif backend == "triton":
        functions = _triton_functions(torch.device(device))
    elif backend == "megakernel":
        raise BackendError("backend megakernel runs whole steps: it has no ops to call one by one")
    else:
        raise BackendError(f"backend must be one of {BACKENDS}, got {backend!r}")
    return SimpleNamespace(**functions, **(collectives or single_rank()))


def make_megakernel(config: KimiConfig, weights: ModelWeights, state: State, rows: int, **options):
    """`cute_megakernel.Megakernel` of one rank, `options` as it takes them. Raises as `check_megakernel` does."""
    check_megakernel(weights.embed.device, config.dtype, rows)
    module = importlib.import_module("cute_megakernel.megakernel")
    return module.Megakernel(config, module.Images(weights), state, rows, **options)


def check_megakernel(device: torch.device | str, dtype: torch.dtype | None = None, rows: int = 1) -> None:
    """Raises ValueError for a model or batch that the megakernel does not run, BackendError naming what is missing."""
    most = importlib.import_module("cute_megakernel.megakernel").MAX_ROWS
    if dtype not in (None, torch.bfloat16):
        raise ValueError(f"backend megakernel: dtype must be bfloat16, got {str(dtype).removeprefix('torch.')}")
    if not 1 <= rows <= most:
        raise ValueError(f"backend megakernel: batch must be in [1, {most}], got {rows}")
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        found = "torch sees no GPU here" if not torch.cuda.is_available() else f"the device is {device}"
        raise BackendError(
            f"backend megakernel needs an sm_90a or sm_100a GPU and the package nvidia-cutlass-dsl: {found}"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if major not in MEGAKERNEL_CAPABILITIES:
        raise BackendError(f"backend megakernel needs an sm_90a or sm_100a GPU, this one is sm_{major}{minor}")
    for package in ("cutlass", "cuda"):
        if importlib.util.find_spec(package) is None:
            raise BackendError('backend megakernel needs nvidia-cutlass-dsl: pip install "kimi-kernels[megakernel]"')


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
