"""Random inputs for the cases of `bench_cases`, in the layout that the step gives them. Never zero:

weights            N(0, 1) / sqrt(last dim), norm weights N(1, 0.1), MXFP4 codes uniform with scales of that spread
activations        N(0, 1); state and caches too
log_decay, beta    -5 sigmoid(N(0, 1)), sigmoid(N(0, 1)); A_log = log U(1, 16)
topk_ids           top_k distinct experts per row, rows independent; slots and pages in random order
"""

import math
from collections.abc import Callable

import torch

from kimi_kernels.bench_cases import Case
from kimi_kernels.config import MXFP4_GROUP
from kimi_kernels.op_specs import OPS

Tensor = torch.Tensor
DISTRIBUTION = (
    "random: weights N(0,1)/sqrt(last dim), activations and state N(0,1), experts uniform without repetition per row"
)
E2M1_RMS = math.sqrt(8.5625)  # of uniformly random codes


def input_sets(case: Case, context: int, generator: torch.Generator, count: int | None = None) -> list[tuple]:
    """`count` (`case.sets`) argument tuples on the device of `generator`, each with data of its own."""
    return [random_args(case, context, generator) for _ in range(case.sets if count is None else count)]


def random_args(case: Case, context: int, generator: torch.Generator) -> tuple:
    """One argument tuple with the layout of `case.args`."""

    def draw(name: str, value):
        if isinstance(value, list):
            return [random_tensor(name, tensor, generator) for tensor in value]
        if not isinstance(value, Tensor):
            return value
        if name in _INDICES:
            return _INDICES[name](value, case.call.dims, context, generator)
        return random_tensor(name, value, generator)

    return tuple(draw(name, value) for name, value in zip(OPS[case.op].args, case.args, strict=True))


def random_tensor(name: str, like: Tensor, generator: torch.Generator) -> Tensor:
    """Random values fit for an argument or weight `name`, with the layout and dtype of the meta tensor `like`."""
    last = sum((n - 1) * stride for n, stride in zip(like.shape, like.stride(), strict=True))
    size = like.storage_offset() + last + 1
    device, fan_in = generator.device, like.shape[-1]
    if like.dtype == torch.uint8:
        low, high = _scale_range(fan_in * MXFP4_GROUP) if name.endswith("scale") else (0, 256)
        base = torch.randint(low, high, (size,), dtype=torch.uint8, device=device, generator=generator)
    else:
        base = torch.randn(size, dtype=like.dtype, device=device, generator=generator)
        base = _shaped(name, like, base, generator)
    return base.as_strided(like.shape, like.stride(), like.storage_offset())


def _scale_range(fan_in: int) -> tuple[int, int]:
    """E8M0 bytes [low, high) around the power of two that gives decoded weights the spread 1/sqrt(fan_in)."""
    middle = round(math.log2(fan_in**-0.5 / E2M1_RMS)) + 127
    return middle - 1, middle + 2


def _shaped(name: str, like: Tensor, normal: Tensor, generator: torch.Generator) -> Tensor:
    """N(0, 1) turned into the distribution of `name`, in place where it is large."""
    if name == "A_log":
        return normal.uniform_(1.0, 16.0, generator=generator).log_()
    if name == "log_decay":
        return normal.sigmoid_().mul_(-5.0)
    if name == "beta":
        return normal.sigmoid_()
    if name == "topk_weights":
        return normal.abs_().add_(0.5).div_(2.0 * like.shape[-1])
    if name in ("bias", "router_bias", "dt_bias"):
        return normal.mul_(0.1)
    if like.dim() == 1 and name not in ("score_weight", "attn_res_weight", "mlp_res_weight"):
        return normal.mul_(0.1).add_(1.0)  # norm weights
    if name in _ACTIVATIONS:
        return normal
    return normal.mul_(like.shape[-1] ** -0.5)


# arguments that are N(0, 1): rows of the step and what the pools hold
_ACTIVATIONS = {
    name
    for spec in OPS.values()
    for name, want in spec.args.items()
    if isinstance(want, str) and want.lstrip("*").split()[0] in ("R", "B", "SLOTS", "PAGES")
} | {"recurrent"}


def _permutation(n: int, like: Tensor, generator: torch.Generator) -> Tensor:
    order = torch.randperm(n, generator=generator, device=generator.device)[: like.numel()]
    return order.to(like.dtype).reshape(like.shape)


def _picks(like: Tensor, dims: dict[str, int], _context: int, generator: torch.Generator) -> Tensor:
    keys = torch.rand(like.shape[0], dims["E"], generator=generator, device=generator.device)
    return keys.topk(like.shape[1], dim=-1).indices.to(like.dtype)


_INDICES: dict[str, Callable[[Tensor, dict[str, int], int, torch.Generator], Tensor]] = {
    "tokens": lambda like, dims, _, g: torch.randint(dims["VOCAB"], like.shape, generator=g, device=g.device),
    "slots": lambda like, dims, _, g: _permutation(dims["SLOTS"], like, g),
    "is_new": lambda like, dims, _, g: torch.zeros(like.shape, dtype=torch.bool, device=g.device),
    "seq_lens": lambda like, dims, context, g: torch.full(like.shape, context, dtype=like.dtype, device=g.device),
    "page_table": lambda like, dims, _, g: _permutation(like.numel(), like, g),
    "topk_ids": _picks,
}
