"""Weights in the order in which the ring reads them, made once at load.

    tiles           [N, C] bfloat16 -> [N/8, C/32, 8, 32]: a block is 8 outputs by 32 inputs, contiguous
    paired tiles    the same with rows g0, u0, g1, u1, ... of a stacked [gate | up]
    absorb          [H, NOPE, L] -> tiles of its transposes [H, L, NOPE]
    expand          [H, V, L] -> tiles of each head
    experts         [E, N, C] bfloat16 -> tiles of each expert; or MXFP4: [E, N/8, C/64, 272] bytes
    paired experts  the same with gate and up rows alternating

Rows and inputs are padded with zeros to whole blocks. MXFP4 stays at 4 bits: a block is 8 outputs by 64 inputs, 256
bytes of codes and 16 bytes of scales; in the code word of a lane the sign and magnitude of a pair sit three bits below
those of the pair before, so that a shift and a mask make two bfloat16 numbers (`stages/tiles.py` decodes them).
"""

import torch

from cute_megakernel.recording import Weight, weight_paths
from kimi_kernels.mxfp4 import unpack
from kimi_kernels.weights import ModelWeights

Tensor = torch.Tensor
MAX_SCALE = 128  # 2^(128 - 127): the decoder multiplies by 2^(scale - 1), a bfloat16


class ImageError(ValueError):
    """Weights that the megakernel cannot hold."""


class Images:
    """The weights of a rank as the kernel reads them; made on first use and shared by instances."""

    def __init__(self, weights: ModelWeights):
        self.weights = weights
        self.tensors = dict(weight_paths(weights))
        self.device = weights.embed.device
        self._made: dict[tuple, Tensor] = {}

    def plain(self, weight: Weight) -> Tensor:
        """The weight as it is."""
        return self.tensors[weight.path]

    def image(self, kind: str, weight: Weight, scale: Weight | None = None) -> Tensor:
        key = (kind, weight.path, weight.start)
        if key not in self._made:
            tensor = self.tensors[weight.path]
            if tensor.ndim == 3 and tuple(weight.shape) != tuple(tensor.shape):  # part of kv_b
                row = weight.start // tensor.shape[2]
                tensor = tensor[:, row : row + weight.shape[1]]
            self._made[key] = image(kind, tensor, None if scale is None else self.tensors[scale.path])
        return self._made[key]


def tiles(weight: Tensor) -> Tensor:
    """[..., N, C] bfloat16 -> [..., N/8, C/32, 8, 32]"""
    weight = _pad(weight, 8, 32)
    *batch, n, c = weight.shape
    return weight.reshape(*batch, n // 8, 8, c // 32, 32).transpose(-3, -2).contiguous()


def paired(weight: Tensor) -> Tensor:
    """Rows of [..., gate | up, C] alternately."""
    gate, up = weight.chunk(2, dim=-2)
    return torch.stack([gate, up], dim=-2).flatten(-3, -2)


def mxfp4_blocks(packed: Tensor, scale: Tensor) -> Tensor:
    """[..., N, C/2] codes and [..., N, C/32] scales -> [..., N/8, C/64, 272] uint8"""
    if (scale > MAX_SCALE).any():
        raise ImageError(f"MXFP4 scales above 2^{MAX_SCALE - 127} or NaN: got E8M0 code {int(scale.max())}")
    codes = _pad(unpack(packed), 8, 64)
    scales = _pad(scale, 8, 2)
    *batch, n, c = codes.shape
    words = mxfp4_words(codes.reshape(*batch, n, c // 8, 8))  # [..., N, C/8]
    words = words.reshape(*batch, n // 8, 8, c // 64, 2, 4)  # halves of a block, quads of a half
    words = words.movedim(-3, -4).transpose(-1, -2).contiguous()  # [..., N/8, C/64, 8, quad, half]
    bytes_ = words.reshape(*batch, n // 8, c // 64, 64).view(torch.uint8)
    pairs = scales.reshape(*batch, n // 8, 8, c // 64, 2).transpose(-3, -2).reshape(*batch, n // 8, c // 64, 16)
    return torch.cat([bytes_, pairs], dim=-1).contiguous()


def mxfp4_words(codes: Tensor) -> Tensor:
    """Eight codes [..., 8] -> one int32: code 2p of pair p in the low half, code 2p + 1 in the high half.

    In each half, pair p of 0, 1, 2 has its sign at bit 15 - 3p and its magnitude at bits 8 - 3p ... 6 - 3p; the last
    pair takes what is left: sign at bit 14, magnitude at bits 13, 11, 10.
    """
    codes = codes.to(torch.int32)
    sign, size = codes >> 3, codes & 7
    halves = []
    for odd in (0, 1):
        half = torch.zeros_like(codes[..., 0])
        for p in range(3):
            half |= (sign[..., 2 * p + odd] << (15 - 3 * p)) | (size[..., 2 * p + odd] << (6 - 3 * p))
        s, m = sign[..., 6 + odd], size[..., 6 + odd]
        halves.append(half | (s << 14) | ((m >> 2) << 13) | ((m & 3) << 10))
    return halves[0] | (halves[1] << 16)


def image(kind: str, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """The image of a weight, as a row of the table names it."""
    if kind.startswith("paired"):
        weight = paired(weight)
        scale = None if scale is None else paired(scale)
    if kind.endswith("experts") and scale is not None:
        return mxfp4_blocks(weight, scale)
    return tiles(weight.transpose(-1, -2) if kind == "absorb" else weight)


def _pad(weight: Tensor, rows: int, columns: int) -> Tensor:
    n, c = weight.shape[-2:]
    if n % rows == 0 and c % columns == 0:
        return weight
    return torch.nn.functional.pad(weight, (0, -c % columns, 0, -n % rows))
