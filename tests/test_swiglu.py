"""swiglu: cases against the reference and the ends of the sigmoid."""

from dataclasses import dataclass

import pytest
import torch
from cases import act_dtypes, fills, make, rows, seeds, strided
from hypothesis import example, given
from hypothesis import strategies as st

from kimi_kernels.compare import assert_same_bits, check_op
from triton_ops.swiglu import swiglu

BF16 = torch.bfloat16
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    rows: int = 2
    width: int = 40
    fill: str = "normal"
    scale: float = 1.0
    seed: int = 0
    dtype: torch.dtype = BF16

    def args(self, device: str) -> tuple:
        kind = dict(fill=self.fill, seed=self.seed, dtype=self.dtype, device=device, scale=self.scale)
        gate_up = make(self.rows, 2 * self.width, **kind)
        if self.dtype == BF16:
            gate_up.clamp_(-60)  # keeps m a normal number: the interpreter converts subnormals to bfloat16 wrongly
        return (strided(gate_up),)


cases = st.builds(
    Case,
    rows=rows,
    width=st.sampled_from((8, 48, 96, 1100, 1)),
    fill=fills,
    scale=st.sampled_from((1.0, 10.0)),
    seed=seeds,
    dtype=act_dtypes,
)


@given(cases)
@example(Case(rows=1, width=1024))
def test_equals_the_reference(device, case):
    check_op("swiglu", swiglu, *case.args(device))


def test_the_first_half_is_the_gate(device):
    gate_up = torch.tensor([[50.0, -50.0, 3.0, 7.0]], device=device)
    m = swiglu(gate_up)
    assert m[0, 0] == 150.0 and -1e-19 < m[0, 1] < 0


@pytest.mark.parametrize("gate, want", ((3e38, 3e38), (-3e38, 0.0), (200.0, 200.0), (-200.0, 0.0)))
def test_large_gates_saturate(device, gate, want):
    """Fault N23: exp(3e38) overflows on the way, the result does not."""
    m = swiglu(torch.tensor([[gate, 1.0]], device=device))
    torch.testing.assert_close(m, torch.tensor([[want]], device=device), rtol=0, atol=0)


def test_rows_are_independent(device):
    """Fault I20, with a NaN row among them; views equal copies (fault I11)."""
    (gate_up,) = Case(rows=9, width=50).args(device)
    gate_up[4] = NAN
    m = swiglu(gate_up)
    for r in range(9):
        assert_same_bits(swiglu(gate_up[r : r + 1].contiguous())[0], m[r])
    assert m[[3, 5]].isfinite().all()


def test_no_rows_give_an_empty_result(device):
    """Fault I19."""
    (gate_up,) = Case().args(device)
    m = swiglu(gate_up[:0])
    assert m.shape == (0, 40) and m.dtype == BF16


def test_an_odd_width_is_refused(device):
    with pytest.raises(ValueError, match="swiglu: gate_up"):
        swiglu(make(2, 7, device=device))


def test_results_are_fresh_tensors(device):
    """Fault S06."""
    (gate_up,) = Case().args(device)
    first = swiglu(gate_up)
    kept = first.clone()
    swiglu(-gate_up)
    assert_same_bits(first, kept)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", (1, 8, 256))
@pytest.mark.parametrize("width", (9216, 1024, 128))
def test_kimi_linear_shapes(device, width, rows):
    check_op("swiglu", swiglu, *Case(rows=rows, width=width).args(device))
