"""router_logits: the linear kernel with a float32 output."""

from dataclasses import dataclass

import pytest
import torch
from cases import act_dtypes, fills, make, seeds, strided
from hypothesis import example, given
from hypothesis import strategies as st

from kimi_kernels.compare import assert_same_bits, check_op
from triton_ops.linear import linear
from triton_ops.router_logits import router_logits

FP32, BF16 = torch.float32, torch.bfloat16
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    rows: int = 2
    experts: int = 24
    width: int = 40
    fill: str = "normal"
    seed: int = 0
    dtype: torch.dtype = BF16

    def args(self, device: str) -> tuple:
        kind = dict(fill=self.fill, dtype=self.dtype, device=device)
        x = make(self.rows, self.width, seed=self.seed, **kind)
        return strided(x), strided(make(self.experts, self.width, seed=self.seed + 1, **kind))


cases = st.builds(
    Case,
    rows=st.sampled_from((1, 2, 3, 7, 8, 17, 33)),
    experts=st.sampled_from((1, 12, 24, 256)),
    width=st.sampled_from((1, 40, 144, 300)),
    fill=fills,
    seed=seeds,
    dtype=act_dtypes,
)


@given(cases)
@example(Case(rows=1, experts=24, width=160))
def test_equals_the_reference(device, case):
    """The bound of a float32 output has no term for bfloat16: logits rounded on the way leave it."""
    check_op("router_logits", router_logits, *case.args(device))


def test_logits_are_not_rounded(device):
    """1 + 2^-16 has no bfloat16: the router would tie experts that differ."""
    weight = torch.tensor([[1.0, 2.0**-8], [1.0, 0.0]], dtype=BF16, device=device)
    logits = router_logits(torch.tensor([[1.0, 2.0**-8]], dtype=BF16, device=device), weight)
    assert logits.dtype == FP32 and logits.tolist() == [[1 + 2.0**-16, 1.0]]


@given(cases)
def test_is_linear_before_rounding(device, case):
    x, weight = case.args(device)
    logits = router_logits(x.float(), weight.float())
    assert_same_bits(logits, linear(x.float(), weight.float()))


def test_rows_are_independent(device):
    """Fault I20, with a NaN row among them."""
    x, weight = Case(rows=9).args(device)
    logits = router_logits(x, weight)
    x[4] = NAN
    other = router_logits(x, weight)
    keep = [0, 1, 2, 3, 5, 6, 7, 8]
    assert_same_bits(other[keep], logits[keep])


def test_no_rows_give_an_empty_result(device):
    """Fault I19."""
    x, weight = Case().args(device)
    logits = router_logits(x[:0], weight)
    assert logits.shape == (0, 24) and logits.dtype == FP32


def test_results_are_fresh_tensors(device):
    """Fault S06."""
    x, weight = Case().args(device)
    first = router_logits(x, weight)
    kept = first.clone()
    router_logits(-x, weight)
    assert_same_bits(first, kept)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", (1, 8, 32))
@pytest.mark.parametrize("experts, width", ((896, 7168), (112, 7168), (256, 2304)))
def test_model_shapes(device, experts, width, rows):
    check_op("router_logits", router_logits, *Case(rows, experts, width).args(device))
