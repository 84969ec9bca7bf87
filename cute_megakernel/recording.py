"""The op calls of one step, recorded by running `decode_step` on tensors without data.

    recording = record_step(config, rows=1, tp=8, layers=(0, 1, 2))
    recording.calls[0].op, recording.calls[0].args["weight"]       "embedding", Weight(path="embed")

Every tensor is replaced by what it is: a `View` of an activation buffer, a `Weight`, a `Pool` of the state, or a field
of the batch by name.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import torch

from kimi_kernels.backends import single_rank
from kimi_kernels.checks import validate
from kimi_kernels.config import KimiConfig
from kimi_kernels.decode_step import decode_step
from kimi_kernels.meta_weights import meta_weights
from kimi_kernels.op_specs import OPS
from kimi_kernels.places import Locator, Place, storage_id
from kimi_kernels.state import Batch, State
from kimi_kernels.traffic import meta_outputs, meta_tensor
from kimi_kernels.weights import LayerWeights, ModelWeights

Tensor = torch.Tensor


@dataclass(frozen=True)
class Buffer:
    """An activation [rows, width] that one op call writes and later ones read; `index`: its place in the recording."""

    index: int
    name: str
    rows: int
    width: int  # elements of a row, inner dims flattened
    dtype: torch.dtype


@dataclass(frozen=True)
class View:
    """Columns [start, start + width) of a buffer."""

    buffer: Buffer
    start: int
    width: int


@dataclass(frozen=True)
class Weight:
    """A weight tensor by its path in `ModelWeights`, with the shape and the first element of the part that is read."""

    path: str
    shape: tuple[int, ...]
    start: int = 0


@dataclass(frozen=True)
class Pool:
    """A pool of the state: position in `State.layers` and field name."""

    layer: int
    field: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """One op call: argument name -> View, list of views, Weight, Pool, name of a batch field, or a number."""

    index: int
    op: str
    place: Place
    args: dict[str, object]
    outputs: tuple[Buffer, ...]


@dataclass
class Recording:
    calls: list[Call] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    rows: int = 0
    gathered: dict[str, int] = field(default_factory=dict)  # weight name -> ranks whose outputs come together


def record_step(
    config: KimiConfig, rows: int, tp: int = 1, layers: Sequence[int] | None = None, slots: int = 8, page_size: int = 64
) -> Recording:
    """One decode step of one rank, one token a sequence. `config` is the whole model's."""
    return record_local_step(config.shard(tp), meta_weights(config, tp, layers=layers), rows, slots, page_size)


def record_local_step(
    local: KimiConfig,
    weights: ModelWeights,
    rows: int,
    slots: int = 8,
    page_size: int = 64,
    gathered: dict[str, int] | None = None,
) -> Recording:
    """`record_step` of a rank whose config and weights (with or without data) are at hand.

    `gathered` names weights that are cut along their outputs over so many ranks (`router`, `latent_down`,
    `latent_up`): what they make is as wide as all ranks make it together.
    """
    weights = _without_data(weights)
    state = State.zeros(local, slots, slots, page_size, "meta", [layer.index for layer in weights.layers])
    batch = Batch(
        slots=meta_tensor(torch.int32, rows),
        is_new=meta_tensor(torch.bool, rows),
        seq_lens=meta_tensor(torch.int32, rows),
        page_table=meta_tensor(torch.int32, rows, 1),
    )
    tokens = meta_tensor(torch.int64, rows)
    recorder = Recorder(rows, Locator(weights))
    recorder.recording.gathered = gathered or {}
    recorder.name(batch)
    recorder.names[storage_id(tokens)] = "tokens"
    for path, tensor in weight_paths(weights):
        recorder.names[storage_id(tensor)] = Weight(path, tuple(tensor.shape))
    for index, layer_state in enumerate(state.layers):
        for name, pool in vars(layer_state).items():
            recorder.names[storage_id(pool)] = Pool(index, name, tuple(pool.shape))
    decode_step(recorder.ops(), local, weights, state, batch, tokens)
    return recorder.recording


