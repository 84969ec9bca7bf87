"""How the fused kernel is launched: graphs, padding, delays, replays; and how it ends where it cannot go on: a withheld
signal, two launches at once, words left over by others. Nothing hangs; whatever ends a launch has a name."""

import time

import pytest
import torch
from megakernel_cases import (
    CUDA,
    FAMILIES,
    SLOTS,
    Captured,
    assert_same_state,
    batch_of,
    copy_state,
    kernel_of,
    mini,
    pools,
    random_state,
    run,
    tokens_of,
)

from cute_megakernel.megakernel import MegakernelError
from cute_megakernel.rows import Code
from kimi_kernels.compare import assert_same_bits
from kimi_kernels.decoder import Decoder

pytestmark = pytest.mark.gpu
REPLAYS = 300
ROWS = 4
LIMIT_S = 0.3  # other processes may have the device meanwhile


def first_case(model):
    return tokens_of(model, ROWS), batch_of([3, 0, 7, 5], [33, 1, 64, 17], new=(1,))


@pytest.mark.parametrize("family", FAMILIES)
def test_replays_follow_changed_slots_lengths_pages_and_tokens_mini(family):
    """Fault G02: replays with other inputs equal launches of another instance, state included."""
    model = mini(family)
    captured, eager = Captured(kernel_of(model, ROWS)), kernel_of(model, ROWS)
    cases = (
        ([0, 1, 2, 3], [5, 1, 9, 20], ()),
        ([9, 7, 11, 2], [33, 96, 2, 10], (2,)),
        ([7, 9, 2, 11], [95, 34, 11, 3], (0, 3)),
        ([-1, 9, -1, 4], [0, 35, 0, 64], ()),
    )
    for turn, case in enumerate(cases):
        tokens, batch = tokens_of(model, ROWS, turn), batch_of(*case)
        assert_same_bits(captured.replay(tokens, batch), run(eager, tokens, batch), f"logits of turn {turn}")
    assert_same_state(captured.kernel.state, eager.state)


@pytest.mark.parametrize("first_valid_slot", (0, 1))
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_rows_touch_nothing_mini(family, first_valid_slot):
    """Fault G01: five of eight rows live. Fault C14: a row, then a whole batch, without anything to do."""
    model = mini(family)
    kernel, before = kernel_of(model, 8), random_state(model)
    live, pad = [3, 5, 11, 2, 8], first_valid_slot - 1
    tokens = tokens_of(model, 8)
    padded = batch_of([pad] * 8, [0] * 8, first_valid_slot=first_valid_slot)
    assert bool(torch.isfinite(run(kernel, tokens, padded)).all())
    assert_same_state(kernel.state, before, "pool after padding only")
    batch = batch_of([*live, *[pad] * 3], [4, 17, 2, 40, 9, 0, 0, 0], first_valid_slot=first_valid_slot)
    assert bool(torch.isfinite(run(kernel, tokens, batch)).all())
    for pool, was in zip(pools(kernel.state), pools(before), strict=True):
        rest = [slot for slot in range(SLOTS) if slot not in live]
        assert_same_bits(pool.reshape(SLOTS, -1)[rest], was.reshape(SLOTS, -1)[rest], "other slots")


@pytest.mark.parametrize("seed", (1, 2, 3))
@pytest.mark.parametrize("family", FAMILIES)
def test_delayed_warps_change_no_bit_mini(family, seed):
    """Fault C08: data never overtakes its tag, whoever is late. Fault C01: no head reads a convolution window that
    another has shifted."""
    model = mini(family)
    quiet, slow = kernel_of(model, ROWS), kernel_of(model, ROWS, delay=True)
    slow.delay_seed = seed
    for step in range(3):
        tokens, batch = tokens_of(model, ROWS, step), batch_of([3, 0, 7, 5], [33 + step, 1 + step, 64, 17])
        assert_same_bits(run(slow, tokens, batch), run(quiet, tokens, batch), f"logits of step {step}")
    assert_same_state(slow.state, quiet.state)


