"""moe_router: cases against the reference, order and ties, and the known faults of top-k kernels."""

from dataclasses import dataclass

import pytest
import torch
from cases import fills, make, seeds, strided
from hypothesis import example, given
from hypothesis import strategies as st

from kimi_kernels.compare import assert_same_bits, check_op
from triton_ops.moe_router import MoeRouterConfig, _launch, moe_router

FP32 = torch.float32
NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Case:
    rows: int = 2
    experts: int = 24
    top_k: int = 4
    scaling: float = 1.0
    scale: float = 1.0
    fill: str = "normal"
    seed: int = 0

    def args(self, device: str) -> tuple:
        """Logits between NaN columns; the bias is an every-other slice."""
        kind = dict(dtype=FP32, device=device)
        logits = make(self.rows, self.experts, fill=self.fill, seed=self.seed, scale=self.scale, **kind)
        bias = make(self.experts, 2, seed=self.seed + 1, scale=0.1, **kind)
        return strided(logits), bias[:, 0], min(self.top_k, self.experts), self.scaling


cases = st.builds(
    Case,
    rows=st.sampled_from((1, 2, 3, 7)),
    experts=st.sampled_from((1, 5, 12, 24, 64, 100, 256)),
    top_k=st.sampled_from((1, 3, 4, 8, 16)),
    scaling=st.sampled_from((1.0, 2.446)),
    scale=st.sampled_from((1.0, 10.0, 0.01)),
    fill=fills,
    seed=seeds,
)


@given(cases)
@example(Case(rows=2, experts=896, top_k=16))
@example(Case(rows=1, experts=256, top_k=8, scaling=2.446))
def test_equals_the_reference(device, case):
    check_op("moe_router", moe_router, *case.args(device))


@pytest.mark.parametrize("experts", (16, 64, 256, 512, 513, 896, 1024))
def test_expert_counts_up_to_1024(device, experts):
    """Fault I22: caps at 256, 384 or 512, or the last expert lost."""
    logits, bias, top_k, scaling = Case(rows=2, experts=experts, top_k=16).args(device)
    logits[:, -1], bias[-1] = 30, 1
    check_op("moe_router", moe_router, logits, bias, top_k, scaling)
    assert moe_router(logits, bias, top_k, scaling)[0].eq(experts - 1).any(1).all()


@pytest.mark.parametrize("top_k, group", ((1, 1), (1, 32), (5, 1), (5, 16), (16, 2), (16, 8)))
def test_the_size_of_a_group_changes_nothing(device, group, top_k):
    """Only the order of the sum of scores, so the weights keep their bound and the ids their bits."""
    args = Case(rows=2, experts=100, top_k=top_k).args(device)
    grouped = lambda *args: _launch(MoeRouterConfig(group, 1), *args)  # noqa: E731
    check_op("moe_router", grouped, *args)
    assert_same_bits(grouped(*args)[0], moe_router(*args)[0])


