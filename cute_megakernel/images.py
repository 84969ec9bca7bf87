"""Weights in the form in which the ring reads them.

    tiles           [N, C] bfloat16: the weight itself, row by row
    paired tiles    the same; a tile takes its rows in turn from the two halves of a stacked [gate | up]
    absorb          [H, NOPE, L] -> its transposes [H, L, NOPE]
    expand          [H, V, L], each head's rows together
    heads           [H*K, F], all rows together: what a KDA head reads of it is one copy
    experts         [E, N, C] bfloat16: the weight itself; or MXFP4: [E, N/8, C/64, 272] bytes
    paired experts  bfloat16: the weight itself; MXFP4: the same with gate and up rows alternating

bfloat16 weights are not copied, but for absorb and expand (kv_b, 8 MB a layer of real size), and where rows are no
whole tiles (N in eights, of each half where paired), inputs no whole blocks (C in 32s) or rows do not begin at
multiples of 16 bytes: those get zeros to whole ones. MXFP4 stays at 4 bits: a block is 8 outputs by 64 inputs, 256
bytes of codes and 16 bytes of scales. `stages/tiles.py` decodes them.
"""

import torch

from cute_megakernel.recording import Weight, weight_paths
from kimi_kernels.mxfp4 import unpack
from kimi_kernels.weights import ModelWeights

Tensor = torch.Tensor
EXPERTS_AT_ONCE = 16  # MXFP4 codes take 4 bytes each, several times, on their way into blocks
MAX_SCALE = 253  # 2^(253 - 127): the decoder multiplies by a float of the exponent field scale + 1


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
        """The weight as it is, if it lies together at a multiple of 16 bytes, else a copy that does."""
        tensor = self.tensors[weight.path]
        if tensor.is_meta or (tensor.is_contiguous() and tensor.data_ptr() % 16 == 0):
            return tensor
        key = ("plain", weight.path)
        if key not in self._made:
            self._made[key] = tensor.clone(memory_format=torch.contiguous_format)
        return self._made[key]

    def image(self, kind: str, weight: Weight, scale: Weight | None = None) -> Tensor:
        key = (kind, weight.path, weight.start)
        if key not in self._made:
            tensor = self.tensors[weight.path]
            if tensor.ndim == 3 and tuple(weight.shape) != tuple(tensor.shape):  # part of kv_b
                row = weight.start // tensor.shape[2]
                tensor = tensor[:, row : row + weight.shape[1]]
            self._made[key] = image(kind, tensor, None if scale is None else self.tensors[scale.path])
        return self._made[key]


def whole_rows(weight: Tensor, halves: int = 1, together: bool = False) -> Tensor:
    """[..., N, C] bfloat16 itself where the ring can read it, else a copy with zeros to whole tiles and blocks.
    `together`: all of dim 0 must be one run of rows."""
    n, c = weight.shape[-2:]
    aligned = all(2 * stride % 16 == 0 for stride in weight.stride()[:-1]) and weight.stride(-1) == 1
    aligned = aligned and (weight.is_meta or weight.data_ptr() % 16 == 0)
    fits = n // halves % (8 // halves) == 0 and n % halves == 0 and c % 32 == 0
    if fits and aligned and (weight.is_contiguous() or not together):
        return weight
    parts = weight.chunk(halves, dim=-2)
    return torch.cat([_pad(part, 8 // halves, 32) for part in parts], dim=-2).contiguous()


def pair_rows(outputs: int) -> int:
    """Rows of a half of a stacked [gate | up] with so many outputs."""
    return -(-outputs // 8) * 4


def paired(weight: Tensor) -> Tensor:
    """Rows of [..., gate | up, C] alternately."""
    gate, up = weight.chunk(2, dim=-2)
    return torch.stack([gate, up], dim=-2).flatten(-3, -2)


def mxfp4_blocks(packed: Tensor, scale: Tensor) -> Tensor:
    """[..., N, C/2] codes and [..., N, C/32] scales -> [..., N/8, C/64, 272] uint8"""
    if (scale > MAX_SCALE).any():
        raise ImageError(f"MXFP4 scales above 2^{MAX_SCALE - 127} or NaN: got E8M0 code {int(scale.max())}")
    codes = _pad(unpack(packed), 8, 64)
    scales = _pad(scale + 1, 8, 2)
    *batch, n, c = codes.shape
    codes = codes.reshape(*batch, n // 8, 8, c // 64, 2, 4, 8)  # halves of a block, quads of a half
    words = mxfp4_words(codes.movedim(-4, -5).transpose(-2, -3))  # [..., N/8, C/64, 8, quad, half]
    bytes_ = words.reshape(*batch, n // 8, c // 64, 64).view(torch.uint8)
    pairs = scales.reshape(*batch, n // 8, 8, c // 64, 2).transpose(-3, -2).reshape(*batch, n // 8, c // 64, 16)
    return torch.cat([bytes_, pairs], dim=-1).contiguous()


def mxfp4_words(codes: Tensor) -> Tensor:
    """Eight codes of either half [..., 2, 8] -> an int32 of each [..., 2]: code 2p of pair p in its low half, code
    2p + 1 in its high half.

    In each half, pair p of 0, 1, 2 has its sign at bit 15 - 3p and its magnitude at bits 8 - 3p ... 6 - 3p. The last
    pairs share what is left of both words: that of the first word has its sign at bit 14 and the end of its magnitude
    at bit 13, that of the last word has them at bits 11 and 10 of the first, the rest of the magnitudes is at bits 14,
    13 and 11, 10 of the last.
    """
    codes = codes.to(torch.int32)
    sign, size = codes >> 3, codes & 7
    halves = []
    for odd in (0, 1):
        half = torch.zeros_like(codes[..., 0])
        for p in range(3):
            half |= (sign[..., 2 * p + odd] << (15 - 3 * p)) | (size[..., 2 * p + odd] << (6 - 3 * p))
        (s0, s1), (m0, m1) = sign[..., 6 + odd].unbind(-1), size[..., 6 + odd].unbind(-1)
        first = (s0 << 14) | ((m0 & 1) << 13) | (s1 << 11) | ((m1 & 1) << 10)
        last = ((m0 >> 1) << 13) | ((m1 >> 1) << 10)
        halves.append(half | torch.stack([first, last], dim=-1))
    return halves[0] | (halves[1] << 16)


def image(kind: str, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """The image of a weight, as a row of the table names it."""
    if kind.endswith("experts") and scale is not None:
        both = (paired(weight), paired(scale)) if kind.startswith("paired") else (weight, scale)
        parts = zip(*(part.split(EXPERTS_AT_ONCE) for part in both), strict=True)
        return torch.cat([mxfp4_blocks(*part) for part in parts])
    if kind in ("absorb", "expand", "heads"):
        return whole_rows(weight.transpose(-1, -2) if kind == "absorb" else weight, together=True)
    return whole_rows(weight, 2 if kind.startswith("paired") else 1)


def _pad(weight: Tensor, rows: int, columns: int) -> Tensor:
    n, c = weight.shape[-2:]
    if n % rows == 0 and c % columns == 0:
        return weight
    return torch.nn.functional.pad(weight, (0, -c % columns, 0, -n % rows))
