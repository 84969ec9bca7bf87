"""mla_kv_append: cases against the reference, and the known faults of paged writes."""

from dataclasses import dataclass

import pytest
import torch
from cases import act_dtypes, far_pool, fills, make, seeds, strided
from hypothesis import example, given
from hypothesis import strategies as st

from kimi_kernels.compare import assert_same_bits, check_op
from triton_ops.mla_kv_append import mla_kv_append

BF16 = torch.bfloat16
NAN = float("nan")
EPS = 1e-6


@dataclass(frozen=True)
class Case:
    seq_lens: tuple[int, ...] = (3, 5)  # 0: a padded sequence
    steps: int = 1
    latent: int = 32
    extra: int = 8
    page_size: int = 4
    fill: str = "normal"
    seed: int = 0
    dtype: torch.dtype = BF16

    def args(self, device: str) -> tuple:
        """ckv is a slice of a NaN tensor, NaN in padded rows; pages are used once, unused table entries are far out."""
        batch, width = len(self.seq_lens), self.latent + self.extra
        like = dict(fill=self.fill, dtype=self.dtype, device=device)
        ckv = strided(make(batch * self.steps, width, seed=self.seed, **like))
        weight = make(self.latent, seed=self.seed + 1, dtype=self.dtype, device=device)
        table, pages = page_table(self.seq_lens, self.page_size, self.seed)
        cache = make(pages, self.page_size, width, seed=self.seed + 2, **like)
        for b, seq_len in enumerate(self.seq_lens):
            if seq_len == 0:
                ckv[b * self.steps : (b + 1) * self.steps] = NAN
        seq_lens = torch.tensor(self.seq_lens, dtype=torch.int32, device=device)
        return ckv, weight, EPS, cache, table.to(device), seq_lens


def page_table(seq_lens: tuple[int, ...], page_size: int, seed: int) -> tuple[torch.Tensor, int]:
    """A table [B, MAX_PAGES] of distinct pages in random order and the pool size; what no token needs is 2^31 - 1."""
    need = [-(-n // page_size) for n in seq_lens]
    order = torch.randperm(sum(need) + 2, generator=torch.Generator().manual_seed(seed)).int()
    table = torch.full((len(need), max([1, *need]) + 1), 2**31 - 1, dtype=torch.int32)
    for b, n in enumerate(need):
        start = sum(need[:b])
        table[b, :n] = order[start : start + n]
    return table, sum(need) + 2


cases = st.builds(
    Case,
    seq_lens=st.lists(st.sampled_from((0, 3, 4, 9, 17)), min_size=1, max_size=4).map(tuple),
    steps=st.sampled_from((1, 2, 3)),
    latent=st.sampled_from((32, 64, 48)),
    extra=st.sampled_from((8, 16)),
    page_size=st.sampled_from((4, 1, 64, 3)),
    fill=fills,
    seed=seeds,
    dtype=act_dtypes,
)


@given(cases)
@example(Case(seq_lens=(64, 65, 1, 0, 8, 7, 2), latent=512, extra=64, page_size=64))
@example(Case(seq_lens=(2,), steps=3))  # row 0 has no position
def test_equals_the_reference(device, case):
    check_op("mla_kv_append", mla_kv_append, *case.args(device))


def test_no_rows_write_nothing(device):
    """Fault I19."""
    ckv, weight, eps, cache, table, seq_lens = Case().args(device)
    before = cache.clone()
    mla_kv_append(ckv[:0], weight, eps, cache, table[:0], seq_lens[:0])
    assert_same_bits(cache, before)


def test_extra_channels_are_copied_bit_for_bit(device):
    """The P channels are neither normed nor rotated."""
    ckv, weight, eps, cache, table, seq_lens = Case(seq_lens=(6,)).args(device)
    mla_kv_append(ckv, weight, eps, cache, table, seq_lens)
    assert_same_bits(cache[table[0, 1].long(), 1, 32:], ckv[0, 32:])


def test_padded_sequences_write_nothing(device):
    """Faults G01 and I06: NaN rows with seq_lens 0."""
    ckv, weight, eps, cache, table, seq_lens = Case(seq_lens=(0, 0), steps=2).args(device)
    before = cache.clone()
    mla_kv_append(ckv, weight, eps, cache, table, seq_lens)
    assert_same_bits(cache, before)


def test_strided_lengths_and_tables(device):
    """Faults I09 and I10."""
    ckv, weight, eps, cache, table, seq_lens = Case(seq_lens=(3, 5, 9)).args(device)
    lens = torch.full((3, 2), 2**30, dtype=torch.int32, device=device)
    lens[:, 1] = seq_lens
    wide = torch.full((3, table.shape[1] + 3), 2**30, dtype=torch.int32, device=device)
    wide[:, 3:] = table
    caches = cache.clone(), cache.clone()
    mla_kv_append(ckv, weight, eps, caches[0], table, seq_lens)
    mla_kv_append(ckv, weight, eps, caches[1], wide[:, 3:], lens[:, 1])
    assert_same_bits(*caches)


def test_page_times_pitch_overflows_32_bits(device):
    """Fault I04: the pitch fits 32 bits, page 2 times the pitch does not."""
    ckv, weight, eps, cache, table, seq_lens = Case(seq_lens=(3,)).args(device)
    table[0, 0] = 2
    near = make(3, *cache.shape[1:], seed=9, dtype=cache.dtype, device=device)
    far = far_pool(near)
    for pool in (near, far):
        mla_kv_append(ckv, weight, eps, pool, table, seq_lens)
    assert_same_bits(near, far)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", (1, 8, 32))
@pytest.mark.parametrize("page_size", (1, 64))
def test_k3_shapes(device, page_size, rows):
    lens = tuple(0 if b % 8 == 7 else 4000 + 13 * b for b in range(rows))
    check_op("mla_kv_append", mla_kv_append, *Case(lens, latent=512, extra=64, page_size=page_size).args(device))
