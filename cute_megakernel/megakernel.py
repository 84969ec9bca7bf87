"""One instance of the megakernel: weights, workspace, table and the compiled kernel for a batch size.

    kernel = Megakernel(config, Images(weights), state, rows=1)
    output = kernel.step(tokens, batch)            one launch; StepOutput(tokens, logits), valid until the next step
    kernel.check()                                 raises MegakernelError where a launch gave up waiting
    y, = kernel.run_op(12, inputs, tokens, batch)  one op call of the step by itself

An instance is for one stream at a time: a launch that meets another one of the same instance ends with an error and
leaves it alone. `step` allocates, compiles and synchronises nothing and may be captured in a CUDA graph.
"""

from dataclasses import replace

import torch

from cute_megakernel.alone import alone, inputs_of
from cute_megakernel.build import on_device, prove
from cute_megakernel.encode import Encoder
from cute_megakernel.images import Images
from cute_megakernel.instance_checks import check_limits, check_schedule, check_state, check_step
from cute_megakernel.launch import OVERLAP, TAGS_A_LAUNCH
from cute_megakernel.recording import Pool, record_local_step
from cute_megakernel.schedule import Schedule, make_schedule
from kimi_kernels.backends import BackendError
from kimi_kernels.config import KimiConfig
from kimi_kernels.decode_step import StepOutput
from kimi_kernels.state import Batch, State

Tensor = torch.Tensor
MAX_ROWS = 8
DEFAULT_IN_FLIGHT = 4  # full slots on their way to an SM at most
POLL_NS = 0  # between two looks at activations that are not there yet
NAN_WORD = (-1 << 32) | 0x7FC07FC0  # a payload that is NaN as float32 and as two bfloat16, under a tag no launch has


class MegakernelError(BackendError):
    """A launch that could not finish; says which row of the table waited in vain, and where."""


