"""rms_norm: cases against the reference and what a norm must keep."""

from dataclasses import dataclass

import pytest
import torch
from cases import act_dtypes, fills, make, rows, seeds, strided
from hypothesis import example, given
from hypothesis import strategies as st

from kimi_kernels.compare import assert_same_bits, check_op
from triton_ops.rms_norm import rms_norm

BF16 = torch.bfloat16
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    rows: int = 2
    width: int = 40
    eps: float = 1e-5
    fill: str = "normal"
    seed: int = 0
    dtype: torch.dtype = BF16

    def args(self, device: str) -> tuple:
        x = make(self.rows, self.width, fill=self.fill, seed=self.seed, dtype=self.dtype, device=device)
        return strided(x), make(self.width, seed=self.seed + 1, dtype=self.dtype, device=device), self.eps


cases = st.builds(
    Case,
    rows=rows,
    width=st.sampled_from((8, 40, 160, 1536, 1)),
    eps=st.sampled_from((1e-5, 1e-6)),
    fill=fills,
    seed=seeds,
    dtype=act_dtypes,
)


@given(cases)
@example(Case(rows=1, width=7168))
@example(Case(rows=3, width=3584, dtype=torch.float32))
def test_equals_the_reference(device, case):
    check_op("rms_norm", rms_norm, *case.args(device))


def test_no_rows_give_an_empty_result(device):
    """Fault I19."""
    x, weight, eps = Case().args(device)
    h = rms_norm(x[:0], weight, eps)
    assert h.shape == (0, 40) and h.dtype == BF16


def test_a_row_of_zeros_stays_zero(device):
    x, weight, eps = Case(fill="zeros").args(device)
    assert rms_norm(x, weight, eps).eq(0).all()


def test_eps_is_added_to_the_mean(device):
    """As fault N07: eps on the sum or outside the root shows where the row is small."""
    x = torch.full((1, 64), 1e-3, dtype=torch.float32, device=device)
    h = rms_norm(x, torch.ones(64, device=device), 1e-6)
    torch.testing.assert_close(h, torch.full_like(h, 0.5**0.5), rtol=1e-6, atol=0)  # a few roundings of float32


@given(exponent=st.integers(-20, 20), seed=seeds, dtype=act_dtypes)
def test_a_power_of_two_in_the_row_changes_no_bit_without_eps(device, exponent, seed, dtype):
    x, weight, _ = Case(seed=seed, dtype=dtype).args(device)
    assert_same_bits(rms_norm(x * 2.0**exponent, weight, 0.0), rms_norm(x, weight, 0.0))


def test_rows_are_independent(device):
    """Fault I20: a row among others, one of them NaN, has the bits it has alone; views equal copies (fault I11)."""
    x, weight, eps = Case(rows=9, width=100).args(device)
    x[4] = NAN
    h = rms_norm(x, weight, eps)
    for r in range(9):
        assert_same_bits(rms_norm(x[r : r + 1].contiguous(), weight, eps)[0], h[r])
    assert h[4].isnan().all() and h[[3, 5]].isfinite().all()


def test_a_strided_weight_is_followed(device):
    x, weight, eps = Case().args(device)
    pairs = torch.stack([weight, torch.full_like(weight, NAN)], dim=1)
    assert_same_bits(rms_norm(x, pairs[:, 0], eps), rms_norm(x, weight, eps))


def test_results_are_fresh_tensors(device):
    """Fault S06."""
    x, weight, eps = Case().args(device)
    first = rms_norm(x, weight, eps)
    kept = first.clone()
    rms_norm(-x, weight, eps)
    assert_same_bits(first, kept)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", (1, 8, 32))
@pytest.mark.parametrize("width", (7168, 3584, 2304, 1536, 512))
def test_model_shapes(device, width, rows):
    check_op("rms_norm", rms_norm, *Case(rows=rows, width=width).args(device))
