"""moe_gate_up_mxfp4: all codes and scales through the kernel, cases against the reference, faults of MXFP4."""

from dataclasses import replace

import pytest
import torch
from cases import make
from expert_cases import NAN_SCALE, Case, cases, quantized
from hypothesis import example, given

from kimi_kernels import mxfp4
from kimi_kernels.compare import assert_same_bits, check_op, interpreted
from triton_ops._experts import ExpertConfig
from triton_ops.moe_gate_up_mxfp4 import _launch, moe_gate_up_mxfp4

FP32, BF16, U8 = torch.float32, torch.bfloat16, torch.uint8
CODES = torch.tensor(mxfp4.E2M1, dtype=torch.float64)


@given(cases(latents=(32, 96, 160), inners=(8, 16)))
@example(Case(rows=3, top_k=4, experts=2, latent=544, inner=20, picks="one", views=True, dtype=BF16))
def test_equals_the_reference(device, case):
    check_op("moe_gate_up_mxfp4", moe_gate_up_mxfp4, *quantized(case.gate_up(device)))


def one_expert(device: str, codes: torch.Tensor, scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Outputs [R, N] of one expert with `codes` [N, C] and `scale` [N, C/32] for rows x [R, C]."""
    ids = torch.zeros(x.shape[0], 1, dtype=torch.int32, device=device)
    packed, scale = mxfp4.pack(codes.to(U8))[None].to(device), scale.to(U8)[None].to(device)
    # the block of a large batch: fewer programs for the interpreter
    config = ExpertConfig(block_n=64, block_c=64, split=1, stages=3, block_p=32)
    return _launch(config, x.to(device), ids, packed, scale)[:, 0].cpu()


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_every_code_times_every_scale_is_exact(device, dtype):
    """Faults N18, N20, N21: row n has scale byte n; column c holds code c; row r of x picks column r.

    Byte 0 is 2^-127 and not flushed, 0.5 is right, the low nibble is the even column, and 255 is NaN for its row only.
    """
    codes = torch.arange(32).remainder(16).expand(256, 32)
    scale = torch.arange(256)[:, None]
    y = one_expert(device, codes, scale, torch.eye(16, 32, dtype=dtype))
    want = (CODES[:, None] * torch.exp2(torch.arange(256, dtype=torch.float64) - 127)).to(dtype)
    # the interpreter has no subnormal bfloat16
    first = 2 if interpreted() and dtype == BF16 else 0
    assert y[:, 255].isnan().all()
    assert torch.equal(y[:, first:255], want[:, first:255])


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_products_are_right_wherever_they_are_finite(device, dtype):
    """Fault N18: 2^100 times the smallest scales and 2^-100 times the largest, whose weights alone would overflow."""
    codes = torch.arange(32).remainder(16).expand(4, 32)
    for exponent, bytes_ in ((100, (0, 1, 2, 126)), (-100, (127, 250, 253, 254))):
        scale = torch.tensor(bytes_)[:, None]
        y = one_expert(device, codes, scale, torch.eye(16, 32, dtype=dtype) * 2.0**exponent)
        want = CODES[:, None] * torch.exp2(scale[:, 0].double() - 127 + exponent)
        assert torch.equal(y, want.to(dtype))


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_scales_of_all_sizes_meet_in_one_row(device, dtype):
    """Each group's inputs undo its scale, so that all groups count alike: an exact integer sum."""
    scale = torch.tensor([0, 1, 60, 127, 128, 129, 190, 250, 251, 253])
    codes = torch.randint(0, 16, (4, 320), generator=torch.Generator().manual_seed(0))
    x = torch.exp2(127.0 - scale.double()).clamp(min=2.0**-126).repeat_interleave(32)[None].to(dtype)
    y = one_expert(device, codes, scale.expand(4, 10), x)
    want = CODES[codes] * torch.exp2(scale.double() - 127).repeat_interleave(32) * x.double()
    assert torch.equal(y[0], want.sum(-1).to(dtype))


def test_low_nibble_is_the_even_column(device):
    """Fault N21: byte i holds code i in its low nibble and 15 - i in its high nibble."""
    packed = torch.arange(16, dtype=U8) | (15 - torch.arange(16, dtype=U8) << 4)
    x, ids = torch.eye(32, device=device), torch.zeros(32, 1, dtype=torch.int32, device=device)
    scale = torch.full((1, 2, 1), 127, dtype=U8, device=device)
    y = moe_gate_up_mxfp4(x, ids, packed.expand(1, 2, 16).contiguous().to(device), scale)[:, 0, 0].cpu()
    assert y[0::2].tolist() == list(mxfp4.E2M1) and y[1::2].tolist() == list(reversed(mxfp4.E2M1))


def test_a_nan_scale_stays_in_its_block(device):
    """Fault N18: the group's row of outputs is NaN, all other outputs keep their bits."""
    x, ids, packed, scale = quantized(Case(rows=3, picks="one", latent=96).gate_up(device))
    want = moe_gate_up_mxfp4(x, ids, packed, scale)
    scale[:, 5, 1] = NAN_SCALE
    gate_up = moe_gate_up_mxfp4(x, ids, packed, scale)
    assert gate_up[..., 5].isnan().all()
    others = [n for n in range(gate_up.shape[-1]) if n != 5]
    assert_same_bits(gate_up[..., others], want[..., others])


def test_no_rows_give_an_empty_result(device):
    """Fault I19."""
    x, ids, packed, scale = quantized(Case().gate_up(device))
    gate_up = moe_gate_up_mxfp4(x[:0], ids[:0], packed, scale)
    assert gate_up.shape == (0, ids.shape[1], packed.shape[1]) and gate_up.dtype == x.dtype


@pytest.mark.parametrize("experts", [513, 1024])
def test_any_number_of_experts_up_to_the_last(device, experts):
    """Fault I22: no cap and no sentinel inside the ids; every expert but the picked ones has NaN scales."""
    x, _, w13 = Case(rows=1, top_k=16, experts=16, latent=32, inner=4, picks="distinct").gate_up(device)
    packed = torch.full((experts, 8, 16), 0x77, dtype=U8, device=device)
    scale = torch.full((experts, 8, 1), NAN_SCALE, dtype=U8, device=device)
    packed[experts - 16 :], scale[experts - 16 :] = mxfp4.quantize(w13)
    ids = torch.arange(experts - 16, experts, dtype=torch.int32, device=device).flip(0)[None]
    check_op("moe_gate_up_mxfp4", moe_gate_up_mxfp4, x, ids, packed, scale)


def test_ids_outside_the_experts_give_zeros(device):
    """Fault N28."""
    x, _, packed, scale = quantized(Case(rows=1, picks="distinct", experts=3).gate_up(device))
    for bad in (-1, 3, -(2**31), 2**31 - 1):
        ids = torch.tensor([[0, bad, 2]], dtype=torch.int32, device=device)
        assert not moe_gate_up_mxfp4(x, ids, packed, scale)[0, 1].any()


@pytest.mark.parametrize("split", [1, 2, 4])
def test_every_pick_is_served_and_every_input_counted(device, split):
    """Fault I20: 21 picks of 2 experts in several programs; 160 inputs are not a multiple of any step."""
    case = Case(rows=7, experts=2, latent=160, inner=8, seed=3)
    config = ExpertConfig(block_n=16, block_c=64, split=split, stages=2, block_p=4)
    check_op("moe_gate_up_mxfp4", lambda *args: _launch(config, *args), *quantized(case.gate_up(device)))


def test_a_row_has_the_same_bits_alone_and_among_others(device):
    x, ids, packed, scale = quantized(Case(rows=4, experts=3, picks="distinct").gate_up(device))
    together = moe_gate_up_mxfp4(x, ids, packed, scale)
    for r in range(4):
        assert_same_bits(moe_gate_up_mxfp4(x[r : r + 1], ids[r : r + 1], packed, scale)[0], together[r])


def test_refuses_wrong_shapes_and_unaligned_weights(device):
    x, ids, packed, scale = quantized(Case().gate_up(device))
    with pytest.raises(ValueError, match="moe_gate_up_mxfp4: w13_scale"):
        moe_gate_up_mxfp4(x, ids, packed, scale[:, :-2])
    wide = torch.zeros(*packed.shape[:-1], packed.shape[-1] + 2, dtype=U8, device=device)
    with pytest.raises(ValueError, match="moe_gate_up_mxfp4: w13_packed must have rows that start at multiples of 4"):
        moe_gate_up_mxfp4(x, ids, wide[..., 2:], scale)


K3 = Case(top_k=16, experts=896, latent=3584, inner=384, picks="distinct", dtype=BF16)


def random_weights(experts: int, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales as in a checkpoint: all codes, scale bytes 112 ... 124."""
    generator = torch.Generator("cuda").manual_seed(0)
    like = dict(dtype=U8, device="cuda", generator=generator)
    packed = torch.randint(0, 256, (experts, outputs, inputs // 2), **like)
    return packed, torch.randint(112, 125, (experts, outputs, inputs // 32), **like)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 8, 32, 33])
@pytest.mark.parametrize("tp", [8, 16, 32])
def test_real_shapes(rows, tp):
    case = replace(K3, rows=rows)
    x, ids = make(rows, case.latent, seed=1, device="cuda"), case.ids().cuda()
    check_op("moe_gate_up_mxfp4", moe_gate_up_mxfp4, x, ids, *random_weights(case.experts, 2 * 3072 // tp, case.latent))


@pytest.mark.gpu
def test_rows_that_share_all_experts():
    """33 rows of one choice of experts: five programs per expert and tile."""
    x, ids = make(33, K3.latent, seed=1, device="cuda"), replace(K3, rows=1).ids().expand(33, 16).contiguous().cuda()
    check_op("moe_gate_up_mxfp4", moe_gate_up_mxfp4, x, ids, *random_weights(K3.experts, 768, K3.latent))


@pytest.mark.gpu
def test_weights_past_two_to_the_31_bytes():
    """Fault I04 for weights: 896 unsharded experts are 9.9e9 bytes."""
    x, ids = make(2, K3.latent, seed=1, device="cuda"), torch.tensor([[895, 3], [895, 894]], dtype=torch.int32).cuda()
    check_op("moe_gate_up_mxfp4", moe_gate_up_mxfp4, x, ids, *random_weights(K3.experts, 6144, K3.latent))


@pytest.mark.gpu
def test_a_row_of_k3_has_the_same_bits_in_any_batch():
    """Tile sizes change with the number of rows, the order of the sum does not."""
    x, ids = make(64, K3.latent, seed=1, device="cuda"), replace(K3, rows=64).ids().cuda()
    weights = random_weights(K3.experts, 768, K3.latent)
    together = moe_gate_up_mxfp4(x, ids, *weights)
    for rows in (1, 2, 8, 32):
        assert_same_bits(moe_gate_up_mxfp4(x[:rows], ids[:rows], *weights), together[:rows])


@pytest.mark.gpu
@pytest.mark.parametrize("byte", [128, 129, 200, 251])
def test_large_scales_change_nothing_else(byte):
    """A block that is computed again, because one row has a large scale, gives the other rows the same bits."""
    x, ids = make(2, K3.latent, seed=1, device="cuda"), replace(K3, rows=2).ids().cuda()
    packed, scale = random_weights(K3.experts, 768, K3.latent)
    want = moe_gate_up_mxfp4(x, ids, packed, scale)
    scale[:, 100, 7] = byte
    got = moe_gate_up_mxfp4(x, ids, packed, scale)
    others = [n for n in range(768) if n != 100]
    assert_same_bits(got[..., others], want[..., others])
    check_op("moe_gate_up_mxfp4", moe_gate_up_mxfp4, x, ids, packed, scale)
    assert not torch.equal(got[..., 100], want[..., 100])
