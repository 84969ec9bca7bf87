"""Random weights as `Images` hands them out: a whole model to time, MXFP4 experts made as blocks at once.

    kernel = Megakernel(config, RandomImages(meta_weights(whole, tp), generator), state)

Values keep the step finite and its router undecided, as `bench_inputs` describes; padding is random too, which the
zeros of the input make harmless.
"""

import torch

from cute_megakernel.megakernel import Images
from cute_megakernel.recording import Weight
from kimi_kernels.bench_inputs import random_tensor
from kimi_kernels.config import MXFP4_GROUP
from kimi_kernels.weights import ModelWeights

Tensor = torch.Tensor
SCALES_AT = 256  # of the 272 bytes of an MXFP4 block


class RandomImages(Images):
    """`weights` have no data; images and plain weights are made on the device of `generator`, on first use."""

    def __init__(self, weights: ModelWeights, generator: torch.Generator):
        super().__init__(weights)
        self.device, self._generator = generator.device, generator
        self._random: dict[tuple, Tensor] = {}

    def plain(self, weight: Weight) -> Tensor:
        key = ("plain", weight.path)
        if key not in self._random:
            self._random[key] = random_tensor(weight.path.split(".")[-1], self.tensors[weight.path], self._generator)
        return self._random[key]

    def image(self, kind: str, weight: Weight, scale: Weight | None = None) -> Tensor:
        key = (kind, weight.path, weight.start)
        if key not in self._random:
            self._random[key] = self._bfloat16(kind, weight) if scale is None else self._mxfp4(weight, scale)
        return self._random[key]

    def _bfloat16(self, kind: str, weight: Weight) -> Tensor:
        meta = super().image(kind, weight)
        inputs = weight.shape[-2] if kind == "absorb" else weight.shape[-1]
        made = torch.empty(meta.shape, dtype=meta.dtype, device=self.device)
        return made.normal_(0.0, inputs**-0.5, generator=self._generator)

    def _mxfp4(self, weight: Weight, scale: Weight) -> Tensor:
        *batch, outputs, packed = weight.shape
        shape = (*batch, -(-outputs // 8), -(-2 * packed // 64), 272)
        made = torch.randint(0, 256, shape, dtype=torch.uint8, device=self.device, generator=self._generator)
        like = torch.empty(shape[-1] - SCALES_AT, 2 * packed // MXFP4_GROUP, dtype=torch.uint8, device="meta")
        made[..., SCALES_AT:] = random_tensor("scale", like, self._generator)[:, 0] + 1
        return made
