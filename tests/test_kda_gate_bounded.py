"""kda_gate_bounded: cases against the reference, and the known faults of decay gates."""

from dataclasses import dataclass

import pytest
import torch
from cases import act_dtypes, fills, make, seeds, strided
from hypothesis import given
from hypothesis import strategies as st

from kimi_kernels.compare import assert_same_bits, check_op
from triton_ops.kda_gate_bounded import kda_gate_bounded

FP32, BF16 = torch.float32, torch.bfloat16
LOWER = -5.0


@dataclass(frozen=True)
class Case:
    rows: int = 2
    heads: int = 3
    channels: int = 16
    A_scale: float = 1.0
    fill: str = "normal"
    seed: int = 0
    dtype: torch.dtype = BF16

    def args(self, device: str) -> tuple:
        """raw_decay and raw_beta are slices of NaN tensors, as of one fused projection."""
        like = dict(seed=self.seed, dtype=self.dtype, device=device)
        raw_decay = strided(make(self.rows, self.heads * self.channels, fill=self.fill, **like))
        raw_beta = strided(make(self.rows, self.heads, fill=self.fill, **like), before=3, after=2)
        A_log = make(self.heads, seed=self.seed + 1, dtype=FP32, device=device, scale=self.A_scale)
        dt_bias = make(self.heads, self.channels, seed=self.seed + 2, dtype=FP32, device=device)
        return raw_decay.unflatten(-1, (self.heads, self.channels)), raw_beta, A_log, dt_bias


cases = st.builds(
    Case,
    rows=st.sampled_from((1, 2, 3, 7)),
    heads=st.sampled_from((1, 3, 6, 12)),  # 3 and 6 float32 heads are no multiple of 16 bytes (fault I14)
    channels=st.sampled_from((16, 48, 128)),
    A_scale=st.sampled_from((1.0, 0.0, 40.0)),
    fill=fills,
    seed=seeds,
    dtype=act_dtypes,
)


@given(cases)
def test_equals_the_reference(device, case):
    check_op("kda_gate_bounded", kda_gate_bounded, *case.args(device), LOWER)


def test_no_rows_give_empty_results(device):
    """Fault I19."""
    raw_decay, raw_beta, A_log, dt_bias = Case().args(device)
    log_decay, beta = kda_gate_bounded(raw_decay[:0], raw_beta[:0], A_log, dt_bias, LOWER)
    assert log_decay.shape == (0, 3, 16) and beta.shape == (0, 3)


def test_the_bound_is_a_sigmoid_not_a_clamp(device):
    """Fault N01: softplus clamped at -5 agrees in the last channel only."""
    raw = torch.tensor([[[0.0, -2.0, 3.0, 200.0]]], device=device)
    log_decay, _ = kda_gate_bounded(raw, raw[..., 0].contiguous(), raw[0, :, 0], torch.zeros_like(raw[0]), LOWER)
    want = torch.tensor([0.082085, 0.551003, 0.00854106, 0.00673795], device=device)
    torch.testing.assert_close(log_decay.exp().flatten(), want, rtol=1e-5, atol=0)


def test_overflow_of_exp_A_log_stays_finite_and_in_its_head(device):
    """Fault N03: exp(100) is infinite in float32; times raw + dt_bias = 0 it must not be NaN. Head 1 keeps its bits."""
    raw = make(1, 2, 16, dtype=FP32, device=device)
    raw[0, 0] = 0
    dt_bias = torch.zeros(2, 16, device=device)
    A_log = torch.tensor([0.0, 0.5], device=device)
    (plain, _), (huge, _) = (
        kda_gate_bounded(raw, raw[..., 0].contiguous(), A, dt_bias, LOWER)
        for A in (A_log, torch.tensor([100.0, 0.5], device=device))
    )
    assert huge[0, 0].eq(LOWER / 2).all()
    assert_same_bits(huge[0, 1], plain[0, 1])


def test_beta_is_not_rounded_to_the_activation_dtype(device):
    """Fault N09: sigmoid(0.5) is 0.622459, in bfloat16 0.62109375."""
    raw = torch.full((1, 1, 16), 0.5, dtype=BF16, device=device)
    _, beta = kda_gate_bounded(
        raw, raw[..., 0].contiguous(), torch.zeros(1, device=device), torch.zeros(1, 16, device=device), LOWER
    )
    assert abs(beta.item() - 0.6224593312) < 1e-7


def test_one_A_log_per_head(device):
    """Fault T06: entries past the last head, here NaN, are never read."""
    raw_decay, raw_beta, A_log, dt_bias = Case(heads=6).args(device)
    stored = torch.full((128,), float("nan"), device=device)
    stored[:6] = A_log
    results = [kda_gate_bounded(raw_decay, raw_beta, A, dt_bias, LOWER) for A in (A_log, stored[:6])]
    assert_same_bits(results[0][0], results[1][0])
    assert results[1][0].isfinite().all()


def test_rows_are_independent(device):
    """Fault I20; views equal contiguous copies (fault I11)."""
    raw_decay, raw_beta, *rest = Case(rows=9).args(device)
    together = kda_gate_bounded(raw_decay.contiguous(), raw_beta.contiguous(), *rest, LOWER)
    for r in range(9):
        alone = kda_gate_bounded(raw_decay[r : r + 1], raw_beta[r : r + 1], *rest, LOWER)
        for a, b in zip(alone, together, strict=True):
            assert_same_bits(a[0], b[r])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", (1, 8, 32, 256))
@pytest.mark.parametrize("tp", (8, 16, 32))
def test_k3_shapes(device, tp, rows):
    check_op("kda_gate_bounded", kda_gate_bounded, *Case(rows=rows, heads=96 // tp, channels=128).args(device), LOWER)
