"""moe_gate_up: cases against the reference, which program serves which picks, the known faults of expert routing."""

from dataclasses import replace

import pytest
import torch
from cases import make
from expert_cases import NAN, Case, cases
from hypothesis import example, given

from kimi_kernels.compare import assert_same_bits, check_op
from triton_ops._experts import ExpertConfig
from triton_ops.moe_gate_up import _launch, moe_gate_up

FP32, BF16 = torch.float32, torch.bfloat16


@given(cases(latents=(32, 40, 160), inners=(8, 16)))
@example(Case(rows=3, top_k=4, experts=2, latent=160, inner=20, picks="one", views=True, dtype=BF16))
def test_equals_the_reference(device, case):
    check_op("moe_gate_up", moe_gate_up, *case.gate_up(device))


def test_no_rows_give_an_empty_result(device):
    """Fault I19."""
    x, ids, w13 = Case().gate_up(device)
    gate_up = moe_gate_up(x[:0], ids[:0], w13)
    assert gate_up.shape == (0, ids.shape[1], w13.shape[1]) and gate_up.dtype == x.dtype


@pytest.mark.parametrize("experts", [16, 64, 256, 512, 513, 896, 1024])
def test_any_number_of_experts_up_to_the_last(device, experts):
    """Fault I22: no cap and no sentinel inside the ids; every expert but the picked ones is NaN."""
    case = Case(rows=1, top_k=16, experts=experts, latent=16, inner=4)
    x, _, w13 = case.gate_up(device)
    ids = torch.arange(experts - 16, experts, dtype=torch.int32, device=device).flip(0)[None]
    w13.fill_(NAN)[experts - 16 :] = make(16, 8, 16, seed=5, dtype=FP32, device=device)
    check_op("moe_gate_up", moe_gate_up, x, ids, w13)


def test_ids_outside_the_experts_give_zeros(device):
    """Fault N28: nothing outside the weights is read, and the other picks of the row keep their bits."""
    x, _, w13 = Case(rows=1, picks="distinct", experts=3).gate_up(device)
    ids = torch.tensor([[0, 1, 2, 1]], dtype=torch.int32, device=device)
    want = moe_gate_up(x, ids, w13)
    for bad in (-1, 3, -(2**31), 2**31 - 1):
        ids[0, 2] = bad
        gate_up = moe_gate_up(x, ids, w13)
        assert not gate_up[0, 2].any()
        assert_same_bits(gate_up[0, [0, 1, 3]], want[0, [0, 1, 3]])


@pytest.mark.parametrize("block_p", [2, 16, 64])
def test_every_pick_is_served_whatever_the_order_of_ids(device, block_p):
    """Fault I20: 21 picks of 2 experts need several programs per expert; ids are searched in steps of 2, 16 or all."""
    x, ids, w13 = Case(rows=7, experts=2, latent=16, inner=8, seed=3).gate_up(device)
    config = ExpertConfig(block_n=16, block_c=16, split=1, stages=2, block_p=block_p)
    check_op("moe_gate_up", lambda *args: _launch(config, *args), x, ids, w13)
    check_op("moe_gate_up", lambda *args: _launch(replace(config, block_r=4), *args), x, ids, w13)


def test_a_row_has_the_same_bits_alone_and_among_others(device):
    x, ids, w13 = Case(rows=4, experts=3, picks="distinct").gate_up(device)
    together = moe_gate_up(x, ids, w13)
    for r in range(4):
        assert_same_bits(moe_gate_up(x[r : r + 1], ids[r : r + 1], w13)[0], together[r])


def test_a_nan_row_stays_alone(device):
    """Rows that share an expert share a tile, but not their values."""
    x, ids, w13 = Case(rows=3, picks="one").gate_up(device)
    want = moe_gate_up(x, ids, w13)
    x[1] = NAN
    gate_up = moe_gate_up(x, ids, w13)
    assert gate_up[1].isnan().all()
    assert_same_bits(gate_up[[0, 2]], want[[0, 2]])


def test_refuses_wrong_shapes(device):
    x, ids, w13 = Case().gate_up(device)
    with pytest.raises(ValueError, match="moe_gate_up: w13"):
        moe_gate_up(x, ids, w13[..., :-1])
    with pytest.raises(TypeError, match="moe_gate_up: topk_ids must be int32"):
        moe_gate_up(x, ids.long(), w13)


KIMI_LINEAR = Case(top_k=8, experts=256, latent=2304, inner=1024, picks="distinct", dtype=BF16)


def few_experts(case: Case, device: str, experts: int) -> tuple:
    """Arguments at real dims whose picks fall on `experts` experts spread over the whole tensor; the others are NaN."""
    x, ids, w13 = replace(case, experts=experts, top_k=min(case.top_k, experts)).gate_up("cpu")
    spread = torch.arange(experts) * (case.experts - 1) // (experts - 1)
    full = torch.full((case.experts, *w13.shape[1:]), NAN, dtype=w13.dtype, device=device)
    full[spread.to(device)] = torch.nan_to_num(w13).to(device)
    return x.to(device), spread[ids.long()].int().to(device), full


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 8, 32, 33])
@pytest.mark.parametrize("tp", [1, 8])
def test_real_shapes(rows, tp):
    case = replace(KIMI_LINEAR, rows=rows, inner=1024 // tp)
    check_op("moe_gate_up", moe_gate_up, *few_experts(case, "cuda", 12))


@pytest.mark.gpu
def test_weights_past_two_to_the_31_elements():
    """Fault I04 for weights: expert 511 starts 2.4e9 elements into the tensor."""
    case = replace(KIMI_LINEAR, rows=2, experts=512)
    check_op("moe_gate_up", moe_gate_up, *few_experts(case, "cuda", 8))
