"""Where in the model an op call sits: the layer and the part that own the weights it reads.

`decode_step` hands its ops tensors, no names. An op without weights (an activation, a residual add) belongs to the part
of the op before it.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kimi_kernels.weights import DenseWeights, KdaWeights, LayerWeights, ModelWeights

Tensor = torch.Tensor
PARTS = ("embed", "norm", "kda", "mla", "dense", "moe", "head")


@dataclass(frozen=True)
class Place:
    """`layer` is None outside the layers; part "norm" is the norm before a sublayer or the head, mixture included."""

    layer: int | None
    part: str

    def __str__(self) -> str:
        return self.part if self.layer is None else f"layer {self.layer} {self.part}"


class Locator:
    """Follows one run of `decode_step` over `weights`, call by call."""

    def __init__(self, weights: ModelWeights):
        self._weights = weights  # keeps the storages alive, whose ids are the keys below
        self._owners = {storage_id(tensor): place for place, tensor in placed_tensors(weights)}
        self._current = Place(None, "embed")

    def locate(self, args) -> Place:
        """The place of the next call, given its arguments."""
        for arg in args:
            if isinstance(arg, Tensor) and storage_id(arg) in self._owners:
                self._current = self._owners[storage_id(arg)]
        return self._current


def placed_tensors(weights: ModelWeights) -> Iterator[tuple[Place, Tensor]]:
    """Every weight tensor of the rank with its place."""
    yield Place(None, "embed"), weights.embed
    for layer in weights.layers:
        attention = "kda" if isinstance(layer.attn, KdaWeights) else "mla"
        mlp = "dense" if isinstance(layer.mlp, DenseWeights) else "moe"
        for part, owner in (("norm", layer), (attention, layer.attn), (mlp, layer.mlp)):
            for tensor in _tensors(owner):
                yield Place(layer.index, part), tensor
    if weights.output_res_weight is not None:
        yield Place(None, "norm"), weights.output_res_weight
    yield Place(None, "norm"), weights.final_norm
    yield Place(None, "head"), weights.lm_head


def _tensors(owner) -> Iterator[Tensor]:
    """Tensors of a weight dataclass, those of a nested one included, but not the sublayers of a layer."""
    for field in dataclasses.fields(owner):
        value = getattr(owner, field.name)
        if isinstance(value, Tensor):
            yield value
        elif dataclasses.is_dataclass(value) and not isinstance(owner, LayerWeights):
            yield from _tensors(value)


def storage_id(tensor: Tensor) -> int:
    """Identity of the memory that a tensor and its views share; meta tensors have one too."""
    return tensor.untyped_storage()._cdata
