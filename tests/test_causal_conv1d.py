"""causal_conv1d: cases against the reference, its properties, and the known faults of window updates."""

from dataclasses import dataclass

import pytest
import torch
from cases import act_dtypes, far_pool, fills, make, seeds, slots_with_gaps, strided
from hypothesis import example, given
from hypothesis import strategies as st

from kimi_kernels.compare import assert_same_bits, check_op
from triton_ops.causal_conv1d import causal_conv1d

FP32, BF16 = torch.float32, torch.bfloat16
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    batch: int = 2
    steps: int = 1
    channels: int = 40
    taps: int = 4
    padded: int = 0  # trailing sequences without a valid slot
    null: int = -1
    new: bool = False
    fill: str = "normal"
    seed: int = 0
    dtype: torch.dtype = BF16

    def args(self, device: str) -> tuple:
        """Arguments of the op: x is a slice of a NaN tensor, unused and new slots and padded rows hold NaN."""
        rows, pool, first_valid = self.batch * self.steps, self.batch + 3, self.null + 1
        padded = min(self.padded, self.batch)
        x = strided(make(rows, self.channels, fill=self.fill, seed=self.seed, dtype=self.dtype, device=device))
        x[rows - padded * self.steps :] = NAN
        weight = make(self.channels, self.taps, seed=self.seed + 1, dtype=FP32, device=device)
        window = make(
            pool, self.taps - 1, self.channels, fill=self.fill, seed=self.seed + 2, dtype=self.dtype, device=device
        )
        slots = slots_with_gaps(self.batch, pool - first_valid, self.seed, padded, null=-1) + first_valid
        is_new = torch.zeros(self.batch, dtype=torch.bool)
        is_new[::2] = self.new
        live = slots[: self.batch - padded].tolist()
        kept = {slot for b, slot in enumerate(live) if not is_new[b]}
        window[[slot for slot in range(pool) if slot not in kept]] = NAN
        return x, weight, window, slots.to(device), is_new.to(device), first_valid


cases = st.builds(
    Case,
    batch=st.sampled_from((1, 2, 3, 7)),
    steps=st.sampled_from((1, 2, 5)),
    channels=st.sampled_from((8, 40, 136)),
    taps=st.sampled_from((4, 2, 3)),
    padded=st.integers(0, 2),
    null=st.sampled_from((-1, 0)),
    new=st.booleans(),
    fill=fills,
    seed=seeds,
    dtype=act_dtypes,
)


@given(cases)
@example(Case(batch=1, channels=384))
@example(Case(batch=2, padded=2))
def test_equals_the_reference(device, case):
    check_op("causal_conv1d", causal_conv1d, *case.args(device))


def test_no_rows_give_an_empty_result_and_leave_the_pool(device):
    """Fault I19."""
    x, weight, window, slots, is_new, first_valid = Case().args(device)
    before = window.clone()
    z = causal_conv1d(x[:0], weight, window, slots[:0], is_new[:0], first_valid)
    assert z.shape == (0, x.shape[1]) and z.dtype == FP32
    assert_same_bits(window, before)


def four_taps(device: str, window: list[float], x: float, dtype: torch.dtype = FP32) -> tuple:
    weight = torch.tensor([[1.0, 10.0, 100.0, 1000.0]], device=device)
    pool = torch.tensor(window, dtype=dtype, device=device).reshape(1, 3, 1)
    slots, is_new = torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.bool, device=device)
    return torch.tensor([[x]], dtype=dtype, device=device), weight, pool, slots, is_new, 0


def test_oldest_input_is_first_and_meets_the_first_tap(device):
    """Fault S03: a reversed window gives 1234."""
    args = four_taps(device, [1, 2, 3], 4)
    assert causal_conv1d(*args).tolist() == [[4321.0]]  # SiLU is the identity there
    assert args[2].flatten().tolist() == [2, 3, 4]


@pytest.mark.parametrize("dtype", (BF16, FP32))
def test_window_keeps_the_raw_input(device, dtype):
    """Fault S05: SiLU(-3) = -0.142 must not reach the window."""
    args = four_taps(device, [0.5, 0.25, 0.125], -3, dtype)
    causal_conv1d(*args)
    assert args[2].flatten().tolist() == [0.25, 0.125, -3]


