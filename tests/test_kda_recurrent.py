"""kda_recurrent: cases against the reference, its properties, and the known faults of recurrent decode."""

from dataclasses import dataclass

import pytest
import torch
from cases import act_dtypes, far_pool, fills, make, seeds, slots_with_gaps
from hypothesis import example, given
from hypothesis import strategies as st

from kimi_kernels.compare import assert_same_bits, check_op
from triton_ops.kda_recurrent import KdaRecurrentConfig, _launch, kda_recurrent

FP32, BF16 = torch.float32, torch.bfloat16
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    batch: int = 2
    steps: int = 1
    heads: int = 2
    key_dim: int = 16
    value_dim: int = 8
    padded: int = 0  # trailing sequences without a valid slot
    null: int = -1
    new: bool = False
    fill: str = "normal"
    seed: int = 0
    dtype: torch.dtype = FP32

    def args(self, device: str) -> tuple:
        """q, k, v are slices of one NaN tensor; unused and new slots and padded rows hold NaN."""
        rows, pool, first_valid = self.batch * self.steps, self.batch + 2, self.null + 1
        padded = min(self.padded, self.batch)
        widths = [self.heads * n for n in (self.key_dim, self.key_dim, self.value_dim)]
        qkv = torch.full((rows, sum(widths) + 5), NAN, dtype=self.dtype, device=device)
        live = rows - padded * self.steps
        qkv[:live, : sum(widths)] = make(
            live, sum(widths), fill=self.fill, seed=self.seed, dtype=self.dtype, device=device
        )
        q, k, v = (x.unflatten(-1, (self.heads, -1)) for x in qkv.split([*widths, 5], dim=-1)[:3])
        like = dict(dtype=FP32, device=device)
        log_decay = -5 * torch.sigmoid(2 * make(rows, self.heads, self.key_dim, seed=self.seed + 1, **like))
        beta = torch.sigmoid(make(rows, self.heads, seed=self.seed + 2, **like))
        state = make(
            pool, self.heads, self.value_dim, self.key_dim, fill=self.fill, seed=self.seed + 3, scale=0.1, **like
        )
        slots = slots_with_gaps(self.batch, pool - first_valid, self.seed, padded, null=-1) + first_valid
        is_new = torch.zeros(self.batch, dtype=torch.bool)
        is_new[::2] = self.new
        kept = {slot for b, slot in enumerate(slots[: self.batch - padded].tolist()) if not is_new[b]}
        state[[slot for slot in range(pool) if slot not in kept]] = NAN
        return q, k, v, log_decay, beta, state, slots.to(device), is_new.to(device), first_valid


cases = st.builds(
    Case,
    batch=st.sampled_from((1, 2, 3)),
    steps=st.sampled_from((1, 2, 3)),
    heads=st.sampled_from((1, 3)),
    key_dim=st.sampled_from((16, 32, 48)),  # 48: padded to 64 lanes, the rest is NaN (fault I01)
    value_dim=st.sampled_from((8, 12, 16)),
    padded=st.integers(0, 2),
    null=st.sampled_from((-1, 0)),
    new=st.booleans(),
    fill=fills,
    seed=seeds,
    dtype=act_dtypes,
)


@given(cases)
@example(Case(batch=1, heads=1, key_dim=128, value_dim=16))
@example(Case(batch=2, padded=2))
def test_equals_the_reference(device, case):
    check_op("kda_recurrent", kda_recurrent, *case.args(device))


def one_head(device: str, state, q, k, v, log_decay=0.0, beta=1.0) -> tuple:
    """Arguments for one row of one head; `state` [V, K] is copied into slot 0 of a pool of one."""
    like = dict(dtype=FP32, device=device)
    state = torch.as_tensor(state, **like)[None, None].clone()
    q, k, v = (torch.as_tensor(x, **like).reshape(1, 1, -1) for x in (q, k, v))
    where = torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.bool, device=device), 0
    log_decay = torch.full_like(q, log_decay)
    return q, k, v, log_decay, torch.full((1, 1), beta, **like), state, *where


def test_no_rows_give_an_empty_result_and_leave_the_pool(device):
    """Fault I19."""
    q, k, v, log_decay, beta, state, slots, is_new, first_valid = Case().args(device)
    before = state.clone()
    o = kda_recurrent(q[:0], k[:0], v[:0], log_decay[:0], beta[:0], state, slots[:0], is_new[:0], first_valid)
    assert o.shape == (0, *v.shape[1:]) and o.dtype == FP32
    assert_same_bits(state, before)


def test_decay_comes_first_and_predicts_from_the_decayed_state(device):
    """Fault N13: other orders give 0.5 or 0.75 in place of 1."""
    args = one_head(device, [[2.0]], [1.0], [1.0], [1.0], log_decay=-0.6931471806, beta=0.5)
    assert abs(kda_recurrent(*args).item() - 1) < 2e-6 and abs(args[5].item() - 1) < 2e-6


