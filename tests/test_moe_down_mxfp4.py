"""moe_down_mxfp4: codes and scales through the kernel, tensor-parallel shards, cases against the reference, faults."""

from dataclasses import replace

import pytest
import torch
from cases import make
from expert_cases import NAN_SCALE, Case, cases, quantized
from hypothesis import example, given

from kimi_kernels import mxfp4
from kimi_kernels.compare import assert_same_bits, check_op
from triton_ops._experts import ExpertConfig
from triton_ops.moe_down_mxfp4 import _launch, moe_down_mxfp4

FP32, BF16, U8 = torch.float32, torch.bfloat16, torch.uint8
CODES = torch.tensor(mxfp4.E2M1, dtype=torch.float64)


@given(cases(latents=(16, 40), inners=(32, 96)))
@example(Case(rows=3, top_k=4, experts=2, latent=24, inner=192, picks="one", views=True, dtype=BF16))
def test_equals_the_reference(device, case):
    check_op("moe_down_mxfp4", moe_down_mxfp4, *quantized(case.down(device)))


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_every_code_times_small_and_large_scales_is_exact(device, dtype):
    """Faults N18, N20, N21: output n has a scale byte of its own, column c holds code c, row r of m picks column r."""
    scale = torch.tensor([2, 3, 60, 66, 103, 112, 126, 127, 128, 129, 134, 200, 249, 250, 251, 252])
    codes = torch.arange(32).remainder(16).expand(1, 16, 32)
    m, ids = torch.eye(16, 32, dtype=dtype)[:, None].to(device), torch.zeros(16, 1, dtype=torch.int32, device=device)
    ones = torch.ones(16, 1, device=device)
    y = moe_down_mxfp4(m, ids, ones, mxfp4.pack(codes.to(U8)).to(device), scale.to(U8)[None, :, None].to(device))
    want = CODES[:, None] * torch.exp2(scale.double() - 127)
    assert torch.equal(y.cpu(), want.to(dtype))


