"""mla_absorb_query: cases against the reference, its properties, and the known faults of the absorbed product."""

from dataclasses import dataclass

import pytest
import torch
from cases import act_dtypes, fills, make, seeds, strided
from hypothesis import example, given
from hypothesis import strategies as st

from kimi_kernels.compare import assert_same_bits, check_op
from triton_ops.mla_absorb_query import mla_absorb_query

BF16 = torch.bfloat16
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    rows: int = 2
    heads: int = 2
    nope: int = 16
    extra: int = 8
    latent: int = 32
    fill: str = "normal"
    seed: int = 0
    dtype: torch.dtype = BF16

    def args(self, device: str) -> tuple:
        """q is a slice of a fused projection, w_uk the first rows of each head of kv_b; what surrounds them is NaN."""
        like = dict(dtype=self.dtype, device=device)
        q = strided(make(self.rows, self.heads * (self.nope + self.extra), fill=self.fill, seed=self.seed, **like))
        kv_b = torch.full((self.heads, self.nope + 5, self.latent), NAN, **like)
        kv_b[:, : self.nope] = make(self.heads, self.nope, self.latent, fill=self.fill, seed=self.seed + 1, **like)
        return q.unflatten(-1, (self.heads, -1)), kv_b[:, : self.nope]


cases = st.builds(
    Case,
    rows=st.sampled_from((1, 2, 3, 7, 17)),
    heads=st.sampled_from((1, 3, 6)),
    nope=st.sampled_from((16, 32, 48)),
    extra=st.sampled_from((8, 16, 12)),
    latent=st.sampled_from((32, 64, 48)),
    fill=fills,
    seed=seeds,
    dtype=act_dtypes,
)


@given(cases)
@example(Case(rows=33))
@example(Case(rows=1, heads=1, nope=128, extra=64, latent=512))
def test_equals_the_reference(device, case):
    check_op("mla_absorb_query", mla_absorb_query, *case.args(device))


def test_no_rows_give_an_empty_result(device):
    """Fault I19."""
    q, w_uk = Case().args(device)
    assert mla_absorb_query(q[:0], w_uk).shape == (0, 2, 32 + 8)


def test_extra_channels_are_copied_bit_for_bit(device):
    """Fault T15: the unrotated channels still score."""
    q, w_uk = Case(rows=3).args(device)
    assert_same_bits(mla_absorb_query(q, w_uk)[..., 32:], q[..., 16:])


def test_query_at_the_end_of_its_memory(device):
    """Fault I18: 14 rows of 6 heads in an allocation that ends with them; what lies before it is NaN."""
    q, w_uk = Case(rows=14, heads=6, nope=128, extra=64, latent=32).args(device)
    memory = torch.full((1024 + q.numel(),), NAN, dtype=q.dtype, device=device)
    last = memory[1024:].view(q.shape).copy_(q)
    assert_same_bits(mla_absorb_query(q, w_uk), mla_absorb_query(last, w_uk))


def test_rows_are_independent(device):
    """Fault I20: also across the edge of a block of 16 rows; NaN in one row stays there."""
    q, w_uk = Case(rows=18).args(device)
    together = mla_absorb_query(q, w_uk)
    q[5] = NAN
    poisoned = mla_absorb_query(q, w_uk)
    others = [r for r in range(18) if r != 5]
    assert_same_bits(poisoned[others], together[others])
    for r in (0, 15, 16, 17):
        assert_same_bits(mla_absorb_query(q[r : r + 1], w_uk)[0], together[r])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", (1, 8, 32, 100))
@pytest.mark.parametrize("tp", (8, 16, 32))
def test_k3_shapes(device, tp, rows):
    case = Case(rows=rows, heads=96 // tp, nope=128, extra=64, latent=512)
    check_op("mla_absorb_query", mla_absorb_query, *case.args(device))
