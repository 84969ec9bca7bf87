"""situ: cases against the reference, published values, and the known faults of soft clips."""

import math
from dataclasses import dataclass

import pytest
import torch
from cases import act_dtypes, fills, make, rows, seeds, strided
from hypothesis import example, given
from hypothesis import strategies as st

from kimi_kernels.compare import assert_same_bits, check_op
from triton_ops.situ import situ

FP32, BF16 = torch.float32, torch.bfloat16
NAN = float("nan")
BETAS = (4.0, 25.0)


@dataclass(frozen=True)
class Case:
    rows: int = 2
    width: int = 40
    fill: str = "normal"
    scale: float = 1.0
    seed: int = 0
    dtype: torch.dtype = BF16
    betas: tuple[float, float] = BETAS

    def args(self, device: str) -> tuple:
        kind = dict(fill=self.fill, seed=self.seed, dtype=self.dtype, device=device, scale=self.scale)
        gate_up = make(self.rows, 2 * self.width, **kind)
        if self.dtype == BF16:
            gate_up.clamp_(-60)  # keeps m a normal number: the interpreter converts subnormals to bfloat16 wrongly
        return strided(gate_up), *self.betas


cases = st.builds(
    Case,
    rows=rows,
    width=st.sampled_from((8, 48, 96, 1100, 1)),
    fill=fills,
    scale=st.sampled_from((1.0, 1e-3, 30.0)),
    seed=seeds,
    dtype=act_dtypes,
    betas=st.sampled_from((BETAS, (1.0, 1.0), (0.5, 7.0))),
)


@given(cases)
@example(Case(rows=1, width=768))
def test_equals_the_reference(device, case):
    check_op("situ", situ, *case.args(device))


def pairs(device: str, *gate_up: tuple[float, float], dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.tensor(list(zip(*gate_up, strict=True)), dtype=dtype, device=device).reshape(1, -1)


def test_published_values(device):
    """Fault N22: SwiGLU instead gives 0.731, 98.2, 1000, -2.06e-6, -8.068, 63.98."""
    m = situ(pairs(device, (1, 1), (4, 25), (20, 50), (-20, 50), (-1, 30), (8, 8)), *BETAS)
    want = [0.7158178, 56.95932, 96.39400, -1.986829e-07, -5.491181, 29.82731]
    torch.testing.assert_close(m, torch.tensor([want], device=device), rtol=1e-6, atol=0)  # seven digits are given


def test_clips_saturate_without_nan(device):
    """Fault N23: tanh as a ratio of exponentials is inf/inf there."""
    m = situ(pairs(device, (3e38, 1), (-3e38, 1), (100, -100), (-100, 1e4), (44, 1e4), (-44, -1e4)), *BETAS)
    torch.testing.assert_close(m[0, 0].item(), 3.997868, rtol=1e-6, atol=0)
    assert m[0, 1] == 0 and math.copysign(1, m[0, 1].item()) == -1
    torch.testing.assert_close(m[0, 2].item(), -99.93293, rtol=1e-6, atol=0)
    assert m.isfinite().all() and m.abs().max() <= 100


def test_tanh_keeps_its_relative_precision_near_zero(device):
    """1 - 2/(exp(2x) + 1) alone loses all digits there: SiTU of small values is gate * up / 2."""
    x = torch.logspace(-30, -4, 64, dtype=torch.float64).float().to(device)
    m = situ(torch.cat([x, torch.ones_like(x)]).reshape(1, -1), *BETAS)
    # sigmoid(x) = 1/2 + x/4 to the digits of float32
    want = x.double() / 2 * (1 + x.double() / 2) * 25 * math.tanh(1 / 25)
    torch.testing.assert_close(m[0].double(), want, rtol=1e-6, atol=0)


@given(seed=seeds, scale=st.sampled_from((0.1, 1.0, 100.0)))
def test_the_up_branch_is_odd(device, seed, scale):
    gate_up, *betas = Case(seed=seed, scale=scale, dtype=FP32).args(device)
    gate, up = gate_up.chunk(2, dim=-1)
    assert_same_bits(situ(torch.cat([gate, -up], dim=-1), *betas), -situ(gate_up, *betas))


def test_rows_are_independent(device):
    """Fault I20, with a NaN row among them; views equal copies (fault I11)."""
    gate_up, *betas = Case(rows=9, width=50).args(device)
    gate_up[4] = NAN
    m = situ(gate_up, *betas)
    for r in range(9):
        assert_same_bits(situ(gate_up[r : r + 1].contiguous(), *betas)[0], m[r])
    assert m[[3, 5]].isfinite().all()


def test_no_rows_give_an_empty_result(device):
    """Fault I19."""
    gate_up, *betas = Case().args(device)
    m = situ(gate_up[:0], *betas)
    assert m.shape == (0, 40) and m.dtype == BF16


def test_results_are_fresh_tensors(device):
    """Fault S06."""
    gate_up, *betas = Case().args(device)
    first = situ(gate_up, *betas)
    kept = first.clone()
    situ(-gate_up, *betas)
    assert_same_bits(first, kept)


@pytest.mark.gpu
@pytest.mark.parametrize("tp", (8, 16, 32))
@pytest.mark.parametrize("rows, width", ((1, 33792), (1, 6144), (32, 6144), (16, 3072), (512, 3072)))
def test_k3_shapes(device, rows, width, tp):
    check_op("situ", situ, *Case(rows=rows, width=width // tp, scale=3.0).args(device))