class Megakernel:
    """`config`, `images` and `state` are one rank's; `rows` sequences of one token each, 1 to 8.

    `taps` hands on every op's output (`tap`), `trace` records times, `limit_s` bounds the launch: no wait goes on
    beyond it. With `delay` every warp sleeps at random before every row, in the launches that follow by the attribute
    `delay_seed`. Raises ScheduleError for a schedule that is not proved.
    """

    def __init__(
        self,
        config: KimiConfig,
        images: Images,
        state: State,
        rows: int = 1,
        sms: int | None = None,
        in_flight: int = 0,
        taps: bool = False,
        delay: bool = False,
        trace: bool = False,
        limit_s: float = 2.0,
        schedule: Schedule | None = None,
    ):
        if not 1 <= rows <= MAX_ROWS:
            raise ValueError(f"Megakernel: rows must be in [1, {MAX_ROWS}], got {rows}")
        if config.dtype != torch.bfloat16:
            raise ValueError(f"Megakernel: dtype must be bfloat16, got {config.dtype}")
        self.config, self.images, self.state, self.rows = config, images, state, rows
        device = images.device
        if device.type != "cuda":
            raise BackendError(f"Megakernel: the weights must be on a GPU, they are on {device}")
        available = torch.cuda.get_device_properties(device).multi_processor_count
        sms = available if sms is None else sms
        if not 1 <= sms <= available:
            raise ValueError(f"Megakernel: {sms} SMs asked for, the device has {available}: they must all run at once")
        check_limits(in_flight, limit_s)
        check_state(config, images.weights, state, device)
        if schedule is None:
            slots, pages = _pool_sizes(state)
            schedule = make_schedule(record_local_step(config, images.weights, rows, slots, pages), config, sms)
        check_schedule(schedule, rows, sms)
        prove(schedule)
        schedule.shape = replace(schedule.shape, delay=delay, trace=trace)
        self.schedule = schedule
        self.logits = torch.zeros(rows, images.weights.lm_head.shape[0], dtype=config.dtype, device=device)
        self.next_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.next_values = torch.zeros(rows, dtype=torch.float32, device=device)
        self.words = torch.zeros(schedule.words, dtype=torch.int64, device=device)
        self.control = torch.zeros(16, dtype=torch.int32, device=device)
        size = sms * len(schedule.rows) * 2 if trace else 2
        self.times = torch.zeros(size, dtype=torch.int64, device=device)
        self._lists: list[Tensor] = []
        self._in_flight = in_flight or DEFAULT_IN_FLIGHT
        self.fields, self.work = self._encode(schedule, taps)
        self._poll_ns = POLL_NS
        self._limit_ns = int(limit_s * 1e9)
        self.delay_seed = 0
        self._launch = on_device(schedule.shape, self.words.device)

    def step(self, tokens: Tensor, batch: Batch) -> StepOutput:
        """Runs one token of each row; `state` is updated in place. Raises ValueError for inputs of a wrong form."""
        check_step(tokens, batch, self.rows, self.words.device)
        self._launch_rows(self.schedule, (self.fields, self.work), tokens, batch, 0, len(self.schedule.rows))
        return StepOutput(self.next_tokens, self.logits)

    def step_in_parts(self, tokens: Tensor, batch: Batch) -> StepOutput:
        """`step` by many launches, one after the other: each starts where no SM needs what it held before.

        For debugging, and as a proof: the bits are those of the one launch.
        """
        check_step(tokens, batch, self.rows, self.words.device)
        starts = self.schedule.part_starts()
        for first, end in zip(starts, [*starts[1:], len(self.schedule.rows)], strict=True):
            self._launch_rows(self.schedule, (self.fields, self.work), tokens, batch, first, end)
        return StepOutput(self.next_tokens, self.logits)

    def run_op(self, index: int, inputs: dict[int, Tensor], tokens: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        """Op call `index` of the recording as a launch of its own, for debugging. -> what rows hand on of its outputs

        `inputs` are the activations that `inputs_of` names, by index, each whole; weights and pools are those of the
        instance, pools change. The query of mla_decode lies as the rows hand it on: heads packed [H, L], without the
        unrotated dims, which are read from the projection's query; the rest of its row means nothing. What `alone`
        puts in front runs too. Waits; raises ValueError for inputs of a wrong form, MegakernelError where the launch
        could not finish.
        """
        check_step(tokens, batch, self.rows, self.words.device)
        calls = self.schedule.recording.calls
        if not 0 <= index < len(calls):
            raise ValueError(f"run_op: call must be in [0, {len(calls)}), got {index}")
        part = alone(self.schedule, index)
        for buffer in inputs_of(part):
            if buffer.index not in inputs:
                raise ValueError(f"run_op: call {index} needs activation {buffer.index} ({buffer.name})")
            self.put(buffer.index, inputs[buffer.index])
        self._launch_rows(part, self._encode(part, taps=True), tokens, batch, 0, len(part.rows))
        self.check(part)
        found = (self.handed_on(buffer.index) for buffer in calls[index].outputs)
        return tuple(tensor for tensor in found if tensor is not None)

    def _encode(self, schedule: Schedule, taps: bool) -> tuple[Tensor, Tensor]:
        encoder = Encoder(schedule, self._address, taps)
        return encoder.table().to(self.images.device), encoder.work(self._in_flight).to(self.images.device)

    def _launch_rows(
        self, schedule: Schedule, table: tuple[Tensor, Tensor], tokens: Tensor, batch: Batch, first: int, end: int
    ) -> None:
        """Rows [first, end) of a table and the schedule that it encodes."""
        tensors = (
            *table, self.words, self.control, tokens, batch.slots, batch.is_new, batch.seq_lens,
            batch.page_table, self.next_tokens, self.next_values, self.times,
        )  # fmt: skip
        numbers = (
            len(schedule.rows),
            first,
            end,
            schedule.lists_before(first),
            batch.page_table.stride(0),
            batch.first_valid_slot,
            self._poll_ns,
            self.delay_seed,
        )
        stream = torch.cuda.current_stream(self.words.device).cuda_stream
        self._launch(tuple(tensor.data_ptr() for tensor in tensors), numbers, self._limit_ns, stream)

    def check(self, schedule: Schedule | None = None) -> None:
        """Waits for the device; raises MegakernelError if a launch gave up, and makes the instance usable again.

        `schedule` is what was launched, unless it was the whole step.
        """
        rows = (schedule or self.schedule).rows
        error = int(self.control[2])
        if error == 0:
            return
        self.reset()
        if error == OVERLAP:
            raise MegakernelError("a launch met another launch of the same instance on a different stream")
        number, block = divmod(error - 1, 1 << 12)
        if number >= len(rows):
            raise MegakernelError(f"a wait inside SM {block} took more than {self._limit_ns / 1e9:g} s")
        row = rows[number]
        raise MegakernelError(
            f"row {number} ({row.name}, calls {row.calls}) on SM {block} waited more than "
            f"{self._limit_ns / 1e9:g} s for {[view.buffer.name for view in row.reads]}"
        )

    def poison(self) -> None:
        """Fills the workspace with NaN that no launch takes for its own; nothing of this instance may be running."""
        self.words.fill_(NAN_WORD)

    def reset(self) -> None:
        """Forgets all launches; nothing of this instance may be running."""
        self.control.zero_()
        self.words.zero_()

    def tap(self, index: int) -> Tensor:
        """What buffer `index` of the recording holds after a step, [rows, width]; needs `taps`."""
        buffer, payload = self.schedule.recording.buffers[index], self._words(index)[:, :, 0].contiguous()
        values = payload if buffer.dtype == torch.int32 else payload.view(buffer.dtype)
        return values[:, : buffer.width]

    def put(self, index: int, values: Tensor) -> None:
        """Hands `values` [rows, width] on as buffer `index` in the next launch."""
        buffers = self.schedule.recording.buffers
        if not 0 <= index < len(buffers):
            raise ValueError(f"put: activation must be in [0, {len(buffers)}), got {index}")
        buffer, words = buffers[index], self._words(index)
        if tuple(values.shape) != (buffer.rows, buffer.width) or values.dtype != buffer.dtype:
            want, got = f"[{buffer.rows}, {buffer.width}] {buffer.dtype}", f"{list(values.shape)} {values.dtype}"
            raise ValueError(f"put: activation {index} ({buffer.name}) must be {want}, got {got}")
        odd = buffer.width * values.element_size() % 4 // 2
        payload = torch.nn.functional.pad(values, (0, odd)).contiguous().view(torch.int32)
        words.zero_()
        words[:, : payload.shape[1], 0] = payload
        words[:, :, 1] = (self.control[0] + 1) * TAGS_A_LAUNCH

    def _words(self, index: int) -> Tensor:
        """[rows, pitch, payload and tag] int32"""
        buffer, place = self.schedule.recording.buffers[index], self.schedule.places[index]
        words = self.words[place.start : place.start + buffer.rows * place.pitch]
        return words.view(torch.int32).view(buffer.rows, place.pitch, 2)

    def handed_on(self, index: int) -> Tensor | None:
        """`tap`, or the tensor that the buffer went to instead; None where no row hands it on."""
        buffer = self.schedule.recording.buffers[index]
        head = self.schedule.recording.calls[-1]
        assert head.op == "argmax"
        outside = {
            head.args["logits"].buffer.index: self.logits,
            head.outputs[0].index: self.next_tokens.unsqueeze(1),
            head.outputs[1].index: self.next_values.unsqueeze(1),
        }
        if index in outside:
            return outside[index]
        return self.tap(index) if any(buffer in row.writes for row in self.schedule.rows) else None

    def _address(self, what: str, subject) -> int:
        """Device addresses for the table."""
        if what in ("int32", "int64"):
            self._lists.append(torch.tensor(subject, dtype=getattr(torch, what), device=self.images.device))
            return self._lists[-1].data_ptr()
        if what == "logits":
            return self.logits.data_ptr()
        if what == "weight":
            return self.images.plain(subject).data_ptr()
        if isinstance(subject, Pool):
            pool = getattr(self.state.layers[subject.layer], subject.field)
            numbers = {
                "pool": pool.data_ptr(),
                "pool stride": pool.stride(0) * pool.element_size(),
                "pool count": pool.shape[0],
                "page size": pool.shape[1],
            }
            return numbers[what]
        if what in ("row bytes", "expert bytes"):
            made = self.images.image(*subject)
            return made.element_size() * made.stride(-2 if what == "row bytes" else 0)
        weight, scale = subject if isinstance(subject, tuple) else (subject, None)
        return self.images.image(what, weight, scale).data_ptr()


def _pool_sizes(state: State) -> tuple[int, int]:
    """Slots, and the page size."""
    slots = next((l.recurrent.shape[0] for l in state.layers if hasattr(l, "recurrent")), 1)
    page = next((l.latent_cache.shape[1] for l in state.layers if hasattr(l, "latent_cache")), 1)
    return slots, page
