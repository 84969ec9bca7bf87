"""mla_expand_value: cases against the reference and its properties."""

from dataclasses import dataclass

import pytest
import torch
from cases import act_dtypes, fills, make, seeds, strided
from hypothesis import example, given
from hypothesis import strategies as st

from kimi_kernels.compare import assert_same_bits, check_op
from triton_ops.mla_expand_value import mla_expand_value

BF16 = torch.bfloat16
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    rows: int = 2
    heads: int = 2
    latent: int = 32
    value_dim: int = 16
    fill: str = "normal"
    seed: int = 0
    dtype: torch.dtype = BF16

    def args(self, device: str) -> tuple:
        """o_latent has a padded row stride, w_uv is the last rows of each head of kv_b; what surrounds them is NaN."""
        like = dict(dtype=self.dtype, device=device)
        o_latent = strided(make(self.rows, self.heads, self.latent, fill=self.fill, seed=self.seed, **like))
        kv_b = torch.full((self.heads, 5 + self.value_dim, self.latent), NAN, **like)
        kv_b[:, 5:] = make(self.heads, self.value_dim, self.latent, fill=self.fill, seed=self.seed + 1, **like)
        return o_latent, kv_b[:, 5:]


cases = st.builds(
    Case,
    rows=st.sampled_from((1, 2, 3, 7, 17)),
    heads=st.sampled_from((1, 3, 6)),
    latent=st.sampled_from((32, 64, 144)),
    value_dim=st.sampled_from((16, 12, 32)),
    fill=fills,
    seed=seeds,
    dtype=act_dtypes,
)


@given(cases)
@example(Case(rows=33))
@example(Case(rows=1, heads=1, latent=512, value_dim=128))
def test_equals_the_reference(device, case):
    check_op("mla_expand_value", mla_expand_value, *case.args(device))


def test_no_rows_give_an_empty_result(device):
    """Fault I19."""
    o_latent, w_uv = Case().args(device)
    assert mla_expand_value(o_latent[:0], w_uv).shape == (0, 2, 16)


def test_one_latent_channel_picks_its_column(device):
    o_latent, w_uv = Case(rows=2).args(device)
    o_latent.zero_()
    o_latent[:, :, 7] = 1
    assert_same_bits(mla_expand_value(o_latent, w_uv), w_uv[:, :, 7].expand(2, -1, -1))


def test_rows_are_independent(device):
    """Fault I20: also across the edge of a block of 16 rows; NaN in one row stays there."""
    o_latent, w_uv = Case(rows=18).args(device)
    together = mla_expand_value(o_latent.contiguous(), w_uv)
    o_latent[5] = NAN
    poisoned = mla_expand_value(o_latent, w_uv)
    others = [r for r in range(18) if r != 5]
    assert_same_bits(poisoned[others], together[others])
    for r in (0, 15, 16, 17):
        assert_same_bits(mla_expand_value(o_latent[r : r + 1], w_uv)[0], together[r])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", (1, 8, 32, 100))
@pytest.mark.parametrize("tp", (8, 16, 32))
def test_k3_shapes(device, tp, rows):
    case = Case(rows=rows, heads=96 // tp, latent=512, value_dim=128)
    check_op("mla_expand_value", mla_expand_value, *case.args(device))
