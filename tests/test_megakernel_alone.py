"""Every op call of the step as a launch of its own: the rows it takes, and that it makes what it makes in the step."""

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from megakernel_cases import (
    CUDA,
    FAMILIES,
    Model,
    batch_of,
    copy_state,
    kernel_of,
    mini,
    pools,
    tokens_of,
)
from schedule_cases import fewest_sms

from cute_megakernel.alone import alone, carriers, inputs_of
from cute_megakernel.emulator import Emulator
from cute_megakernel.emulator_memory import Launch
from cute_megakernel.recording import Buffer, Call, Pool, record_local_step
from cute_megakernel.rows import Code
from cute_megakernel.schedule import Schedule, make_schedule
from cute_megakernel.validate_calls import CallChecker
from kimi_kernels.backends import make_ops
from kimi_kernels.checkpoint import load_weights
from kimi_kernels.compare import assert_same_bits, check_op
from kimi_kernels.compare_fused import Walk
from kimi_kernels.compare_step import StepReport
from kimi_kernels.mini import make_mini
from kimi_kernels.state import Batch, State

FRONT = {  # op -> codes of the rows in front that are more than a load; an op that is not here has none
    "attn_res_norm": {Code.BANK_SCORES},
    "moe_gate_up": {Code.MOE_ROUTER},
    "moe_gate_up_mxfp4": {Code.MOE_ROUTER},
    "situ": {Code.MOE_ROUTER},
    "swiglu": {Code.MOE_ROUTER},
    "moe_down": {Code.MOE_ROUTER},
    "moe_down_mxfp4": {Code.MOE_ROUTER},
    "residual_add": {Code.MOE_ROUTER},
    "mla_decode": {Code.MLA_DECODE, Code.MLA_REDUCE},
    "mla_expand_value": {Code.MLA_DECODE, Code.MLA_REDUCE, Code.MLA_COMBINE},
    "output_gate": {Code.MLA_DECODE, Code.MLA_REDUCE, Code.MLA_COMBINE},
    "argmax": {Code.LINEAR},
}


@functools.cache
def on_cpu(family: str):
    with tempfile.TemporaryDirectory() as root:
        config = make_mini(Path(root) / family, family, seed=2)
        return config, load_weights(Path(root) / family, config, progress=False)


def schedule_of(family: str, rows: int) -> Schedule:
    config, weights = on_cpu(family)
    return make_schedule(record_local_step(config, weights, rows), config, max(7, fewest_sms(config, rows)))


@pytest.mark.parametrize("rows", (1, 3, 8))
@pytest.mark.parametrize("family", FAMILIES)
def test_the_rows_of_a_call_are_its_own_and_what_they_need(family, rows):
    """All rows that do it, for all batch rows and heads; in front loads, and no more than its op needs."""
    schedule = schedule_of(family, rows)
    checker = CallChecker(schedule.recording)
    carried = [set(getattr(checker, row.code.name.lower())(row).calls) for row in schedule.rows]
    for call in schedule.recording.calls:
        own = carriers(schedule, call.index)
        assert own == [number for number, calls in enumerate(carried) if call.index in calls]
        part = alone(schedule, call.index)
        mine, loads = [], []
        for row in part.rows:
            known = [number for number, other in enumerate(schedule.rows) if other.args is row.args]
            (mine if known else loads).extend(known or [row])
        assert set(own) <= set(mine) and mine == sorted(set(mine))
        assert {schedule.rows[number].code for number in set(mine) - set(own)} <= FRONT.get(call.op, set()), call
        assert all(row.code == Code.MIX and not row.calls and not row.writes for row in loads)
        assert max(mine) == max(own), "nothing runs behind it"


