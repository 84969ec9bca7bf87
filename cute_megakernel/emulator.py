"""The schedule run on a CPU, with the reference ops for arithmetic, in any order in which the SMs may get on.

    emulator = Emulator(config, weights, state, rows=1, sms=6, seed=3)
    output = emulator.step(tokens, batch)          StepOutput(tokens, logits); `state` is updated in place

Virtual SMs walk the encoded table. Activations are words with a tag, as on the device: a word is NaN until the SM that
owns it stores it, a row runs on an SM once all words that it reads are there, and a second store of a word, a launch in
which no SM can go on, and a row that finds the wrong thing in its shared memory end with an EmulationError. `order`
says which SM goes next: "random", "first" and "last" (one SM as far as it gets), or "fair".
"""

import random
from collections.abc import Iterator

import numpy as np
import torch

from cute_megakernel.emulator_memory import EmulationError, Launch, Sm
from cute_megakernel.emulator_rows import run_row
from cute_megakernel.footprint import Part, Words, reads, split, split_reads
from cute_megakernel.recording import record_local_step
from cute_megakernel.rows import Code
from cute_megakernel.schedule import Schedule, make_schedule
from cute_megakernel.schedule_error import label
from cute_megakernel.table_view import TableView
from kimi_kernels.config import KimiConfig
from kimi_kernels.decode_step import StepOutput
from kimi_kernels.state import Batch, State
from kimi_kernels.weights import ModelWeights

ORDERS = ("random", "first", "last", "fair")
Tensor = torch.Tensor


class Emulator:
    """`config`, `weights` and `state` are one rank's, on the CPU, in bfloat16. `taps`: norms hand on what they make."""

    def __init__(
        self,
        config: KimiConfig,
        weights: ModelWeights,
        state: State,
        rows: int = 1,
        sms: int = 8,
        seed: int = 0,
        order: str = "random",
        schedule: Schedule | None = None,
        taps: bool = False,
    ):
        if config.dtype != torch.bfloat16:
            raise ValueError(f"Emulator: dtype must be bfloat16, got {config.dtype}")
        if order not in ORDERS:
            raise ValueError(f"Emulator: order must be one of {ORDERS}, got {order!r}")
        if not 1 <= rows <= 8 or sms < 1:
            raise ValueError(f"Emulator: rows must be in [1, 8] and sms at least 1, got {rows} and {sms}")
        if schedule is None:
            schedule = make_schedule(record_local_step(config, weights, rows), config, sms)
        self.schedule, self.view, self.order = schedule, TableView(schedule, taps), order
        self.weights, self.state = weights, state
        self._random = random.Random(seed)
        self._waits: dict[tuple[int, int], Words] = {}

    def step(self, tokens: Tensor, batch: Batch) -> StepOutput:
        """One launch. Raises EmulationError where it could not finish on the device either."""
        launch = self.begin(tokens, batch)
        self.walk(launch)
        return launch.output()

    def begin(self, tokens: Tensor, batch: Batch) -> Launch:
        """The memory of a launch before its first row."""
        return Launch(self.schedule, self.view, self.weights, self.state, batch, tokens)

    def walk(self, launch: Launch) -> None:
        """All SMs to the end of the table."""
        parts = tuple(split(self.schedule.shape, int(length))[1] for length in launch.batch.seq_lens)
        running = [Sm(block) for block in range(self.schedule.shape.sms)]
        while running:
            moved = next((sm for sm in self._turns(running) if self._advance(launch, sm, parts)), None)
            if moved is None:
                raise EmulationError(f"no SM can go on: {self._stuck(launch, running, parts)}")
            if moved.row == len(self.schedule.rows):
                running.remove(moved)

    def _turns(self, running: list[Sm]) -> Iterator[Sm]:
        """SMs in the order in which they are asked whether they can go on; the first that can, does."""
        if self.order == "random":
            for last in reversed(range(len(running))):
                chosen = self._random.randrange(last + 1)
                running[last], running[chosen] = running[chosen], running[last]
                yield running[last]
        elif self.order == "fair":
            yield from sorted(running, key=lambda sm: sm.row)
        else:
            yield from running if self.order == "first" else reversed(running)

    def _advance(self, launch: Launch, sm: Sm, parts: tuple[int, ...]) -> bool:
        """Does the row that the SM is at; False where it has to wait."""
        number = sm.row
        first, end = self.schedule.work[sm.block][number]
        if first < end:
            part = Part(sm.block, first, end, parts)
            if self._missing(launch, number, part):
                return False
            run_row(launch, sm, number, part)
        sm.row += 1
        return True

    def _missing(self, launch: Launch, number: int, part: Part) -> int:
        """Words that the row waits for and that are not there."""
        row, f = self.schedule.rows[number], self.view.rows[number]
        late = 0
        if row.code in (Code.MLA_REDUCE, Code.MLA_COMBINE):
            words = split_reads(self.schedule.shape, f, row.code, part)
            late = int(np.count_nonzero(launch.tags[words] != f["sub"]))
        assert part.sm is not None
        key = (number, part.sm)
        if key not in self._waits or row.code in (Code.MLA_DECODE, Code.MLA_COMBINE):
            self._waits[key] = reads(self.schedule.shape, f, row.code, part)
        words = self._waits[key]
        if len(words) and int(words.max()) >= len(launch.tags):
            raise EmulationError(f"{label(number, row)}: reads words behind the end of the workspace")
        return late + int(np.count_nonzero(launch.tags[words] != 0))

    def _stuck(self, launch: Launch, running: list[Sm], parts: tuple[int, ...]) -> str:
        """Where the first SMs wait."""
        texts = []
        for sm in running[:3]:
            part = Part(sm.block, *self.schedule.work[sm.block][sm.row], parts)
            where = label(sm.row, self.schedule.rows[sm.row])
            texts.append(f"SM {sm.block} at {where} waits for {self._missing(launch, sm.row, part)} words")
        return "; ".join(texts)


__all__ = ["ORDERS", "EmulationError", "Emulator"]
