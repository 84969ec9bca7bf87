"""Bytes that one decode step must move, counted by running `decode_step` on tensors without data.

Each op reads its inputs and writes its outputs once. Of a pool it touches only the rows that `op_specs` names (changed
in place: read and written), of the experts the expected number of distinct ones under uniform routing:

    ACTIVE = E (1 - (1 - A/E)^R)          A for one row
    S      = context, cached tokens of each sequence, those of this step included

An argument's kind is its leading dim: rows of this step (R, B), pools (SLOTS, PAGES), anything else is a weight.
Weights and pools come from memory in every step; what one op hands to the next may stay in cache, so it is counted
apart. Collectives move no bytes here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch

from kimi_kernels.backends import single_rank
from kimi_kernels.checks import resolve, validate
from kimi_kernels.config import KimiConfig
from kimi_kernels.decode_step import decode_step
from kimi_kernels.meta_weights import meta_weights
from kimi_kernels.op_specs import DTYPE_CLASSES, OPS
from kimi_kernels.places import Locator, placed_tensors
from kimi_kernels.state import Batch, State
from kimi_kernels.weights import ModelWeights

Tensor = torch.Tensor
PAGE_SIZE = 64
ROW_DIMS, POOL_DIMS = ("R", "B"), ("SLOTS", "PAGES")


@dataclass(frozen=True)
class OpCall:
    """One op call of a step: where it sits, its dims, and its bytes by kind."""

    op: str
    layer: int | None
    part: str  # one of places.PARTS
    dims: dict[str, int]
    weight_bytes: int
    state_read_bytes: int
    state_written_bytes: int
    input_bytes: int  # activations and indices
    output_bytes: int

    @property
    def state_bytes(self) -> int:
        return self.state_read_bytes + self.state_written_bytes

    @property
    def activation_bytes(self) -> int:
        return self.input_bytes + self.output_bytes

    @property
    def read_bytes(self) -> int:
        return self.weight_bytes + self.state_read_bytes + self.input_bytes

    @property
    def written_bytes(self) -> int:
        return self.state_written_bytes + self.output_bytes

    @property
    def memory_bytes(self) -> int:
        """What cannot come out of a cache: weights and state."""
        return self.weight_bytes + self.state_bytes


def record_step(
    config: KimiConfig,
    tp: int = 1,
    rows: int = 1,
    context: int = 1,
    tokens_per_sequence: int = 1,
    layers: Sequence[int] | None = None,
) -> list[OpCall]:
    """The op calls of one step of one rank of `tp`. `config` is the whole model's; `rows` counts all sequences."""
    sequences, rest = divmod(rows, tokens_per_sequence)
    if rows < 1 or rest:
        raise ValueError(f"record_step: rows must be a positive multiple of {tokens_per_sequence}, got {rows}")
    if not tokens_per_sequence <= context <= config.max_positions:
        raise ValueError(
            f"record_step: context must be in [{tokens_per_sequence}, {config.max_positions}], got {context}"
        )
    local, weights = config.shard(tp), meta_weights(config, tp, layers=layers)
    pages = -(-context // PAGE_SIZE)
    state = State.zeros(
        local, sequences, sequences * pages, PAGE_SIZE, "meta", [layer.index for layer in weights.layers]
    )
    batch = Batch(
        slots=meta_tensor(torch.int32, sequences),
        is_new=meta_tensor(torch.bool, sequences),
        seq_lens=meta_tensor(torch.int32, sequences),
        page_table=meta_tensor(torch.int32, sequences, pages),
    )
    calls: list[OpCall] = []
    locator = Locator(weights)
    functions = {op: partial(_record, op, calls, locator, context) for op in OPS}
    decode_step(
        SimpleNamespace(**functions, **single_rank()), local, weights, state, batch, meta_tensor(torch.int64, rows)
    )
    return calls


def resident_bytes(weights: ModelWeights) -> int:
    """Memory of all weights of a rank."""
    return sum(tensor.nbytes for _, tensor in placed_tensors(weights))


def sequence_bytes(config: KimiConfig, context: int) -> int:
    """Memory of the pools of one sequence of `context` tokens, whole pages; `config` is this rank's."""
    state = State.zeros(config, 1, -(-context // PAGE_SIZE), PAGE_SIZE, "meta")
    return sum(pool.nbytes for layer in state.layers for pool in vars(layer).values())


def total_bytes(calls: Iterable[OpCall]) -> int:
    """Weights and state of all `calls`."""
    return sum(call.memory_bytes for call in calls)


def floor_us(nbytes: float, tb_per_s: float) -> float:
    """Time to move `nbytes` at a bandwidth, in microseconds."""
    return nbytes / tb_per_s / 1e6


def meta_tensor(dtype: torch.dtype, *dims: int) -> Tensor:
    return torch.empty(dims, dtype=dtype, device="meta")


def _record(op: str, calls: list[OpCall], locator: Locator, context: int, *args):
    """Appends the call and returns outputs of the right shapes."""
    spec = OPS[op]
    named = dict(zip(spec.args, args, strict=True))
    dims = validate(op, **named)
    sizes = {"weight": 0, "state": 0, "state_written": 0, "input": 0}
    for name, want in spec.args.items():
        if not isinstance(want, str):
            continue
        nbytes = _argument_bytes(named[name], spec.pools.get(name), dims, context)
        kind = argument_kind(want)
        sizes[kind] += nbytes
        if name in spec.inplace:
            sizes["state_written"] += nbytes
    outputs = meta_outputs(op, named, dims)
    place = locator.locate(args)
    calls.append(
        OpCall(
            op=op,
            layer=place.layer,
            part=place.part,
            dims=dims,
            weight_bytes=sizes["weight"],
            state_read_bytes=sizes["state"],
            state_written_bytes=sizes["state_written"],
            input_bytes=sizes["input"],
            output_bytes=sum(output.nbytes for output in outputs),
        )
    )
    return outputs if len(outputs) > 1 else outputs[0] if outputs else None


def argument_kind(want: str) -> str:
    """ "input" (rows of this step), "state" or "weight", from a tensor spec of the op table."""
    leading = want.lstrip("*").split()[0]
    return "input" if leading in ROW_DIMS else "state" if leading in POOL_DIMS else "weight"


def _argument_bytes(value: Tensor | list[Tensor], touched: str | None, dims: dict[str, int], context: int) -> int:
    """Bytes of a tensor, of all tensors of a list, or of the touched rows of a pool."""
    if touched is None:
        return sum(tensor.nbytes for tensor in (value if isinstance(value, list | tuple) else [value]))
    assert isinstance(value, Tensor)
    names: dict[str, float] = {**dims, "S": context}
    if "E" in dims:
        names["ACTIVE"] = expected_experts(dims["E"], dims["A"], dims["R"])
    return round(eval(touched, {"__builtins__": {}}, names) * value[0].nbytes)


def expected_experts(num_experts: int, top_k: int, rows: int) -> float:
    """Distinct experts that `rows` tokens pick on average when each picks `top_k` at random."""
    return num_experts * (1 - (1 - top_k / num_experts) ** rows)


def meta_outputs(op: str, named: dict, dims: dict[str, int]) -> tuple[Tensor, ...]:
    """The results of one call without data, as the op table describes them; `dims` are those of its arguments."""
    wants = OPS[op].args
    act = next((named[n].dtype for n in named if str(wants[n]).endswith(" act") and torch.is_tensor(named[n])), None)
    return tuple(_meta_output(want, dims, act) for want in OPS[op].outputs.values())


def _meta_output(want: str, dims: dict[str, int], act: torch.dtype | None) -> Tensor:
    *shape, dtype_class = want.split()
    dtype = act if dtype_class == "act" else DTYPE_CLASSES[dtype_class][0]
    assert dtype is not None
    return meta_tensor(dtype, *(resolve(dim, dims) for dim in shape))