@pytest.mark.parametrize("family", FAMILIES)
def test_replays_are_bitwise_equal_mini(family):
    """Fault C07: hundreds of launches back to back, each on the words of the one before. Fault C05: across the places
    where launch number and tag change their sign and begin again."""
    model = mini(family)
    kernel = kernel_of(model, ROWS)
    captured, start = Captured(kernel), [pool.clone() for pool in pools(kernel.state)]
    tokens, batch = first_case(model)
    want, after = captured.replay(tokens, batch), [pool.clone() for pool in pools(kernel.state)]
    for launches in (None, 2**26 - 50, 2**27 - 50):
        if launches is not None:
            kernel.reset()
            kernel.control[0] = launches
        for _ in range(REPLAYS // 3):
            copy_state(kernel.state, start)
            captured.output.logits.fill_(float("nan"))
            captured.graph.replay()
        kernel.check()
        assert_same_bits(captured.output.logits, want, f"logits from launch {launches}")
        for pool, was in zip(pools(kernel.state), after, strict=True):
            assert_same_bits(pool, was, "pool")


def test_launching_never_waits_or_allocates_mini():
    """Fault P09: under sync-debug mode, with the allocator's counters unchanged; the launch itself, not its replay."""
    model = mini("k3")
    kernel = kernel_of(model, ROWS)
    tokens, batch = first_case(model)
    run(kernel, tokens, batch)
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(50):
            kernel.step(tokens, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    kernel.check()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_one_launch_mini(family):
    """Nothing else runs on the device: no second kernel, no copy, no fill."""
    model = mini(family)
    kernel = kernel_of(model, ROWS)
    tokens, batch = first_case(model)
    run(kernel, tokens, batch)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(5):
            kernel.step(tokens, batch)
        torch.cuda.synchronize()
    kernel.check()
    on_device = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(on_device) == 5 and all("decode_step" in name for name in on_device), on_device


def drop_units(kernel, wanted) -> tuple[int, int]:
    """Takes the part of one SM in the middle row that `wanted` picks out of the work table; -> row and SM."""
    rows = [n for n, row in enumerate(kernel.schedule.rows) if wanted(row)]
    number = rows[len(rows) // 2]
    shares = kernel.work[:, number].tolist()
    sm = next(sm for sm, (first, end, *_) in enumerate(shares) if first < end)
    kernel.work[sm, number, 1] = shares[sm][0]
    return number, sm


@pytest.mark.parametrize("what", ("o_proj", "in_proj", "router"))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_withheld_signal_ends_with_a_name_mini(family, what):
    """Fault C05 too: the launch after the broken one is right again, in the same workspace."""
    model = mini(family)
    kernel = kernel_of(model, ROWS, limit_s=LIMIT_S)
    start = [pool.clone() for pool in pools(kernel.state)]
    tokens, batch = first_case(model)
    want, whole = run(kernel, tokens, batch), kernel.work.clone()
    number, _ = drop_units(kernel, lambda row: row.code == Code.LINEAR and row.name.split()[-1] == what)
    began = time.monotonic()
    with pytest.raises(MegakernelError, match=rf"row \d+ \(.+\) on SM \d+ waited more than {LIMIT_S:g} s") as caught:
        run(kernel, tokens, batch)
    assert time.monotonic() - began < LIMIT_S + 2
    named = int(str(caught.value).split()[1])
    assert number <= named <= number + 12, f"row {number} was cut, {caught.value}"
    kernel.work.copy_(whole)
    copy_state(kernel.state, start)
    assert_same_bits(run(kernel, tokens, batch), want, "logits after an error")


def half_the_device() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count // 2 - 1


def test_two_launches_of_one_instance_end_with_an_error_mini():
    """On two streams, each small enough to run beside the other; then the instance works again."""
    model = mini("k3")
    kernel = kernel_of(model, ROWS, sms=half_the_device(), delay=True, limit_s=LIMIT_S)
    start = [pool.clone() for pool in pools(kernel.state)]
    tokens, batch = first_case(model)
    want, streams, errors = run(kernel, tokens, batch), [torch.cuda.Stream() for _ in range(2)], []
    for _ in range(10):
        torch.cuda.synchronize()
        for stream in streams:
            with torch.cuda.stream(stream):
                kernel.step(tokens, batch)
        try:
            torch.cuda.synchronize()
            kernel.check()
        except MegakernelError as error:
            errors.append(str(error))
    assert errors, "ten pairs of launches never met"
    copy_state(kernel.state, start)
    assert_same_bits(run(kernel, tokens, batch), want, "logits after the errors")


def test_two_instances_beside_each_other_mini():
    """Fault C11: nothing is shared but the images."""
    model, sms = mini("kimi-linear"), half_the_device()
    alone = kernel_of(model, ROWS, sms=sms, delay=True)
    tokens, batch = first_case(model)
    pair, streams = [kernel_of(model, ROWS, sms=sms, delay=True) for _ in range(2)], [torch.cuda.Stream(), None]
    torch.cuda.synchronize()
    for _ in range(10):
        for kernel, stream in zip(pair, streams, strict=True):
            with torch.cuda.stream(stream):
                kernel.step(tokens, batch)
    torch.cuda.synchronize()
    for _ in range(10):
        want = run(alone, tokens, batch)
    for kernel in pair:
        kernel.check()
        assert_same_bits(kernel.logits, want, "logits")
        assert_same_state(kernel.state, alone.state)


@pytest.mark.parametrize("family", FAMILIES)
def test_another_number_of_sms_gives_the_same_step_mini(family):
    """Fault C03: the grid is what was asked for. Which SM has a tile changes no bit of it."""
    model = mini(family)
    tokens, batch = first_case(model)
    want = run(kernel_of(model, ROWS), tokens, batch)
    for sms in (78, 114):
        assert_same_bits(run(kernel_of(model, ROWS, sms=sms), tokens, batch), want, f"logits of {sms} SMs")


def test_what_cannot_run_is_refused_mini():
    """Fault C03: before anything is launched."""
    model = mini("k3")
    available = torch.cuda.get_device_properties(0).multi_processor_count
    with pytest.raises(ValueError, match=rf"{available + 1} SMs asked for, the device has {available}"):
        kernel_of(model, 1, sms=available + 1)
    with pytest.raises(ValueError, match="batch must be in"):
        Decoder(model.config, model.weights, "megakernel", 9, 16, CUDA)
    kernel = kernel_of(model, 2)
    with pytest.raises(ValueError, match=r"step: tokens must be \[2\]"):
        kernel.step(tokens_of(model, 3), batch_of([0, 1], [1, 1]))
    with pytest.raises(ValueError, match="step: slots must be"):
        kernel.step(tokens_of(model, 2), batch_of([0, 1, 2], [1, 1, 1]))


@pytest.mark.parametrize("rows", (1, ROWS))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_in_many_launches_has_the_same_bits_mini(family, rows):
    """Each part ends before the next begins, so nothing can be read too early, and hand-overs hide no difference."""
    model = mini(family)
    state = random_state(model)
    whole, parts = kernel_of(model, rows, state), kernel_of(model, rows, random_state(model))
    copy_state(parts.state, state)
    assert len(parts.schedule.part_starts()) > 2 * len(model.weights.layers)
    for step in range(3):
        tokens, batch = (
            tokens_of(model, rows, step),
            batch_of([3, 0, 7, 5][:rows], [31 + step, 1 + step, 64, 17][:rows]),
        )
        expected = run(whole, tokens, batch).clone()
        found = parts.step_in_parts(tokens, batch)
        parts.check()
        assert_same_bits(expected, found.logits, f"logits of step {step}")
        assert_same_bits(whole.next_tokens, found.tokens, f"tokens of step {step}")
    assert_same_state(whole.state, parts.state)
