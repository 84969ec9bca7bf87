"""moe_down: cases against the reference, the weighted sum over picks, and the known faults of expert routing."""

from dataclasses import replace

import pytest
import torch
from cases import make
from expert_cases import NAN, Case, cases
from hypothesis import example, given

from kimi_kernels.compare import assert_same_bits, check_op
from triton_ops._experts import ExpertConfig
from triton_ops.moe_down import _launch, moe_down

FP32, BF16 = torch.float32, torch.bfloat16


@given(cases(latents=(16, 40), inners=(8, 40, 160)))
@example(Case(rows=3, top_k=4, experts=2, latent=24, inner=160, picks="one", views=True, dtype=BF16))
def test_equals_the_reference(device, case):
    check_op("moe_down", moe_down, *case.down(device))


def test_no_rows_give_an_empty_result(device):
    """Fault I19."""
    m, ids, weights, w2 = Case().down(device)
    y = moe_down(m[:0], ids[:0], weights[:0], w2)
    assert y.shape == (0, w2.shape[1]) and y.dtype == m.dtype


@pytest.mark.parametrize("experts", [16, 513, 896, 1024])
def test_any_number_of_experts_up_to_the_last(device, experts):
    """Fault I22: no cap and no sentinel inside the ids; every expert but the picked ones is NaN."""
    m, _, weights, w2 = Case(rows=1, top_k=16, experts=experts, latent=8, inner=8).down(device)
    ids = torch.arange(experts - 16, experts, dtype=torch.int32, device=device).flip(0)[None]
    w2.fill_(NAN)[experts - 16 :] = make(16, 8, 8, seed=5, dtype=FP32, device=device)
    check_op("moe_down", moe_down, m, ids, weights, w2)


def test_ids_outside_the_experts_add_nothing(device):
    """Fault N28: the pick counts as zero, whatever its weight."""
    m, _, weights, w2 = Case(rows=1, picks="distinct", experts=3).down(device)
    weights[0, 1] = 0
    want = moe_down(m, torch.tensor([[0, 1, 2]], dtype=torch.int32, device=device), weights, w2)
    weights[0, 1] = 3.0
    for bad in (-1, 3, -(2**31), 2**31 - 1):
        y = moe_down(m, torch.tensor([[0, bad, 2]], dtype=torch.int32, device=device), weights, w2)
        assert_same_bits(y, want)


def test_picks_are_added_in_order_in_float32(device):
    """Identity experts: 2^24 + 1 + 1 - 2^24 is 0 in order and in float32, 2 or 1 in another order or a wider type."""
    m = torch.ones(1, 4, 8, dtype=FP32, device=device)
    w2 = torch.eye(8, dtype=FP32, device=device).expand(4, 8, 8).contiguous()
    ids = torch.tensor([[3, 1, 0, 2]], dtype=torch.int32, device=device)
    weights = torch.tensor([[2.0**24, 1.0, 1.0, -(2.0**24)]], device=device)
    assert moe_down(m, ids, weights, w2).tolist() == [[0.0] * 8]


def test_weights_apply_after_the_projection_and_only_once(device):
    """The sum is rounded once: 1 + 2^-8 and 1 - 2^-8 give 2 only when they are added before bfloat16."""
    m = torch.ones(1, 2, 1, dtype=BF16, device=device)
    w2 = torch.full((1, 4, 1), 1.0, dtype=BF16, device=device)
    weights = torch.tensor([[1 + 2.0**-8, 1 - 2.0**-8]], device=device)
    y = moe_down(m, torch.zeros(1, 2, dtype=torch.int32, device=device), weights, w2)
    assert y.tolist() == [[2.0] * 4]


@pytest.mark.parametrize("block_p", [2, 64])
def test_every_pick_is_served_whatever_the_order_of_ids(device, block_p):
    """Fault I20: 21 picks of 2 experts need several programs per expert; ids are searched in steps of 2 or at once."""
    args = Case(rows=7, experts=2, latent=16, inner=16, seed=3).down(device)
    config = ExpertConfig(block_n=16, block_c=16, split=1, stages=2, block_p=block_p)
    check_op("moe_down", lambda *a: _launch(config, *a), *args)


def test_a_row_has_the_same_bits_alone_and_among_others(device):
    m, ids, weights, w2 = Case(rows=4, experts=3, picks="distinct").down(device)
    together = moe_down(m, ids, weights, w2)
    for r in range(4):
        one = slice(r, r + 1)
        assert_same_bits(moe_down(m[one], ids[one], weights[one], w2)[0], together[r])


def test_a_nan_row_stays_alone(device):
    m, ids, weights, w2 = Case(rows=3, picks="one").down(device)
    want = moe_down(m, ids, weights, w2)
    m[1, 0] = NAN
    y = moe_down(m, ids, weights, w2)
    assert y[1].isnan().all()
    assert_same_bits(y[[0, 2]], want[[0, 2]])


def test_refuses_wrong_shapes(device):
    m, ids, weights, w2 = Case().down(device)
    with pytest.raises(ValueError, match="moe_down: w2"):
        moe_down(m, ids, weights, w2[..., :-1])
    with pytest.raises(ValueError, match="moe_down: topk_weights"):
        moe_down(m, ids, weights[:, :-1], w2)


KIMI_LINEAR = Case(top_k=8, experts=256, latent=2304, inner=1024, picks="distinct", dtype=BF16)


def few_experts(case: Case, device: str, experts: int) -> tuple:
    """Arguments at real dims whose picks fall on `experts` experts spread over the whole tensor; the others are NaN."""
    m, ids, weights, w2 = replace(case, experts=experts, top_k=min(case.top_k, experts)).down("cpu")
    spread = torch.arange(experts) * (case.experts - 1) // (experts - 1)
    full = torch.full((case.experts, *w2.shape[1:]), NAN, dtype=w2.dtype, device=device)
    full[spread.to(device)] = torch.nan_to_num(w2).to(device)
    return m.to(device), spread[ids.long()].int().to(device), weights.to(device), full


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 8, 32, 33])
@pytest.mark.parametrize("tp", [1, 8])
def test_real_shapes(rows, tp):
    case = replace(KIMI_LINEAR, rows=rows, inner=1024 // tp)
    check_op("moe_down", moe_down, *few_experts(case, "cuda", 12))


@pytest.mark.gpu
def test_weights_past_two_to_the_31_elements():
    """Fault I04 for weights: expert 1023 starts 2.4e9 elements into the tensor."""
    case = replace(KIMI_LINEAR, rows=2, experts=1024)
    check_op("moe_down", moe_down, *few_experts(case, "cuda", 8))
