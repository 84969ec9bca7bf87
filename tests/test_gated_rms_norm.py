"""gated_rms_norm: cases against the reference and its properties."""

from dataclasses import dataclass

import pytest
import torch
from cases import act_dtypes, fills, make, seeds, strided
from hypothesis import given
from hypothesis import strategies as st

from kimi_kernels.compare import assert_same_bits, check_op
from triton_ops.gated_rms_norm import gated_rms_norm

FP32, BF16 = torch.float32, torch.bfloat16
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    rows: int = 2
    heads: int = 3
    channels: int = 16
    fill: str = "normal"
    seed: int = 0
    o_dtype: torch.dtype = FP32
    dtype: torch.dtype = BF16

    def args(self, device: str) -> tuple:
        """o is a slice along its channels, out_gate a slice of a fused projection; both of NaN tensors."""
        o = strided(
            make(
                self.rows, self.heads, self.channels, fill=self.fill, seed=self.seed, dtype=self.o_dtype, device=device
            )
        )
        gate = make(
            self.rows, self.heads * self.channels, fill=self.fill, seed=self.seed + 1, dtype=self.dtype, device=device
        )
        if device == "cpu":
            gate.clamp_(-60, 60)  # keeps y a normal number: the interpreter converts subnormals to bfloat16 wrongly
        weight = make(self.channels, seed=self.seed + 2, dtype=FP32, device=device)
        return o, strided(gate).unflatten(-1, (self.heads, self.channels)), weight, EPS


cases = st.builds(
    Case,
    rows=st.sampled_from((1, 2, 3, 7)),
    heads=st.sampled_from((1, 3, 6, 12)),
    channels=st.sampled_from((16, 48, 128)),
    fill=fills,
    seed=seeds,
    o_dtype=act_dtypes,
    dtype=act_dtypes,
)


@given(cases)
def test_equals_the_reference(device, case):
    check_op("gated_rms_norm", gated_rms_norm, *case.args(device))


def test_no_rows_give_an_empty_result(device):
    """Fault I19."""
    o, gate, weight, eps = Case().args(device)
    y = gated_rms_norm(o[:0], gate[:0], weight, eps)
    assert y.shape == (0, 3, 16) and y.dtype == BF16


def test_a_zero_row_stays_zero(device):
    """What padded rows carry through the layer: exactly 0, so that the projection after it adds nothing."""
    o, gate, weight, eps = Case(fill="zeros").args(device)
    assert gated_rms_norm(o, gate, weight, eps).eq(0).all()


def test_each_head_is_normed_by_itself(device):
    o, gate, weight, eps = Case(heads=4, o_dtype=FP32).args(device)
    o = o.contiguous()
    scaled = o * torch.tensor([1.0, 1024.0, 2.0**-6, 4.0], device=device)[:, None]
    y, y_scaled = (gated_rms_norm(x, gate, weight, 0.0) for x in (o, scaled))
    assert_same_bits(y, y_scaled)  # powers of two cancel exactly without eps


def test_rows_are_independent(device):
    """Fault I20. Rows of one alignment: unaligned views load in another layout, which adds o^2 in another order."""
    o, gate, weight, eps = Case(rows=9).args(device)
    o, gate = o.contiguous(), gate.contiguous()
    together = gated_rms_norm(o, gate, weight, eps)
    for r in range(9):
        assert_same_bits(gated_rms_norm(o[r : r + 1], gate[r : r + 1], weight, eps)[0], together[r])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", (1, 8, 32, 256))
@pytest.mark.parametrize("tp", (8, 16, 32))
def test_k3_shapes(device, tp, rows):
    check_op("gated_rms_norm", gated_rms_norm, *Case(rows=rows, heads=96 // tp, channels=128).args(device))