@pytest.mark.parametrize("a, want", [(0, 0), (1e-5, 0.00993661), (1e-4, 0.0662266), (1e-3, 0.0880451)])
def test_l2_norm_adds_eps_to_the_sum_of_squares(device, a, want):
    """Fault N07: with a zero state, beta = 1 and v = 1 the state becomes the normed key."""
    args = one_head(device, torch.zeros(4, 128), [a] * 128, [a] * 128, [1.0] * 4)
    o = kda_recurrent(*args)
    torch.testing.assert_close(args[5], torch.full_like(args[5], want), rtol=2e-6, atol=0)
    torch.testing.assert_close(o, torch.full_like(o, 128 * want * want * 128**-0.5), rtol=2e-5, atol=0)


def test_beta_and_state_keep_float32(device):
    """Faults N09 and N11: one step writes 0.622459 / sqrt(1 + 1e-6), with low mantissa bits."""
    beta = 0.6224593312
    args = one_head(device, torch.zeros(1, 16), [1.0] + [0.0] * 15, [1.0] + [0.0] * 15, [1.0], beta=beta)
    kda_recurrent(*args)
    written = args[5][0, 0, 0, 0]
    assert abs(written.item() - beta / (1 + 1e-6) ** 0.5) < 1e-7
    assert written.to(BF16).float() != written


def test_state_rows_are_value_channels(device):
    """Fault I13: a single 1 at key 3, value 7 is read by q = e3 into channel 7 and stays where it is."""
    state = torch.zeros(128, 128)
    state[7, 3] = 1
    args = one_head(device, state, [0.0] * 3 + [1.0] + [0.0] * 124, [0.0] * 128, [1.0] * 128, log_decay=-0.0)
    o = kda_recurrent(*args).flatten()
    assert abs(o[7].item() - 0.0883883476 / (1 + 1e-6) ** 0.5) < 1e-8
    assert o.count_nonzero() == 1
    assert_same_bits(args[5][0, 0].cpu(), state)


def test_strong_decay_over_many_steps_stays_finite(device):
    """Fault N06: the summed log-decay passes -88, values are 1e4; 16 steps at once equal 16 single steps."""
    q, k, v, log_decay, beta, state, slots, is_new, first_valid = Case(batch=1, steps=16, heads=1).args(device)
    log_decay = torch.full_like(log_decay, -6.0)
    check_op("kda_recurrent", kda_recurrent, q, k, 1e4 * v, log_decay, beta, state, slots, is_new, first_valid)


def test_steps_at_once_equal_single_steps(device):
    """Fault S11: decode and a verify step of several rows leave the same bits."""
    *rows, state, slots, is_new, first_valid = Case(batch=2, steps=3, new=True).args(device)
    rows = [x.contiguous() for x in rows]
    at_once, one_by_one = state.clone(), state.clone()
    o = kda_recurrent(*rows, at_once, slots, is_new, first_valid).unflatten(0, (2, 3))
    for t in range(3):
        step = [x.unflatten(0, (2, 3))[:, t] for x in rows]
        new = is_new if t == 0 else torch.zeros_like(is_new)
        assert_same_bits(o[:, t], kda_recurrent(*step, one_by_one, slots, new, first_valid))
    assert_same_bits(at_once, one_by_one)


def test_beta_zero_only_decays(device):
    q, k, v, log_decay, beta, state, *where = Case().args(device)
    before = state.clone()
    kda_recurrent(q, k, v, torch.zeros_like(log_decay), torch.zeros_like(beta), state, *where)
    assert_same_bits(state, before)


def test_heads_permute(device):
    *rows, state, slots, is_new, first_valid = Case(heads=3).args(device)
    rows = [x.contiguous() for x in rows]
    order = torch.tensor([2, 0, 1], device=device)
    turned = state[:, order].clone()
    o = kda_recurrent(*rows, state, slots, is_new, first_valid)
    o_turned = kda_recurrent(*(x[:, order] for x in rows), turned, slots, is_new, first_valid)
    assert_same_bits(o[:, order], o_turned)
    assert_same_bits(state[:, order], turned)


def test_rows_are_independent(device):
    """Fault I20; 5 heads are no divisor of anything (fault I15).

    Rows of one alignment: unaligned views (fault I11) load in another layout, which adds q^2 in another order.
    """
    *rows, state, slots, is_new, first_valid = Case(batch=5, heads=5, value_dim=4).args(device)
    rows = [x.contiguous() for x in rows]
    pool = state.clone()
    o = kda_recurrent(*rows, pool, slots, is_new, first_valid)
    for b in range(5):
        one = slice(b, b + 1)
        alone = kda_recurrent(*(x[one] for x in rows), state, slots[one], is_new[one], first_valid)
        assert_same_bits(alone[0], o[b])
    assert_same_bits(state, pool)


