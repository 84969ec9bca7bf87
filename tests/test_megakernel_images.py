"""Images decode back to the weights, bit for bit. The decoder here follows the layout documented in `images.py` and
shares no code with it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cute_megakernel.images import MAX_SCALE, ImageError, image, mxfp4_blocks, pair_rows, paired
from cute_megakernel.lowering import lower
from cute_megakernel.megakernel import Images
from cute_megakernel.recording import Weight, record_local_step
from kimi_kernels.checkpoint import load_weights
from kimi_kernels.compare import assert_same_bits
from kimi_kernels.mini import make_mini

BF16 = torch.bfloat16
seeds = st.integers(0, 2**32 - 1)
small = st.integers(1, 70)


def bits(shape, seed: int) -> torch.Tensor:
    """Every bfloat16 pattern may occur, NaN and infinities included."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16).view(BF16)


def from_rows(held: torch.Tensor, n: int, c: int, halves: int = 1) -> torch.Tensor:
    """[..., N, C] of rows that end in zeros: whole tiles of 8 outputs, taken from each half in turn, and 32 inputs."""
    part = held.shape[-2] // halves
    assert part * halves == held.shape[-2] and part % (8 // halves) == 0 and held.shape[-1] % 32 == 0
    assert held.stride(-1) == 1 and all(2 * stride % 16 == 0 for stride in held.stride()[:-1])
    parts = held.unflatten(-2, (halves, part))
    padding = parts.clone().view(torch.int16)
    padding[..., : n // halves, :c] = 0
    assert not padding.any()
    return parts[..., : n // halves, :c].flatten(-3, -2)


def from_mxfp4(image_bytes: torch.Tensor, n: int, c: int) -> tuple[torch.Tensor, torch.Tensor]:
    """-> codes [..., N, C] and scales [..., N, C/32] of [..., N/8, C/64, 272] bytes."""
    assert image_bytes.is_contiguous() and image_bytes.shape[-1] == 272
    raw = image_bytes[..., :256].long().unflatten(-1, (8, 4, 2, 4))  # output, quad, half, byte
    words = sum(raw[..., b] << (8 * b) for b in range(4))  # [..., N/8, C/64, 8, quad, half]
    codes = torch.zeros(*words.shape, 8, dtype=torch.uint8)
    first, last = words.unbind(-1)
    for place in range(8):
        pair, odd = divmod(place, 2)
        if pair < 3:
            half = words >> (16 * odd)
            codes[..., place] = (half >> (15 - 3 * pair) & 1) << 3 | half >> (6 - 3 * pair) & 7
        else:
            low, high = first >> (16 * odd), last >> (16 * odd)
            codes[..., 0, place] = (low >> 14 & 1) << 3 | (high >> 13 & 3) << 1 | low >> 13 & 1
            codes[..., 1, place] = (low >> 11 & 1) << 3 | (high >> 10 & 3) << 1 | low >> 10 & 1
    codes = codes.transpose(-2, -3).flatten(-3)  # [..., N/8, C/64, 8, 64]
    codes = codes.transpose(-2, -3).flatten(-2).flatten(-3, -2)
    scales = image_bytes[..., 256:].unflatten(-1, (8, 2)).transpose(-2, -3).flatten(-2).flatten(-3, -2)
    padding = codes.clone()
    padding[..., :n, :c] = 0
    assert not padding.any()
    return codes[..., :n, :c], scales[..., :n, : -(-c // 32)] - 1


@given(n=small, c=small, batch=st.integers(1, 3), seed=seeds)
def test_rows_hold_the_weight(n, c, batch, seed):
    weight = bits((batch, n, c), seed)
    assert_same_bits(from_rows(image("expand", weight), n, c), weight)
    assert_same_bits(from_rows(image("tiles", weight[0]), n, c), weight[0])
    assert_same_bits(from_rows(image("experts", weight), n, c), weight)


@given(n=small, c=small, heads=st.integers(1, 3), seed=seeds)
def test_absorb_is_the_transpose_of_each_head(n, c, heads, seed):
    weight = bits((heads, n, c), seed)
    held = image("absorb", weight)
    assert held.is_contiguous()
    assert_same_bits(from_rows(held, c, n).transpose(-1, -2), weight)


@given(n=small, c=small, seed=seeds)
def test_halves_of_pairs_are_whole_tiles_each(n, c, seed):
    weight = bits((2 * n, c), seed)
    held = image("paired tiles", weight)
    assert held.shape[-2] == 2 * pair_rows(2 * n)
    assert_same_bits(from_rows(held, 2 * n, c, halves=2), weight)


@given(n=st.integers(1, 6), c=st.integers(1, 4), extra=st.integers(0, 3), first=st.integers(0, 5), seed=seeds)
def test_whole_tiles_are_not_copied(n, c, extra, first, seed):
    """Rows of a larger matrix, and experts of a larger stack."""
    whole = bits((3, 8 * (n + first), 32 * c + 8 * extra), seed)
    for kind, part in (("tiles", whole[1, 8 * first :, : 32 * c]), ("paired experts", whole[:, 8 * first :, : 32 * c])):
        held = image(kind, part)
        assert held.data_ptr() == part.data_ptr() and held.stride() == part.stride(), kind
    odd = whole.flatten()[4:].as_strided((8, 32), (32 * c + 8 * extra, 1))
    assert odd.data_ptr() % 16 == 8 and image("tiles", odd).data_ptr() % 16 == 0
    assert_same_bits(image("tiles", odd), odd)


def random_mxfp4(shape: tuple, seed: int, high: int = MAX_SCALE + 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [..., N, C], packed and scales."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, high, (*shape[:-1], shape[-1] // 32), generator=generator, dtype=torch.uint8)
    return codes, codes[..., 0::2] | codes[..., 1::2] << 4, scales


@given(experts=st.integers(1, 3), n=small, groups=st.integers(1, 5), seed=seeds)
def test_mxfp4_blocks_hold_codes_and_scales(experts, n, groups, seed):
    codes, packed, scales = random_mxfp4((experts, n, 32 * groups), seed)
    found, found_scales = from_mxfp4(image("experts", packed, scales), n, 32 * groups)
    assert_same_bits(found, codes, "codes")
    assert_same_bits(found_scales, scales, "scales")


@given(n=small, groups=st.integers(1, 3), seed=seeds)
def test_paired_experts_alternate_codes_and_scales(n, groups, seed):
    codes, packed, scales = random_mxfp4((1, 2 * n, 32 * groups), seed)
    found, found_scales = from_mxfp4(image("paired experts", packed, scales), 2 * n, 32 * groups)
    for part, whole in ((found, codes), (found_scales, scales)):
        assert_same_bits(part[:, 0::2], whole[:, :n], "gate")
        assert_same_bits(part[:, 1::2], whole[:, n:], "up")


def test_every_code_at_every_place_of_a_word():
    for place in range(8):
        codes = torch.zeros(16, 32, dtype=torch.uint8)
        codes[:, place] = torch.arange(16)
        packed = codes[:, 0::2] | codes[:, 1::2] << 4
        found, _ = from_mxfp4(mxfp4_blocks(packed, torch.full((16, 1), 120, dtype=torch.uint8)), 16, 32)
        assert_same_bits(found, codes)


@given(scale=st.integers(MAX_SCALE + 1, 255), at=st.integers(0, 7))
def test_scales_that_the_decoder_cannot_hold_are_refused(scale, at):
    _, packed, scales = random_mxfp4((8, 32), 0)
    scales[at, 0] = scale
    with pytest.raises(ImageError, match=rf"above 2\^126 or NaN: got E8M0 code {scale}"):
        image("experts", packed, scales)


@pytest.mark.parametrize("family", ("k3", "kimi-linear"))
def test_the_images_of_a_whole_model_are_its_weights(family, tmp_path):
    """Parts of kv_b included, which the absorb and expand rows read."""
    config = make_mini(tmp_path / family, family, seed=4)
    weights = load_weights(tmp_path / family, config, progress=False)
    images = Images(weights)
    rows = [row for row in lower(record_local_step(config, weights, 1), 1 << 20, 132) if "image" in row.args]
    assert {row.args["image"] for row in rows} >= {"tiles", "paired tiles", "absorb", "expand", "paired experts"}
    for row in rows:
        kind, weight, scale = row.args["image"], row.args["weight"], row.args.get("scale")
        made = images.image(kind, weight, scale)
        assert made is images.image(kind, weight, scale), "made once"
        plain = read(images, weight)
        n, c = plain.shape[-2:]
        if scale is not None:
            plain = paired(plain) if kind.startswith("paired") else plain
            codes = torch.stack([plain & 15, plain >> 4], dim=-1).flatten(-2)
            assert_same_bits(from_mxfp4(made, n, 2 * c)[0], codes, row.name)
        elif kind == "absorb":
            assert_same_bits(from_rows(made, c, n).transpose(-1, -2), plain, row.name)
        else:
            halves = 2 if kind.startswith("paired") else 1
            assert_same_bits(from_rows(made, n, c, halves), plain, row.name)


def read(images: Images, weight: Weight) -> torch.Tensor:
    """The part of the weight that the row reads."""
    whole = images.plain(weight)
    size = weight.shape
    if len(size) == 3:
        return whole.flatten()[weight.start :].as_strided(size, whole.stride(), weight.start)
    return whole.flatten()[weight.start : weight.start + size[0] * size[1]].reshape(size)
