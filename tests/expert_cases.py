"""Cases of the four routed-expert ops: dims, ids and weights; what is not picked or outside a view holds NaN."""

from dataclasses import dataclass

import torch
from cases import act_dtypes, fills, make, seeds, strided
from hypothesis import strategies as st

from kimi_kernels import mxfp4

NAN = float("nan")
NAN_SCALE = 255


@dataclass(frozen=True)
class Case:
    rows: int = 2
    top_k: int = 3
    experts: int = 4
    latent: int = 32  # Z
    inner: int = 16  # I
    picks: str = "any"  # "any": repeats and ids outside [0, E); "distinct": within a row; "one": all the same
    views: bool = False
    fill: str = "normal"
    seed: int = 0
    dtype: torch.dtype = torch.float32

    def ids(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        if self.picks == "distinct":
            rows = [torch.randperm(self.experts, generator=generator)[: self.top_k] for _ in range(self.rows)]
            return torch.stack(rows).int()
        low, high = (self.experts - 1, self.experts) if self.picks == "one" else (-1, self.experts + 1)
        return torch.randint(low, high, (self.rows, self.top_k), generator=generator, dtype=torch.int32)

    def gate_up(self, device: str) -> tuple:
        """x, topk_ids, w13"""
        x, ids, w13 = self._inputs(self.rows, self.latent), self.ids(), self._weights(2 * self.inner, self.latent)
        return self._place(device, x, ids, w13)

    def down(self, device: str) -> tuple:
        """m, topk_ids, topk_weights, w2"""
        m, ids = self._inputs(self.rows, self.top_k, self.inner), self.ids()
        weights = make(self.rows, self.top_k, seed=self.seed + 2, dtype=torch.float32)
        return self._place(device, m, ids, weights, self._weights(self.latent, self.inner))

    def _inputs(self, *shape: int) -> torch.Tensor:
        return make(*shape, fill=self.fill, seed=self.seed + 1, dtype=self.dtype)

    def _weights(self, outputs: int, inputs: int) -> torch.Tensor:
        w = make(self.experts, outputs, inputs, fill=self.fill, seed=self.seed + 3, dtype=self.dtype)
        w[[e for e in range(self.experts) if e not in self.ids()]] = NAN
        return w

    def _place(self, device: str, *tensors: torch.Tensor) -> tuple:
        moved = [t.to(device) for t in tensors]
        if not self.views:
            return tuple(moved)
        *moved, weights = moved
        views = [strided(t) if t.is_floating_point() else torch.stack([t, t - 7], -2)[..., 0, :] for t in moved]
        return (*views, strided(weights, 16, 16))


def quantized(args: tuple) -> tuple:
    """`args` with the last tensor, a weight, as packed codes and scales; its NaN become NaN scales."""
    *rest, weight = args
    packed, scale = mxfp4.quantize(torch.nan_to_num(weight.cpu()))
    scale[weight.cpu().isnan().all(-1)] = NAN_SCALE
    packed, scale = packed.to(weight.device), scale.to(weight.device)
    if weight.is_contiguous():
        return (*rest, packed, scale)
    wide = torch.full((*packed.shape[:-1], packed.shape[-1] + 20), 0x77, dtype=torch.uint8, device=packed.device)
    wide[..., 4 : 4 + packed.shape[-1]] = packed
    scales = torch.full((*scale.shape[:-1], scale.shape[-1] + 3), NAN_SCALE, dtype=torch.uint8, device=scale.device)
    scales[..., 1 : 1 + scale.shape[-1]] = scale
    return (*rest, wide[..., 4 : 4 + packed.shape[-1]], scales[..., 1 : 1 + scale.shape[-1]])


def cases(latents: tuple[int, ...], inners: tuple[int, ...]) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        rows=st.sampled_from((1, 2, 3)),
        top_k=st.sampled_from((1, 2, 3)),
        latent=st.sampled_from(latents),
        inner=st.sampled_from(inners),
        picks=st.sampled_from(("any", "distinct", "one")),
        views=st.booleans(),
        fill=fills,
        seed=seeds,
        dtype=act_dtypes,
    )
