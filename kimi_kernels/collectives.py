"""The two collectives of the step: a sum of partial activations and the winner of the vocabulary shards.

Both gather and then combine in rank order, so every rank holds the same bits. Under CUDA the gathers are NCCL's and
can be
captured in a graph.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

Tensor = torch.Tensor


def single_rank() -> dict[str, Callable]:
    """A tensor-parallel group of one. A rank's slice that runs alone keeps its partial sums."""
    return {"all_reduce": lambda x: x, "all_reduce_max": lambda tokens, values: tokens}


def process_group(group: dist.ProcessGroup | None = None) -> dict[str, Callable]:
    """Collectives over `group` of torch.distributed (the default group if None), one process a rank."""

    def all_reduce(x: Tensor) -> Tensor:
        """Sum over ranks in float32, in rank order, rounded once. x [R, N] act -> [R, N] act"""
        return _gather(x, group).float().sum(0).to(x.dtype)

    def all_reduce_max(tokens: Tensor, values: Tensor) -> Tensor:
        """Token of the largest value over all vocabulary shards, the lowest token on ties. [R], [R] -> [R]"""
        best = _gather(values, group)  # [ranks, R]; shards are in token order, so the first maximum is the lowest token
        return _gather(tokens, group).gather(0, best.argmax(0, keepdim=True))[0]

    return {"all_reduce": all_reduce, "all_reduce_max": all_reduce_max}


def _gather(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group)
    return torch.stack(parts)