@pytest.mark.parametrize("block_v", (1, 4, 16))
def test_block_size_does_not_change_a_bit(device, block_v):
    *rows, state, slots, is_new, first_valid = Case(batch=1, key_dim=128, value_dim=12).args(device)
    pool = state.clone()
    o = kda_recurrent(*rows, state, slots, is_new, first_valid)
    assert_same_bits(o, _launch(KdaRecurrentConfig(block_v, 1), *rows, pool, slots, is_new, first_valid))
    assert_same_bits(state, pool)


@pytest.mark.parametrize("null", (-1, 0))
def test_padded_rows_are_zero_and_touch_no_slot(device, null):
    """Faults I06, I07, G01, S10: NaN rows on a null slot; other slots and the memory before them keep their bits."""
    *rows, state, slots, is_new, _ = Case(batch=3).args(device)
    memory = make(8, *state.shape[1:], seed=5, dtype=FP32, device=device)
    pool, before = memory[1:], memory.clone()
    slots = torch.tensor([5, null, null], dtype=torch.int32, device=device)
    for x in rows:
        x[1:] = NAN
    o = kda_recurrent(*rows, pool, slots, is_new, null + 1)
    assert o[1:].eq(0).all() and o[0].isfinite().all()
    assert_same_bits(memory[[0, 1, 2, 3, 4, 5, 7]], before[[0, 1, 2, 3, 4, 5, 7]])


def test_a_new_sequence_ignores_what_its_slot_holds(device):
    """Fault S01: the same bits as on a zero state."""
    *rows, state, slots, is_new, first_valid = Case(steps=2).args(device)
    is_new[:] = True
    clean, dirty = torch.zeros_like(state), torch.full_like(state, NAN)
    assert_same_bits(*(kda_recurrent(*rows, pool, slots, is_new, first_valid) for pool in (clean, dirty)))
    assert_same_bits(clean[slots.long()], dirty[slots.long()])


def test_strided_slots_and_any_slot_pitch(device):
    """Faults I09 and I10: slots as a column of a block table, a pool that is a slice of a wider one."""
    *rows, state, slots, is_new, first_valid = Case(batch=3).args(device)
    table = torch.full((3, 8), 2**30, dtype=torch.int32, device=device)
    table[:, 1] = slots
    wide = torch.full((state.shape[0], 3, *state.shape[1:]), NAN, device=device)
    wide[:, 1] = state
    assert_same_bits(
        kda_recurrent(*rows, state, slots, is_new, first_valid),
        kda_recurrent(*rows, wide[:, 1], table[:, 1], is_new, first_valid),
    )
    assert_same_bits(state, wide[:, 1])
    assert wide[:, [0, 2]].isnan().all()


def test_results_are_fresh_tensors(device):
    """Fault S06."""
    *rows, state, slots, is_new, first_valid = Case().args(device)
    first = kda_recurrent(*rows, state, slots, is_new, first_valid)
    kept = first.clone()
    kda_recurrent(*rows, state, slots, is_new, first_valid)
    assert_same_bits(first, kept)


def test_slot_times_pitch_overflows_32_bits(device):
    """Fault I02: the pitch fits 32 bits, slot 2 times the pitch does not."""
    *rows, state, slots, is_new, first_valid = Case(batch=1).args(device)
    near = make(3, *state.shape[1:], seed=9, dtype=FP32, device=device)
    far, slots = far_pool(near), torch.full_like(slots, 2)
    assert_same_bits(*(kda_recurrent(*rows, pool, slots, is_new, first_valid) for pool in (near, far)))
    assert_same_bits(near, far)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", (1, 8, 32))
@pytest.mark.parametrize("tp", (8, 16, 32))
def test_k3_shapes(device, tp, rows):
    case = Case(batch=rows, heads=96 // tp, key_dim=128, value_dim=128, padded=rows // 8)
    check_op("kda_recurrent", kda_recurrent, *case.args(device))


@pytest.mark.gpu
def test_graph_replay_follows_slots_and_inputs(device):
    """Faults G01 and G02: captured with slots 0 ... 3, replayed with others, one of them padding."""
    *rows, state, slots, is_new, first_valid = Case(batch=4, heads=12, key_dim=128, value_dim=128).args(device)
    state = make(12, *state.shape[1:], seed=7, dtype=FP32, device=device)
    slots.copy_(torch.arange(4))
    kda_recurrent(*rows, state.clone(), slots, is_new, first_valid)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = kda_recurrent(*rows, state, slots, is_new, first_valid)
    for turn in ([9, 7, -1, 2], [3, -1, 11, 0]):
        slots.copy_(torch.tensor(turn))
        rows[2].neg_()
        o.fill_(NAN)
        pool = state.clone()
        want = kda_recurrent(*rows, pool, slots, is_new, first_valid)
        graph.replay()
        assert_same_bits(o, want)
        assert_same_bits(state, pool)
