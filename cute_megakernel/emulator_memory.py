"""Memory of an emulated launch: words with tags, the shared memory of each SM, weights and state."""

from dataclasses import dataclass, field

import numpy as np
import torch

from cute_megakernel.footprint import Words, grid
from cute_megakernel.recording import Weight, weight_paths
from cute_megakernel.rows import Row
from cute_megakernel.schedule import Schedule
from cute_megakernel.schedule_error import label
from cute_megakernel.table_view import Fields, TableView
from kimi_kernels.backends import make_ops
from kimi_kernels.decode_step import StepOutput
from kimi_kernels.state import Batch, State
from kimi_kernels.weights import ModelWeights

Tensor = torch.Tensor
UNWRITTEN = -1
NAN_PAIR = 0x7FC07FC0  # two bfloat16 NaN, and a float32 NaN
BF16, F32 = torch.bfloat16, torch.float32


class EmulationError(RuntimeError):
    """A launch that would hang or compute something else on the device; names the row."""


@dataclass
class Sm:
    """One virtual SM: the row it is at and what its shared memory holds."""

    block: int
    row: int = 0
    x: dict[int, tuple[tuple, Tensor]] = field(default_factory=dict)  # area -> what it is, and its values
    ids: tuple[int, Tensor, Tensor] | None = None  # number of the router, picks, weights


class Launch:
    """Memory of one launch, and what all SMs share."""

    def __init__(
        self, schedule: Schedule, view: TableView, weights: ModelWeights, state: State, batch: Batch, tokens: Tensor
    ):
        self.schedule, self.view, self.state, self.batch, self.tokens = schedule, view, state, batch, tokens
        self.shape, self.ops = schedule.shape, make_ops("reference")
        self.weights = dict(weight_paths(weights))
        self.payload = torch.full((schedule.words,), NAN_PAIR, dtype=torch.int32)
        self.tags = np.full(schedule.words, UNWRITTEN, dtype=np.int16)
        self.parts: dict[tuple[int, int, int], tuple[int, Tensor, Tensor, Tensor]] = {}
        self.done: dict[tuple, Tensor | tuple] = {}  # results that several SMs come to
        vocabulary = weights.lm_head.shape[0]
        self.logits = torch.full((self.shape.rows, vocabulary), float("nan"), dtype=BF16)
        self._chosen = torch.zeros(self.logits.shape, dtype=torch.bool)
        self.next_tokens: Tensor | None = None

    def output(self) -> StepOutput:
        if self.next_tokens is None or not self._chosen.all():
            raise EmulationError("the launch ended without tokens or some of the logits")
        return StepOutput(self.next_tokens, self.logits)

    def store_logits(self, where: str, rows: range, first: int, logits: Tensor) -> None:
        """Columns from `first` on; they are output of the launch and no activation."""
        cells = slice(rows.start, rows.stop), slice(first, first + logits.shape[1])
        if self._chosen[cells].any():
            raise EmulationError(f"{where}: stores logits a second time")
        self._chosen[cells] = True
        self.logits[cells] = logits

    def weight(self, weight: Weight) -> Tensor:
        """The weight, or the part of kv_b that is meant."""
        tensor = self.weights[weight.path]
        if tensor.ndim == 3 and tuple(weight.shape) != tuple(tensor.shape):
            first = weight.start // tensor.shape[2]
            tensor = tensor[:, first : first + weight.shape[1]]
        return tensor

    def pool(self, f: Fields, name: str = "pool") -> Tensor:
        pool = f.subject(name)
        return getattr(self.state.layers[pool.layer], pool.field)

    def load(self, words: Words, dtype: torch.dtype = BF16) -> Tensor:
        """Payloads of the words in order: two bfloat16 each, or one wider number."""
        return self.payload[torch.from_numpy(words)].view(dtype)

    def rows(self, start: int, rows: range, pitch: int, width: int, dtype: torch.dtype = BF16) -> Tensor:
        """[rows, width] of an activation; unwritten words are NaN."""
        count = width // 2 if dtype == BF16 else width
        return self.load(grid(start, rows, pitch, range(count)), dtype).reshape(len(rows), width)

    def store(self, where: str, words: Words, values: Tensor, tag: int = 0) -> None:
        """Hands values on; a word is stored once, but for the parts of mla_decode, whose tag goes up."""
        if len(words) and int(words.max()) >= len(self.tags):
            raise EmulationError(f"{where}: stores words behind the end of the workspace")
        if (self.tags[words] >= tag).any():
            raise EmulationError(f"{where}: stores words a second time")
        self.payload[torch.from_numpy(words)] = values.contiguous().view(torch.int32).flatten()
        self.tags[words] = tag

    def once(self, key: tuple, compute):
        """A result that every SM comes to by itself, computed once."""
        if key not in self.done:
            self.done[key] = compute()
        return self.done[key]


def take_x(launch: Launch, sm: Sm, number: int, row: Row) -> Tensor:
    """x, if it is what the row works on."""
    key, x = sm.x.get(row.x_side, (None, None))
    if x is None or key != (row.x, row.rows):
        raise EmulationError(f"{label(number, row)}: SM {sm.block} holds another x")
    return x
