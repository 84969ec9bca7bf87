"""What the op tests draw from: fills, seeds, dims and slots. A case is a frozen dataclass of small fields; tensors
are made from it."""

import torch
from hypothesis import strategies as st

FILLS = ("zeros", "ones", "normal", "spike", "wide", "special")
fills = st.sampled_from(FILLS)  # simplest first: a failure shrinks towards plain data
seeds = st.integers(0, 2**16)
act_dtypes = st.sampled_from((torch.float32, torch.bfloat16))
rows = st.sampled_from((1, 2, 3, 7, 8))


def make(
    *shape: int,
    fill: str = "normal",
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    scale: float = 1.0,
) -> torch.Tensor:
    """A tensor of one kind of data; finite for every fill, so that a NaN in a result is the kernel's own."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(*shape, generator=generator, dtype=torch.float64)
    uniform = torch.rand(*shape, generator=generator, dtype=torch.float64)
    values = {
        "zeros": lambda: torch.zeros_like(normal),
        "ones": lambda: torch.ones_like(normal),
        "normal": lambda: normal,
        "spike": lambda: torch.where(uniform < 0.02, 1e4 * normal.sign(), normal),
        "wide": lambda: normal * torch.pow(10.0, 8 * uniform - 4),
        "special": lambda: torch.where(uniform < 0.3, 0.0, torch.where(uniform < 0.5, 1e-4, 100.0) * normal.sign()),
    }[fill]()
    return (values * scale).to(dtype).to(device)


def strided(x: torch.Tensor, before: int = 8, after: int = 5) -> torch.Tensor:
    """x as a slice of a wider NaN tensor: same values, last dim contiguous, padded row stride."""
    wide = torch.full((*x.shape[:-1], before + x.shape[-1] + after), float("nan"), dtype=x.dtype, device=x.device)
    view = wide[..., before : before + x.shape[-1]]
    view.copy_(x)
    return view


def slots_with_gaps(batch: int, pool: int, seed: int, padded: int = 0, null: int = -1) -> torch.Tensor:
    """`batch` distinct slots in [0, pool) in random order, the last `padded` of them replaced by `null`. -> int32
    [B]"""
    slots = torch.randperm(pool, generator=torch.Generator().manual_seed(seed))[:batch].int()
    slots[batch - padded :] = null
    return slots


def far_pool(near: torch.Tensor, pitch: int = 2**30 + 64) -> torch.Tensor:
    """`near` [3, ...] with a first stride that fits 32 bits while 2 * stride does not: int32 * int32 wraps at index 2,
    whereas a stride above 2^31 would already be int64. Only the touched pages are real memory."""
    return torch.empty_strided(near.shape, (pitch, *near.stride()[1:]), dtype=near.dtype, device=near.device).copy_(
        near
    )