def test_winners_may_share_a_group(device):
    """All 8 members of two groups, and one member of 16 groups: group g of 1024 experts is g, g + 128, g + 256, ..."""
    for ids in (torch.arange(16) // 8 + torch.arange(16) % 8 * 128, torch.arange(16)):
        logits = torch.full((1, 1024), -5.0, device=device)
        logits[0, ids] = torch.arange(16, device=device) * 0.1
        got, _ = moe_router(logits, torch.zeros(1024, device=device), 16, 1.0)
        want = torch.argsort(logits[0], descending=True, stable=True)[:16].int()
        assert_same_bits(got[0], want)


def test_the_bias_only_selects(device):
    """Fault N25: weights of biased scores would differ between the picks."""
    logits = torch.zeros(1, 896, device=device)
    ids, weights = moe_router(logits, torch.arange(896, device=device) * 1e-3, 16, 1.0)
    assert ids.tolist() == [list(range(895, 879, -1))]
    assert weights.tolist() == [[0.0625] * 16]


def test_ties_take_the_lower_id(device):
    """Fault N27: sigmoid of 20, 25 and 30 is exactly 1 in float32; and all logits equal."""
    logits = torch.full((1, 896), -1.0, device=device)
    scattered = torch.arange(40) * 22 + 5
    logits[0, scattered] = torch.tensor([20.0, 25.0, 30.0], device=device).repeat(14)[:40]
    zero = torch.zeros(896, device=device)
    ids, weights = moe_router(torch.cat([logits, torch.full_like(logits, 0.7)]).repeat(3, 1), zero, 16, 1.0)
    assert ids[::2].tolist() == [scattered[:16].tolist()] * 3 and ids[1::2].tolist() == [list(range(16))] * 3
    assert weights.eq(0.0625).all()


def test_nan_and_infinite_rows_pick_valid_experts(device):
    """Fault N28: NaN counts as score 0, so a row of NaN picks the first experts with weight 0."""
    logits, bias, top_k, scaling = Case(rows=5, experts=896, top_k=16, seed=3).args(device)
    bias = torch.zeros_like(bias)
    clean = moe_router(logits, bias, top_k, scaling)
    logits[0], logits[1, 7], logits[2] = NAN, NAN, -INF
    logits[4, [100, 800]] = INF
    ids, weights = moe_router(logits, bias, top_k, scaling)
    assert ids.min() >= 0 and ids.max() < 896 and all(len(set(row)) == 16 for row in ids.tolist())
    assert weights.isfinite().all()
    for row in (0, 2):
        assert ids[row].tolist() == list(range(16)) and weights[row].eq(0).all()
    assert ids[4, :2].tolist() == [100, 800]
    for got, want in zip((ids, weights), clean, strict=True):
        assert_same_bits(got[3], want[3])


def test_scaling_is_applied_once_after_the_sum(device):
    """Fault N30: weights sum to the scaling, and a scaling of 1 changes no bit."""
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0]], device=device)
    bias = torch.zeros(4, device=device)
    one, scaled = (moe_router(logits, bias, 2, scaling)[1] for scaling in (1, 2.5))
    assert_same_bits(scaled, one * 2.5)
    torch.testing.assert_close(one.sum(), torch.tensor(1.0, device=device), rtol=2e-7, atol=0)  # two float32 roundings


@given(seed=seeds)
def test_experts_permute(device, seed):
    logits, bias, top_k, scaling = Case(experts=64, seed=seed).args(device)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(seed)).to(device)
    ids, weights = moe_router(logits, bias, top_k, scaling)
    permuted_ids, permuted_weights = moe_router(logits[:, order].contiguous(), bias[order], top_k, scaling)
    assert_same_bits(order[permuted_ids.long()].int(), ids)
    torch.testing.assert_close(permuted_weights, weights, rtol=1e-6, atol=0)  # the sum has another order


def test_rows_are_independent(device):
    """Fault I20, with a NaN row among them; views equal copies (fault I11)."""
    logits, bias, top_k, scaling = Case(rows=9).args(device)
    logits[4] = NAN
    together = moe_router(logits, bias, top_k, scaling)
    for r in range(9):
        alone = moe_router(logits[r : r + 1].contiguous(), bias.contiguous(), top_k, scaling)
        for a, b in zip(alone, together, strict=True):
            assert_same_bits(a[0], b[r])


def test_no_rows_give_empty_results(device):
    """Fault I19."""
    logits, bias, top_k, scaling = Case().args(device)
    ids, weights = moe_router(logits[:0], bias, top_k, scaling)
    assert ids.shape == weights.shape == (0, 4) and ids.dtype == torch.int32 and weights.dtype == FP32


@pytest.mark.parametrize("top_k", (0, 25, -1))
def test_more_picks_than_experts_are_refused(device, top_k):
    logits, bias, _, scaling = Case().args(device)
    with pytest.raises(ValueError, match="moe_router: 1 <= top_k <= E must hold"):
        moe_router(logits, bias, top_k, scaling)


def test_results_are_fresh_tensors(device):
    """Fault S06."""
    logits, *rest = Case().args(device)
    first = moe_router(logits, *rest)
    kept = [t.clone() for t in first]
    moe_router(-logits, *rest)
    for a, b in zip(first, kept, strict=True):
        assert_same_bits(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", (1, 8, 64))
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("experts, top_k, scaling", ((896, 16, 1.0), (256, 8, 2.446)))
def test_model_shapes(device, experts, top_k, scaling, seed, rows):
    case = Case(rows, experts, top_k, scaling, scale=0.5 + seed, seed=seed)
    check_op("moe_router", moe_router, *case.args(device))