@pytest.mark.parametrize("inner, shard", [(384, 192), (384, 96), (192, 32)])
def test_shards_add_up_to_the_whole(device, inner, shard):
    """Fault I23: shards of a size that is no multiple of a step; integers and scales 1 to 4 make sums exact."""
    generator = torch.Generator().manual_seed(0)
    m = torch.randint(-3, 4, (2, 2, inner), generator=generator).float().to(device)
    packed = torch.randint(0, 256, (3, 16, inner // 2), generator=generator, dtype=U8).to(device)
    scale = torch.randint(127, 130, (3, 16, inner // 32), generator=generator, dtype=U8).to(device)
    ids = torch.tensor([[2, 0], [1, 2]], dtype=torch.int32, device=device)
    weights = torch.tensor([[0.5, 0.25], [1.0, 2.0]], device=device)
    total = sum(
        moe_down_mxfp4(
            m[..., i : i + shard],
            ids,
            weights,
            packed[..., i // 2 : (i + shard) // 2],
            scale[..., i // 32 : (i + shard) // 32],
        )
        for i in range(0, inner, shard)
    )
    assert torch.equal(total, moe_down_mxfp4(m, ids, weights, packed, scale))


def test_no_rows_give_an_empty_result(device):
    """Fault I19."""
    m, ids, weights, packed, scale = quantized(Case(inner=32).down(device))
    y = moe_down_mxfp4(m[:0], ids[:0], weights[:0], packed, scale)
    assert y.shape == (0, packed.shape[1]) and y.dtype == m.dtype


@pytest.mark.parametrize("experts", [513, 1024])
def test_any_number_of_experts_up_to_the_last(device, experts):
    """Fault I22: no cap and no sentinel inside the ids; every expert but the picked ones has NaN scales."""
    m, _, weights, w2 = Case(rows=1, top_k=16, experts=16, latent=8, inner=32, picks="distinct").down(device)
    packed = torch.full((experts, 8, 16), 0x77, dtype=U8, device=device)
    scale = torch.full((experts, 8, 1), NAN_SCALE, dtype=U8, device=device)
    packed[experts - 16 :], scale[experts - 16 :] = mxfp4.quantize(w2)
    ids = torch.arange(experts - 16, experts, dtype=torch.int32, device=device).flip(0)[None]
    check_op("moe_down_mxfp4", moe_down_mxfp4, m, ids, weights, packed, scale)


def test_ids_outside_the_experts_add_nothing(device):
    """Fault N28."""
    m, _, weights, packed, scale = quantized(Case(rows=1, picks="distinct", experts=3, inner=32).down(device))
    weights[0, 1] = 0
    want = moe_down_mxfp4(m, torch.tensor([[0, 1, 2]], dtype=torch.int32, device=device), weights, packed, scale)
    weights[0, 1] = 3.0
    for bad in (-1, 3, -(2**31), 2**31 - 1):
        ids = torch.tensor([[0, bad, 2]], dtype=torch.int32, device=device)
        assert_same_bits(moe_down_mxfp4(m, ids, weights, packed, scale), want)


def test_every_pick_is_served_whatever_the_order_of_ids(device):
    """Fault I20: 21 picks of 2 experts need several programs per expert; ids are searched in steps of 4."""
    config = ExpertConfig(block_n=16, block_c=64, split=1, stages=2, block_p=4)
    args = quantized(Case(rows=7, experts=2, latent=16, inner=96, seed=3).down(device))
    check_op("moe_down_mxfp4", lambda *a: _launch(config, *a), *args)


def test_a_row_has_the_same_bits_alone_and_among_others(device):
    m, ids, weights, packed, scale = quantized(Case(rows=4, experts=3, picks="distinct", inner=32).down(device))
    together = moe_down_mxfp4(m, ids, weights, packed, scale)
    for r in range(4):
        one = slice(r, r + 1)
        assert_same_bits(moe_down_mxfp4(m[one], ids[one], weights[one], packed, scale)[0], together[r])


def test_refuses_wrong_shapes_and_unaligned_weights(device):
    m, ids, weights, packed, scale = quantized(Case(inner=32).down(device))
    with pytest.raises(ValueError, match="moe_down_mxfp4: w2_scale"):
        moe_down_mxfp4(m, ids, weights, packed, scale[:, :-1])
    wide = torch.zeros(*packed.shape[:-1], packed.shape[-1] + 2, dtype=U8, device=device)
    with pytest.raises(ValueError, match="moe_down_mxfp4: w2_packed must have rows that start at multiples of 4"):
        moe_down_mxfp4(m, ids, weights, wide[..., 2:], scale)


K3 = Case(top_k=16, experts=896, latent=3584, inner=384, picks="distinct", dtype=BF16)


def k3_args(rows: int, inner: int) -> tuple:
    """Inputs, picks and weights at real dims: all codes, scale bytes 112 ... 124 as in a checkpoint."""
    generator = torch.Generator("cuda").manual_seed(0)
    like = dict(dtype=U8, device="cuda", generator=generator)
    packed = torch.randint(0, 256, (K3.experts, K3.latent, inner // 2), **like)
    scale = torch.randint(112, 125, (K3.experts, K3.latent, inner // 32), **like)
    m = make(rows, K3.top_k, inner, seed=1, device="cuda")
    weights = make(rows, K3.top_k, seed=2, dtype=FP32, device="cuda")
    return m, replace(K3, rows=rows).ids().cuda(), weights, packed, scale


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 8, 32, 33])
@pytest.mark.parametrize("tp", [8, 16, 32])
def test_real_shapes(rows, tp):
    check_op("moe_down_mxfp4", moe_down_mxfp4, *k3_args(rows, 3072 // tp))


@pytest.mark.gpu
def test_weights_past_two_to_the_31_bytes():
    """Fault I04 for weights: 896 unsharded experts are 4.9e9 bytes."""
    m, ids, weights, packed, scale = k3_args(2, 3072)
    ids[:, 3] = K3.experts - 1
    check_op("moe_down_mxfp4", moe_down_mxfp4, m, ids, weights, packed, scale)


@pytest.mark.gpu
def test_a_row_of_k3_has_the_same_bits_in_any_batch():
    """Tile sizes change with the number of rows, the order of the sums does not."""
    m, ids, weights, packed, scale = k3_args(64, 384)
    together = moe_down_mxfp4(m, ids, weights, packed, scale)
    for rows in (1, 2, 8, 32):
        y = moe_down_mxfp4(m[:rows], ids[:rows], weights[:rows], packed, scale)
        assert_same_bits(y, together[:rows])
