"""residual_add: one rounded addition."""

from dataclasses import dataclass

import pytest
import torch
from cases import act_dtypes, fills, make, rows, seeds, strided
from hypothesis import example, given
from hypothesis import strategies as st

from kimi_kernels.compare import assert_same_bits, check_op
from triton_ops.residual_add import residual_add

BF16 = torch.bfloat16
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    rows: int = 2
    width: int = 40
    fill: str = "normal"
    seed: int = 0
    dtype: torch.dtype = BF16

    def args(self, device: str) -> tuple:
        kind = dict(fill=self.fill, dtype=self.dtype, device=device)
        x, delta = (make(self.rows, self.width, seed=self.seed + i, **kind) for i in range(2))
        return strided(x), strided(delta, before=16, after=3)


cases = st.builds(
    Case,
    rows=rows,
    width=st.sampled_from((8, 40, 160, 1100, 1)),
    fill=fills,
    seed=seeds,
    dtype=act_dtypes,
)


@given(cases)
@example(Case(rows=1, width=7168))
def test_equals_the_reference(device, case):
    check_op("residual_add", residual_add, *case.args(device))


@given(cases)
def test_order_does_not_matter_and_zero_changes_nothing(device, case):
    x, delta = case.args(device)
    assert_same_bits(residual_add(x, delta), residual_add(delta, x))
    # adding +0 turns -0 into +0, else it is the identity
    assert_same_bits(residual_add(x, torch.zeros_like(x)), x + 0.0)


def test_rows_are_independent(device):
    """Fault I20, with a NaN row among them; views equal copies (fault I11)."""
    x, delta = Case(rows=9, width=100).args(device)
    x[4] = NAN
    y = residual_add(x, delta)
    for r in range(9):
        assert_same_bits(residual_add(x[r : r + 1].contiguous(), delta[r : r + 1].contiguous())[0], y[r])
    assert y[[3, 5]].isfinite().all()


def test_no_rows_give_an_empty_result(device):
    """Fault I19."""
    x, delta = Case().args(device)
    y = residual_add(x[:0], delta[:0])
    assert y.shape == (0, 40) and y.dtype == BF16


def test_inputs_keep_their_bits_and_results_are_fresh(device):
    """Faults S06, S07: the prefix of the bank is never written."""
    x, delta = Case().args(device)
    before = x.clone(), delta.clone()
    first = residual_add(x, delta)
    kept = first.clone()
    residual_add(x, x)
    for tensor, bits in ((first, kept), (x, before[0]), (delta, before[1])):
        assert_same_bits(tensor, bits)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", (1, 8, 32))
@pytest.mark.parametrize("width", (7168, 2304))
def test_model_shapes(device, width, rows):
    check_op("residual_add", residual_add, *Case(rows=rows, width=width).args(device))
