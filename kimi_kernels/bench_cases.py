"""The op calls of one decode step at real shapes, as cases to check and to time.

The calls come from running `decode_step` on tensors without data, so shapes, dtypes, strides and offsets are those of
the step. Calls of one op with equal shapes are one case.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from types import SimpleNamespace

import torch

from kimi_kernels.checks import resolve, validate
from kimi_kernels.collectives import single_rank
from kimi_kernels.config import KimiConfig
from kimi_kernels.decode_step import decode_step
from kimi_kernels.meta_weights import meta_weights
from kimi_kernels.op_specs import DTYPE_CLASSES, OPS
from kimi_kernels.places import storage_id
from kimi_kernels.state import Batch, State
from kimi_kernels.traffic import PAGE_SIZE, OpCall, record_step
from kimi_kernels.weights import ModelWeights

Tensor = torch.Tensor
COLD_BYTES = 220_000_000  # distinct data of one graph; several times the L2 of any GPU meant here
MAX_SETS, MIN_CALLS = 64, 4
MEMORY_BYTES = 32_000_000_000  # of all input sets of one case
MAX_BANK, USUAL_BANK = 8, 4  # residual-bank rows that get a row of their own


@dataclass(frozen=True)
class Case:
    """One op at one shape. `args` are meta tensors, laid out as in the step, and scalars."""

    name: str  # op, or op/weight where an op runs at several shapes
    call: OpCall
    args: tuple

    @property
    def op(self) -> str:
        return self.call.op

    @property
    def nbytes(self) -> int:
        """Every needed byte once: weights, touched state, inputs, outputs."""
        return self.call.read_bytes + self.call.written_bytes

    @property
    def sets(self) -> int:
        """Distinct input sets that make the data cold, at most MAX_SETS and MEMORY_BYTES."""
        allocated = sum(tensor.nbytes for tensor in tensors_of(self.args))
        return max(1, min(math.ceil(COLD_BYTES / self.nbytes), MAX_SETS, MEMORY_BYTES // max(1, allocated)))

    @property
    def cold(self) -> bool:
        return self.sets * self.nbytes >= COLD_BYTES


def step_cases(config: KimiConfig, tp: int, rows: int, context: int) -> list[Case]:
    """One case per op and shape, in step order. `config` is the whole model's; a row is one sequence."""
    layers = _representative_layers(config)
    local, weights = config.shard(tp), meta_weights(config, tp, layers=layers)
    recorder = _Recorder(weights)
    state, batch = meta_state(local, layers, rows, context)
    tokens = torch.empty(rows, dtype=torch.int64, device="meta")
    decode_step(recorder.namespace(), local, weights, state, batch, tokens)
    shapes: dict[str, dict[tuple, tuple[str, OpCall, tuple]]] = defaultdict(dict)
    calls = record_step(config, tp, rows, context, layers=layers)
    for (op, label, args), call in zip(recorder.calls, calls, strict=True):
        assert op == call.op
        shapes[op].setdefault(_signature(args), (label, call, args))
    banks = [signature for signature, (_, _, args) in shapes["attn_res_norm"].items() if len(args[1]) != USUAL_BANK]
    for signature in banks[:-1]:
        del shapes["attn_res_norm"][signature]
    return [
        Case(f"{op}/{label}" if len(found) > 1 or op == "linear" else op, call, args)
        for op, found in shapes.items()
        for label, call, args in found.values()
    ]


def meta_state(local: KimiConfig, layers: tuple[int, ...], rows: int, context: int) -> tuple[State, Batch]:
    """State and batch of `rows` sequences without data."""
    pages = -(-context // PAGE_SIZE)
    empty = partial(torch.empty, device="meta")
    batch = Batch(
        slots=empty(rows, dtype=torch.int32),
        is_new=empty(rows, dtype=torch.bool),
        seq_lens=empty(rows, dtype=torch.int32),
        page_table=empty(rows, pages, dtype=torch.int32),
    )
    return State.zeros(local, rows, rows * pages, PAGE_SIZE, "meta", layers), batch


def tensors_of(args: tuple) -> Iterator[Tensor]:
    for arg in args:
        members = arg if isinstance(arg, list | tuple) else [arg]
        yield from (member for member in members if isinstance(member, Tensor))


class _Recorder:
    """Runs a step without data and keeps op, label and arguments of every call, in order."""

    def __init__(self, weights: ModelWeights):
        self.calls: list[tuple[str, str, tuple]] = []
        self._weights = {storage_id(tensor): name for name, tensor in named_weights(weights)}
        self._made: dict[int, str] = {}

    def namespace(self) -> SimpleNamespace:
        return SimpleNamespace(**{op: partial(self._record, op) for op in OPS}, **single_rank())

    def _record(self, op: str, *args):
        spec = OPS[op]
        dims = validate(op, **dict(zip(spec.args, args, strict=True)))
        act = next((arg.dtype for want, arg in zip(spec.args.values(), args, strict=True) if _is_act(want)), None)
        outputs = []
        for *shape, kind in (want.split() for want in spec.outputs.values()):
            dtype = act if kind == "act" else DTYPE_CLASSES[kind][0]
            outputs.append(torch.empty([resolve(dim, dims) for dim in shape], dtype=dtype, device="meta"))
        label = self._label(op, args)
        self._made |= {storage_id(output): label for output in outputs}
        self.calls.append((op, label, args))
        return tuple(outputs) if len(outputs) > 1 else outputs[0] if outputs else None

    def _label(self, op: str, args: tuple) -> str:
        """The weight that the call reads, or what made its first argument."""
        if op == "attn_res_norm":
            return f"bank{len(args[1])}"
        if op.startswith("moe_"):
            return op
        storages = [storage_id(tensor) for tensor in tensors_of(args)]
        labels = [known[s] for known in (self._weights, self._made) for s in storages if s in known]
        return labels[0] if labels else op


def _is_act(want) -> bool:
    return isinstance(want, str) and want.endswith(" act") and not want.startswith("*")


def named_weights(weights: ModelWeights) -> Iterator[tuple[str, Tensor]]:
    """Every weight tensor with a name for people: kda_in_proj, shared_down, latent_up, lm_head."""
    prefixes = {"KdaWeights": "kda_", "MlaWeights": "mla_", "DenseWeights": "dense_"}

    def walk(owner, prefix: str) -> Iterator[tuple[str, Tensor]]:
        for field in fields(owner):
            value = getattr(owner, field.name)
            if isinstance(value, Tensor):
                yield prefix + field.name, value
            elif is_dataclass(value):
                nested = "shared_" if field.name == "shared" else prefixes.get(type(value).__name__, "")
                yield from walk(value, nested)

    yield from walk(weights, "")
    for layer in weights.layers:
        yield from walk(layer, "")


def _representative_layers(config: KimiConfig) -> tuple[int, ...]:
    """A dense layer, a KDA and an MLA layer with experts, and enough block starts that the residual bank fills up."""
    moe = [layer for layer in range(config.num_layers) if layer not in config.dense_layers]
    kda = next(layer for layer in moe if layer not in config.mla_layers)
    mla = next(layer for layer in moe if layer in config.mla_layers)
    starts = [layer for layer in range(config.num_layers) if config.starts_block(layer)][:MAX_BANK]
    return tuple(sorted({*config.dense_layers[:1], kda, mla, *starts}))


def _signature(args: tuple) -> tuple:
    """Shapes and dtypes; strides do not make another case."""
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_of(args))
