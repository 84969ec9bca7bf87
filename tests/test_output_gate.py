"""output_gate: cases against the reference and the ends of the sigmoid."""

from dataclasses import dataclass

import pytest
import torch
from cases import act_dtypes, fills, make, rows, seeds, strided
from hypothesis import example, given
from hypothesis import strategies as st

from kimi_kernels.compare import assert_same_bits, check_op
from triton_ops.output_gate import output_gate

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
        """The gate is the last slice of a wider projection, as in the step."""
        kind = dict(fill=self.fill, dtype=self.dtype, device=device)
        o, out_gate = (make(self.rows, self.width, seed=self.seed + i, **kind) for i in range(2))
        if self.dtype == BF16:
            out_gate.clamp_(-60, 60)  # keeps y a normal number: the interpreter converts subnormals to bfloat16 wrongly
        return strided(o), strided(out_gate, before=24, after=0)


cases = st.builds(
    Case,
    rows=rows,
    width=st.sampled_from((8, 40, 384, 1100, 1)),
    fill=fills,
    seed=seeds,
    dtype=act_dtypes,
)


@given(cases)
@example(Case(rows=1, width=1536))
def test_equals_the_reference(device, case):
    check_op("output_gate", output_gate, *case.args(device))


def test_saturated_gates_open_and_close(device):
    """sigmoid(+-3e38) is 1 and 0 exactly; nothing becomes NaN on the way."""
    o = make(2, 6, device=device)
    gate = torch.tensor([3e38, 100.0, 40.0, -3e38, -200.0, 0.0], dtype=BF16, device=device).expand(2, 6)
    y = output_gate(o, gate)
    assert_same_bits(y[:, :3], o[:, :3])
    assert y[:, 3:5].eq(0).all()
    assert_same_bits(y[:, 5], o[:, 5] / 2)


def test_rows_are_independent(device):
    """Fault I20, with a NaN row among them; views equal copies (fault I11)."""
    o, gate = Case(rows=9, width=100).args(device)
    gate[4] = NAN
    y = output_gate(o, gate)
    for r in range(9):
        assert_same_bits(output_gate(o[r : r + 1].contiguous(), gate[r : r + 1].contiguous())[0], y[r])
    assert y[[3, 5]].isfinite().all()


def test_no_rows_give_an_empty_result(device):
    """Fault I19."""
    o, gate = Case().args(device)
    y = output_gate(o[:0], gate[:0])
    assert y.shape == (0, 40) and y.dtype == BF16


def test_results_are_fresh_tensors(device):
    """Fault S06."""
    o, gate = Case().args(device)
    first = output_gate(o, gate)
    kept = first.clone()
    output_gate(-o, gate)
    assert_same_bits(first, kept)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", (1, 8, 32))
@pytest.mark.parametrize("tp", (8, 16, 32))
def test_k3_shapes(device, tp, rows):
    check_op("output_gate", output_gate, *Case(rows=rows, width=12288 // tp).args(device))
