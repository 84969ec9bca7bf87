"""kda_gate_softplus: cases against the reference, and the known faults of decay gates."""

from dataclasses import dataclass

import pytest
import torch
from cases import act_dtypes, fills, make, seeds, strided
from hypothesis import given
from hypothesis import strategies as st

from kimi_kernels.compare import assert_same_bits, check_op
from triton_ops.kda_gate_softplus import kda_gate_softplus

FP32, BF16 = torch.float32, torch.bfloat16


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
    heads=st.sampled_from((1, 3, 6, 32)),
    channels=st.sampled_from((16, 48, 128)),
    A_scale=st.sampled_from((1.0, 0.0, 10.0)),
    fill=fills,
    seed=seeds,
    dtype=act_dtypes,
)


@given(cases)
def test_equals_the_reference(device, case):
    check_op("kda_gate_softplus", kda_gate_softplus, *case.args(device))


def test_no_rows_give_empty_results(device):
    """Fault I19."""
    raw_decay, raw_beta, A_log, dt_bias = Case().args(device)
    log_decay, beta = kda_gate_softplus(raw_decay[:0], raw_beta[:0], A_log, dt_bias)
    assert log_decay.shape == (0, 3, 16) and beta.shape == (0, 3)


def test_softplus_is_linear_far_out_and_zero_below(device):
    raw = torch.tensor([[[0.0, 20.0, 30.0, 3e38, -3e38]]], device=device)
    log_decay, _ = kda_gate_softplus(
        raw, raw[..., 0].contiguous(), torch.zeros(1, device=device), torch.zeros_like(raw[0])
    )
    want = torch.tensor([-0.6931471806, -20.0, -30.0, -3e38, 0.0], device=device)
    torch.testing.assert_close(log_decay.flatten(), want, rtol=2e-7, atol=0)


def test_overflow_of_exp_A_log_stays_finite_and_in_its_head(device):
    """Fault N03: exp(100) is infinite in float32; times softplus(-200) = 0 the decay is 1. Head 1 keeps its bits."""
    raw = make(1, 2, 16, dtype=FP32, device=device)
    raw[0, 0] = -200
    dt_bias = torch.zeros(2, 16, device=device)
    A_log = torch.tensor([0.0, 0.5], device=device)
    (plain, _), (huge, _) = (
        kda_gate_softplus(raw, raw[..., 0].contiguous(), A, dt_bias)
        for A in (A_log, torch.tensor([100.0, 0.5], device=device))
    )
    assert huge[0, 0].exp().eq(1).all()
    assert_same_bits(huge[0, 1], plain[0, 1])


def test_beta_is_not_rounded_to_the_activation_dtype(device):
    """Fault N09: sigmoid(0.5) is 0.622459, in bfloat16 0.62109375."""
    raw = torch.full((1, 1, 16), 0.5, dtype=BF16, device=device)
    _, beta = kda_gate_softplus(
        raw, raw[..., 0].contiguous(), torch.zeros(1, device=device), torch.zeros(1, 16, device=device)
    )
    assert abs(beta.item() - 0.6224593312) < 1e-7


def test_rows_are_independent(device):
    """Fault I20; views equal contiguous copies (fault I11)."""
    raw_decay, raw_beta, *rest = Case(rows=9).args(device)
    together = kda_gate_softplus(raw_decay.contiguous(), raw_beta.contiguous(), *rest)
    for r in range(9):
        alone = kda_gate_softplus(raw_decay[r : r + 1], raw_beta[r : r + 1], *rest)
        for a, b in zip(alone, together, strict=True):
            assert_same_bits(a[0], b[r])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", (1, 8, 32, 256))
@pytest.mark.parametrize("tp", (1, 2, 4))
def test_kimi_linear_shapes(device, tp, rows):
    check_op("kda_gate_softplus", kda_gate_softplus, *Case(rows=rows, heads=32 // tp, channels=128).args(device))
