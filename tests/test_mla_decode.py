"""mla_decode: cases against the reference, its properties, and the known faults of paged split attention."""

from dataclasses import dataclass, replace

import pytest
import torch
from cases import act_dtypes, far_pool, fills, make, seeds, strided
from hypothesis import example, given
from hypothesis import strategies as st
from test_mla_kv_append import page_table

from kimi_kernels.compare import assert_same_bits, check_op
from triton_ops.mla_decode import MlaDecodeConfig, _launch, mla_decode, pick_mla_decode_config

FP32, BF16 = torch.float32, torch.bfloat16
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    seq_lens: tuple[int, ...] = (3, 40)  # 0: a padded sequence
    steps: int = 1
    heads: int = 2
    latent: int = 32
    extra: int = 16
    page_size: int = 4
    fill: str = "normal"
    seed: int = 0
    dtype: torch.dtype = BF16

    def args(self, device: str) -> tuple:
        """q is a slice of a NaN tensor with NaN in padded rows; unused pages and page tails are NaN.

        Keys and queries are scaled so that scores stay near 1 for plain data and reach 1e4 for the hostile fills.
        """
        batch, width = len(self.seq_lens), self.latent + self.extra
        like = dict(dtype=self.dtype, device=device)
        q = make(batch * self.steps, self.heads, width, fill=self.fill, seed=self.seed, **like)
        table, pages = page_table(self.seq_lens, self.page_size, self.seed)
        rows = make(pages, self.page_size, width, seed=self.seed + 1, **like)
        cache = torch.full_like(rows, NAN)
        for b, seq_len in enumerate(self.seq_lens):
            for j in range(seq_len):
                at = table[b, j // self.page_size], j % self.page_size
                cache[at] = rows[at]
            if seq_len == 0:
                q[b * self.steps : (b + 1) * self.steps] = NAN
        seq_lens = torch.tensor(self.seq_lens, dtype=torch.int32, device=device)
        return strided(q), cache, table.to(device), seq_lens, width**-0.5, self.latent


cases = st.builds(
    Case,
    seq_lens=st.lists(st.sampled_from((1, 0, 3, 17, 40, 70)), min_size=1, max_size=2).map(tuple),
    steps=st.sampled_from((1, 2, 3)),
    heads=st.sampled_from((1, 3, 6)),  # 3 and 6 do not divide the tile of 16 queries (fault I16)
    latent=st.sampled_from((32, 64, 48)),
    extra=st.sampled_from((16, 8)),
    page_size=st.sampled_from((4, 1, 64, 3)),
    fill=fills,
    seed=seeds,
    dtype=act_dtypes,
)


@given(cases)
@example(Case(seq_lens=(130,), heads=12, page_size=64, latent=128, extra=64))
@example(Case(seq_lens=(2,), steps=3, heads=12))  # more queries than a block; row 0 sees nothing
def test_equals_the_reference(device, case):
    check_op("mla_decode", mla_decode, *case.args(device))


@pytest.mark.parametrize("splits", (1, 2, 5, 16))
@pytest.mark.parametrize("block_s", (16, 32))
def test_any_split_is_within_the_bound(device, splits, block_s):
    """Fault N16: more splits than tiles; lengths of one token beside many."""
    args = Case(seq_lens=(1, 2, 3, 17, 100, 0)).args(device)
    config = MlaDecodeConfig(splits, 16, block_s, 4, 3, 4, 32)
    check_op("mla_decode", lambda *a: _launch(config, *a), *args)


def test_config_depends_on_shapes_and_fills_the_device():
    configs = [pick_mla_decode_config(b, 12, 8192, 512) for b in (1, 8, 32, 512)]
    assert [c.splits for c in configs] == [128, 33, 8, 1]
    assert pick_mla_decode_config(1, 12, 64, 512).splits == 2


def test_no_rows_give_an_empty_result(device):
    """Fault I19."""
    q, cache, table, seq_lens, *rest = Case().args(device)
    assert mla_decode(q[:0], cache, table[:0], seq_lens[:0], *rest).shape == (0, 2, 32)


@pytest.mark.parametrize("seq_len", (1, 13, 63, 65))
def test_page_tails_and_unused_pages_never_reach_the_output(device, seq_len):
    """Fault N14: NaN there gives the same bits as zeros; padding entries of the table point to a page of NaN."""
    q, cache, table, seq_lens, *rest = Case(seq_lens=(seq_len,), page_size=64).args(device)
    table = torch.cat([table, table], dim=1)
    used = -(-seq_len // 64)
    table[0, used:] = cache.shape[0]
    dirty = torch.cat([cache, torch.full_like(cache[:1], NAN)])
    clean = torch.where(dirty.isnan(), 0.0, dirty)
    o = [mla_decode(q, pool, table, seq_lens, *rest) for pool in (dirty, clean)]
    assert o[0].isfinite().all()
    assert_same_bits(*o)


def test_padded_sequences_are_zero(device):
    """Faults N16, G01, C14: NaN queries with seq_lens 0, also for several steps."""
    args = Case(seq_lens=(0, 5, 0), steps=2).args(device)
    o = mla_decode(*args).unflatten(0, (3, 2))
    assert o[[0, 2]].eq(0).all() and o[1].isfinite().all()


def test_unrotated_channels_score_with_the_given_scale(device):
    """Fault T15: two keys whose logits are 0 and 192^-0.5, the difference only in the extra channels."""
    q = torch.zeros(1, 1, 48, dtype=FP32, device=device)
    q[..., 32] = 1
    cache = torch.zeros(1, 2, 48, dtype=FP32, device=device)
    cache[0, 1, 32] = 1  # scores
    cache[0, 1, 0] = 1  # the value
    table, seq_lens = (
        torch.zeros(1, 1, dtype=torch.int32, device=device),
        torch.full((1,), 2, dtype=torch.int32, device=device),
    )
    o = mla_decode(q, cache, table, seq_lens, 192**-0.5, 32)
    assert abs(o[0, 0, 0].item() - 1 / (1 + 2.718281828 ** -(192**-0.5))) < 1e-6
    assert o[0, 0, 1:].eq(0).all()


def test_one_cached_token_is_returned(device):
    q, cache, table, seq_lens, *rest = Case(seq_lens=(1,), heads=3).args(device)
    o = mla_decode(q, cache, table, seq_lens, *rest)
    assert_same_bits(o[0], cache[table[0, 0].long(), 0, :32].expand(3, -1))


def test_a_key_without_weight_changes_nothing(device):
    """A key 2e4 below the others has weight 0."""
    q, cache, table, seq_lens, *rest = Case(seq_lens=(9,), heads=2, dtype=FP32).args(device)
    q[..., 32:] = 1
    before = mla_decode(q, cache, table, seq_lens, *rest)
    cache[table[0, 2].long(), 1] = 0
    cache[table[0, 2].long(), 1, 32:] = -1e4
    assert_same_bits(before, mla_decode(q, cache, table, seq_lens + 1, *rest))


def test_several_steps_are_causal(device):
    """Row t equals a step of one token over seq_len - T + t + 1 cached tokens."""
    q, cache, table, seq_lens, *rest = Case(seq_lens=(37, 8), steps=3, dtype=FP32).args(device)
    o = mla_decode(q, cache, table, seq_lens, *rest).unflatten(0, (2, 3))
    for t in range(3):
        args = q.unflatten(0, (2, 3))[:, t], cache, table, seq_lens - 2 + t, *rest
        single = mla_decode(*args)
        torch.testing.assert_close(o[:, t], single, rtol=1e-5, atol=1e-6)


def test_rows_are_independent(device):
    """Fault I20: other sequences, among them one of NaN, do not change a bit."""
    q, cache, table, seq_lens, *rest = Case(seq_lens=(40, 3, 70, 9)).args(device)
    o = mla_decode(q, cache, table, seq_lens, *rest)
    q[2] = NAN
    poisoned = mla_decode(q, cache, table, seq_lens, *rest)
    assert_same_bits(poisoned[[0, 1, 3]], o[[0, 1, 3]])
    order = torch.tensor([3, 1, 0], device=device)
    turned = mla_decode(q[[3, 1, 0, 2]], cache, table[[3, 1, 0, 2]], seq_lens[[3, 1, 0, 2]], *rest)
    assert_same_bits(turned[:3], o[order])


def test_strided_lengths_and_tables(device):
    """Faults I09 and I10; views equal contiguous copies (fault I11)."""
    q, cache, table, seq_lens, *rest = Case().args(device)
    lens = torch.full((2, 2), 2**30, dtype=torch.int32, device=device)
    lens[:, 1] = seq_lens
    wide = torch.full((2, table.shape[1] + 3), 2**30, dtype=torch.int32, device=device)
    wide[:, 3:] = table
    o = mla_decode(q.contiguous(), cache, table, seq_lens, *rest)
    assert_same_bits(o, mla_decode(q, cache, wide[:, 3:], lens[:, 1], *rest))


@pytest.mark.parametrize("page_size", (4, 64))
def test_page_times_pitch_overflows_32_bits(device, page_size):
    """Fault I04: the pitch fits 32 bits, page 2 times the pitch does not."""
    q, cache, table, seq_lens, *rest = Case(seq_lens=(3,), page_size=page_size).args(device)
    near = torch.full((3, *cache.shape[1:]), NAN, dtype=cache.dtype, device=device)
    near[2] = cache[table[0, 0].long()]
    table[0, 0] = 2
    assert_same_bits(*(mla_decode(q, pool, table, seq_lens, *rest) for pool in (near, far_pool(near))))


K3_CASE = Case(latent=512, extra=64, page_size=64)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", (1, 8, 32))
@pytest.mark.parametrize("tp", (8, 16, 32))
def test_k3_shapes(device, tp, rows):
    lens = tuple(0 if b % 8 == 7 else 1 + 1021 * b % 4096 for b in range(1, rows + 1))
    check_op("mla_decode", mla_decode, *replace(K3_CASE, seq_lens=lens, heads=96 // tp).args(device))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "heads, steps, page_size, dtype", [(12, 8, 64, BF16), (32, 1, 1, BF16), (96, 1, 64, BF16), (12, 1, 64, FP32)]
)
def test_k3_variants(device, heads, steps, page_size, dtype):
    case = replace(K3_CASE, seq_lens=(777, 2048), heads=heads, steps=steps, page_size=page_size, dtype=dtype)
    check_op("mla_decode", mla_decode, *case.args(device))


@pytest.mark.gpu
def test_graph_replay_follows_lengths_and_tables(device):
    """Fault G02: captured with short sequences, replayed with longer ones, other pages and a padded sequence."""
    q, cache, table, seq_lens, *rest = replace(K3_CASE, seq_lens=(700, 300, 900), heads=12).args(device)
    cache.nan_to_num_()
    table.clamp_(max=0)
    mla_decode(q, cache, table, seq_lens, *rest)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = mla_decode(q, cache, table, seq_lens, *rest)
    for turn in ((900, 0, 1), (63, 900, 65)):
        seq_lens.copy_(torch.tensor(turn))
        table.copy_(torch.randint(cache.shape[0], table.shape))
        o.fill_(NAN)
        graph.replay()
        assert_same_bits(o, mla_decode(q, cache, table, seq_lens, *rest))