def pages_of(config, rows: int, pages: int = 6) -> tuple[State, Batch]:
    state = State.zeros(config, rows + 1, pages * rows, 16)
    generator = torch.Generator().manual_seed(1)
    for pool in pools(state):
        pool.copy_(0.2 * torch.randn(pool.shape, generator=generator))
    lengths = torch.tensor([1, 17, 64, 65, 16, 96, 0, 33][-rows:]).int()
    slots = torch.where(lengths > 0, torch.arange(rows).flip(0), -1).int()
    is_new = torch.tensor([row % 3 == 1 for row in range(rows)])
    return state, Batch(slots, is_new, lengths, torch.arange(pages * rows).int().reshape(rows, pages))


def copied(state: State) -> State:
    return State(tuple(type(l)(**{name: pool.clone() for name, pool in vars(l).items()}) for l in state.layers))


def place_of(schedule: Schedule, buffer: Buffer) -> slice:
    place = schedule.places[buffer.index]
    return slice(place.start, place.start + buffer.rows * place.pitch)


def changed_pools(call: Call) -> list[Pool]:
    """All that the op has at hand, but for the cache that mla_decode only reads."""
    return [value for value in call.args.values() if isinstance(value, Pool) and call.op != "mla_decode"]


def give(launch: Launch, part: Schedule, step: Launch) -> np.ndarray:
    """The inputs of `part` from the words of a whole step; -> which words those are."""
    for buffer in inputs_of(part):
        words = place_of(part, buffer)
        launch.payload[words] = step.payload[words]
        launch.tags[words] = step.tags[words]
    return launch.tags == 0


@pytest.mark.parametrize("rows", (1, 3, 8))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_alone_writes_what_it_writes_in_the_emulated_step(family, rows):
    """Words, pools, logits and tokens, bit for bit, from nothing but the inputs that are named."""
    (config, weights), schedule = on_cpu(family), schedule_of(family, rows)
    before, batch = pages_of(config, rows)
    tokens = torch.randint(config.vocab_size, (rows,), generator=torch.Generator().manual_seed(rows))
    whole = Emulator(config, weights, copied(before), rows, schedule=schedule, taps=True)
    step = whole.begin(tokens, batch)
    whole.walk(step)
    for call in schedule.recording.calls:
        part = alone(schedule, call.index)
        emulator = Emulator(config, weights, copied(before), rows, schedule=part, taps=True)
        launch = emulator.begin(tokens, batch)
        given = give(launch, part, step)
        emulator.walk(launch)
        written = (launch.tags == 0) & ~given
        assert_same_bits(launch.payload[torch.from_numpy(written)], step.payload[torch.from_numpy(written)], call.op)
        for buffer in call.outputs:
            words = place_of(schedule, buffer)
            assert (written[words] == (step.tags[words] == 0)).all(), f"words of {buffer.name}"
        for pool in changed_pools(call):
            now, then = (getattr(state.layers[pool.layer], pool.field) for state in (emulator.state, whole.state))
            assert_same_bits(now, then, f"{call.op}: {pool.field}")
        if call.op == "argmax":
            assert_same_bits(launch.logits, step.logits, "logits")
            assert launch.next_tokens.tolist() == step.next_tokens.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_alone_over_many_parts_of_a_sequence(family):
    """More parts than mla_combine takes by itself: they are summed up in front of it."""
    (config, weights), schedule = on_cpu(family), schedule_of(family, 1)
    before, batch = pages_of(config, 1, pages=140)
    batch.seq_lens.fill_(2100)
    step_of = Emulator(config, weights, copied(before), 1, schedule=schedule, taps=True)
    step = step_of.begin(torch.tensor([1]), batch)
    step_of.walk(step)
    for call in schedule.recording.calls:
        if call.op in ("mla_decode", "mla_expand_value"):
            part = alone(schedule, call.index)
            emulator = Emulator(config, weights, copied(before), 1, schedule=part, taps=True)
            launch = emulator.begin(torch.tensor([1]), batch)
            given = give(launch, part, step)
            emulator.walk(launch)
            written = torch.from_numpy((launch.tags == 0) & ~given)
            assert written.any()
            assert_same_bits(launch.payload[written], step.payload[written], call.op)