def test_padded_rows_touch_no_slot(device):
    """Fault I06: slots [3, -1, 5]; the last slot and the memory before the pool keep their bits."""
    memory = make(10, 3, 16, seed=1, device=device)
    window, before = memory[1:], memory.clone()
    x, weight = make(3, 16, seed=2, device=device), make(16, 4, seed=3, dtype=FP32, device=device)
    x[1] = NAN
    slots = torch.tensor([3, -1, 5], dtype=torch.int32, device=device)
    z = causal_conv1d(x, weight, window, slots, torch.zeros(3, dtype=torch.bool, device=device), 0)
    assert z[1].eq(0).all() and z[[0, 2]].isfinite().all()
    untouched = [i for i in range(10) if i - 1 not in (3, 5)]
    assert_same_bits(memory[untouched], before[untouched])
    assert_same_bits(window[[3, 5], 2], x[[0, 2]])


def test_reserved_slot_zero_is_never_written(device):
    """Fault I07: slots [7, 0, 0] where slot 0 is the null block."""
    window = make(8, 3, 16, seed=1, device=device)
    before = window.clone()
    x, weight = make(3, 16, seed=2, device=device), make(16, 4, seed=3, dtype=FP32, device=device)
    slots = torch.tensor([7, 0, 0], dtype=torch.int32, device=device)
    z = causal_conv1d(x, weight, window, slots, torch.zeros(3, dtype=torch.bool, device=device), 1)
    assert z[1:].eq(0).all()
    assert_same_bits(window[:7], before[:7])


def test_a_new_sequence_ignores_what_its_slot_holds(device):
    """Fault S01: the same bits as on a zero window."""
    x, weight, window, slots, is_new, first_valid = Case(batch=3, steps=2).args(device)
    is_new[:] = True
    clean, dirty = torch.zeros_like(window), torch.full_like(window, NAN)
    z = [causal_conv1d(x, weight, pool, slots, is_new, first_valid) for pool in (clean, dirty)]
    assert_same_bits(*z)
    assert_same_bits(clean[slots.long()], dirty[slots.long()])


def test_strided_slots_are_followed(device):
    """Fault I09: slots as the first column of a block table."""
    x, weight, window, slots, is_new, first_valid = Case(batch=3).args(device)
    table = torch.full((3, 8), 2**30, dtype=torch.int32, device=device)
    table[:, 0] = slots
    pools = window.clone(), window.clone()
    z = [
        causal_conv1d(x, weight, pool, s, is_new, first_valid)
        for pool, s in zip(pools, (slots, table[:, 0]), strict=True)
    ]
    assert_same_bits(*z)
    assert_same_bits(*pools)


def test_steps_at_once_equal_single_steps(device):
    x, weight, window, slots, is_new, first_valid = Case(batch=2, steps=5, new=True).args(device)
    at_once, one_by_one = window.clone(), window.clone()
    z = causal_conv1d(x, weight, at_once, slots, is_new, first_valid).unflatten(0, (2, 5))
    for t, step in enumerate(x.unflatten(0, (2, 5)).unbind(1)):
        new = is_new if t == 0 else torch.zeros_like(is_new)
        assert_same_bits(z[:, t], causal_conv1d(step, weight, one_by_one, slots, new, first_valid))
    assert_same_bits(at_once, one_by_one)


def test_rows_are_independent(device):
    """Fault I20: a row among others has the bits it has alone; views equal contiguous copies (fault I11)."""
    x, weight, window, slots, is_new, first_valid = Case(batch=9, channels=24).args(device)
    pool = window.clone()
    z = causal_conv1d(x.contiguous(), weight, pool, slots, is_new, first_valid)
    for b in range(9):
        alone = causal_conv1d(x[b : b + 1], weight, window, slots[b : b + 1], is_new[b : b + 1], first_valid)
        assert_same_bits(alone[0], z[b])
    assert_same_bits(window, pool)


def test_results_are_fresh_tensors(device):
    """Fault S06."""
    x, weight, window, slots, is_new, first_valid = Case().args(device)
    first = causal_conv1d(x, weight, window, slots, is_new, first_valid)
    kept = first.clone()
    causal_conv1d(-x, weight, window, slots, is_new, first_valid)
    assert_same_bits(first, kept)


def test_slot_times_pitch_overflows_32_bits(device):
    """Fault I02: the pitch fits 32 bits, slot 2 times the pitch does not."""
    x, weight, window, slots, is_new, first_valid = Case(batch=1, channels=32).args(device)
    near = make(3, 3, 32, seed=9, dtype=window.dtype, device=device)
    far, slots = far_pool(near), torch.full_like(slots, 2)
    assert_same_bits(*(causal_conv1d(x, weight, pool, slots, is_new, first_valid) for pool in (near, far)))
    assert_same_bits(near, far)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", (1, 8, 32))
@pytest.mark.parametrize("tp", (8, 16, 32))
def test_k3_shapes(device, tp, rows):
    check_op(
        "causal_conv1d", causal_conv1d, *Case(batch=rows, channels=3 * 128 * 96 // tp, padded=rows // 8).args(device)
    )