class Recorder:
    """An ops namespace that writes down its calls. `names` maps the memory of known tensors to what they are."""

    def __init__(self, rows: int, locator: Locator | None = None):
        self.recording = Recording(rows=rows)
        self.names: dict[int, object] = {}
        self._locator = locator
        self._keep: list[Tensor] = []  # storage ids stay unique while their tensors live

    def name(self, owner):
        """Tensors of a dataclass go by the names of their fields."""
        for field_name, value in vars(owner).items():
            if isinstance(value, Tensor):
                self.names[storage_id(value)] = field_name

    def ops(self) -> SimpleNamespace:
        return SimpleNamespace(**{op: partial(self._call, op) for op in OPS}, **single_rank())

    def add_buffer(self, tensor: Tensor, name: str) -> Buffer:
        """Registers an activation; the first dim counts rows."""
        width = tensor[0].numel() if tensor.shape[0] else 0
        buffer = Buffer(len(self.recording.buffers), name, tensor.shape[0], width, tensor.dtype)
        self.recording.buffers.append(buffer)
        self.names[storage_id(tensor)] = buffer
        self._keep.append(tensor)
        return buffer

    def _call(self, op: str, *args):
        spec = OPS[op]
        named = dict(zip(spec.args, args, strict=True))
        dims = validate(op, **named)
        outputs = meta_outputs(op, named, dims)
        outputs = self._gather(named, outputs)
        place = self._locator.locate(args) if self._locator else Place(None, op)
        index = len(self.recording.calls)
        buffers = tuple(
            self.add_buffer(output, f"{index}.{op}.{name}") for output, name in zip(outputs, spec.outputs, strict=True)
        )
        described = {name: self._describe(value) for name, value in named.items()}
        self.recording.calls.append(Call(index, op, place, described, buffers))
        return outputs if len(outputs) > 1 else outputs[0] if outputs else None

    def _gather(self, named: dict, outputs: tuple) -> tuple:
        """Outputs of a weight that is cut over ranks, as wide as those of all ranks."""
        weight = self.names.get(storage_id(named["weight"])) if torch.is_tensor(named.get("weight")) else None
        ranks = self.recording.gathered.get(weight.path.split(".")[-1], 1) if isinstance(weight, Weight) else 1
        return outputs if ranks == 1 else (outputs[0].repeat(1, ranks),)

    def _describe(self, value):
        if isinstance(value, list | tuple):
            return [self._describe(item) for item in value]
        if not isinstance(value, Tensor):
            return value
        known = self.names[storage_id(value)]
        if isinstance(known, Buffer):
            return View(known, int(value.storage_offset()), value[0].numel())
        if isinstance(known, Weight):
            return Weight(known.path, tuple(value.shape), int(value.storage_offset()))
        return known


def weight_paths(weights: ModelWeights):
    """(path, tensor) of every weight: `embed`, `layers.3.attn.in_proj`, ...; the number is the position in `layers`."""
    for name, value in vars(weights).items():
        if isinstance(value, Tensor):
            yield name, value
    for position, layer in enumerate(weights.layers):
        yield from _paths(layer, f"layers.{position}")


def _paths(owner, prefix: str):
    for item in dataclasses.fields(owner):
        value = getattr(owner, item.name)
        if isinstance(value, Tensor):
            yield f"{prefix}.{item.name}", value
        elif dataclasses.is_dataclass(value):
            yield from _paths(value, f"{prefix}.{item.name}")


def _without_data(weights):
    """The same dataclass with meta tensors."""
    changes: dict[str, object] = {}
    for item in dataclasses.fields(weights):
        value = getattr(weights, item.name)
        if isinstance(value, Tensor):
            changes[item.name] = torch.empty(value.shape, dtype=value.dtype, device="meta")
        elif dataclasses.is_dataclass(value):
            changes[item.name] = _without_data(value)
        elif isinstance(value, tuple) and value and isinstance(value[0], LayerWeights):
            changes[item.name] = tuple(_without_data(layer) for layer in value)
    return dataclasses.replace(weights, **changes)