class OneByOne:
    """Stands in for a kernel: one fused launch gives every op its inputs, then each op is a launch of its own.

    What those hand on, bit for bit what the fused launch did, is all that a Walk gets to see.
    """

    def __init__(self, kernel):
        self.kernel, self.schedule, self.state = kernel, kernel.schedule, kernel.state
        self.made: dict[int, torch.Tensor] = {}

    def poison(self):
        self.kernel.poison()
        self.kernel.logits.fill_(float("nan"))

    def check(self):
        self.kernel.check()

    def handed_on(self, index: int):
        return self.made.get(index)

    def outputs(self, buffers) -> dict[int, torch.Tensor]:
        found = {buffer.index: self.kernel.handed_on(buffer.index) for buffer in buffers}
        return {index: tensor.clone() for index, tensor in found.items() if tensor is not None}

    def step(self, tokens, batch):
        before = [pool.clone() for pool in pools(self.state)]
        output = self.kernel.step(tokens, batch)
        self.kernel.check()
        fused, after = self.outputs(self.schedule.recording.buffers), copied(self.state)
        for call in self.schedule.recording.calls:
            copy_state(self.state, before)
            self.poison()
            self.kernel.run_op(call.index, fused, tokens, batch)
            made = self.outputs(call.outputs)
            for index, tensor in made.items():
                assert_same_bits(tensor, fused[index], f"{call.place}: {call.op}")
            for pool in changed_pools(call):
                now, then = (getattr(state.layers[pool.layer], pool.field) for state in (self.state, after))
                assert_same_bits(now, then, f"{call.place}: {call.op}: {pool.field}")
            self.made |= made
        copy_state(self.state, pools(after))
        return output


def case(model: Model, rows: int):
    slots, lengths = [(7 * row + 3) % 12 for row in range(rows)], [96, 17, 1, 64, 65, 16, 33, 2][:rows]
    return tokens_of(model, rows), batch_of(slots, lengths, new=tuple(range(1, rows, 3)))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", (1, 3, 8))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_op_alone_is_within_its_bound_and_has_the_bits_of_the_fused_launch_mini(family, rows):
    """Against float64 on the same inputs; the Triton op on them is judged beside it."""
    model, report = mini(family), StepReport()
    kernel = OneByOne(kernel_of(model, rows, taps=True))
    walk = Walk(model.config, model.weights, kernel, report, {"triton": make_ops("triton", CUDA)})
    walk.step(*case(model, rows))
    assert report.passed and len(report.ops) >= 18
    judged = {op for op, entry in report.ops.items() if entry.right_ratio > 0}
    assert {"linear", "kda_recurrent", "gated_rms_norm", "mla_decode", "mla_expand_value", "moe_router"} <= judged


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_an_op_alone_follows_its_inputs_mini(family):
    """Values that no step has made; and what is missing or of a wrong form is named."""
    model = mini(family)
    kernel = kernel_of(model, 3)
    tokens, batch = case(model, 3)
    call = next(c for c in kernel.schedule.recording.calls if c.op == "linear" and "in_proj" in c.args["weight"].path)
    (source,) = inputs_of(alone(kernel.schedule, call.index))
    weight = kernel.images.tensors[call.args["weight"].path]
    for seed in range(2):
        generator = torch.Generator(CUDA).manual_seed(seed)
        x = torch.randn(3, source.width, generator=generator, device=CUDA).bfloat16()
        check_op("linear", lambda x, _: kernel.run_op(call.index, {source.index: x}, tokens, batch)[0], x, weight)
    with pytest.raises(ValueError, match=rf"run_op: call {call.index} needs activation {source.index} \("):
        kernel.run_op(call.index, {}, tokens, batch)
    with pytest.raises(ValueError, match=rf"put: activation {source.index} \(.+\) must be \[3, {source.width}\]"):
        kernel.run_op(call.index, {source.index: x[:2]}, tokens, batch)
