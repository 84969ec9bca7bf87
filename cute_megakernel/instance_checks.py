"""What an instance is made of and called with, before the device sees any of it: one ValueError naming the argument.

The kernel takes addresses and pitches; a pool of another shape or dtype would be read and written as if it were right.
"""

import math

import torch

from cute_megakernel.schedule import Schedule
from kimi_kernels.config import KimiConfig
from kimi_kernels.state import Batch, State
from kimi_kernels.weights import ModelWeights

Tensor = torch.Tensor
ALIGNED = 16  # bytes: of every bulk copy's source


def check_schedule(schedule: Schedule, rows: int, sms: int) -> None:
    """A schedule made by the caller is for the instance's rows and SMs."""
    for name, want in (("rows", rows), ("sms", sms)):
        got = getattr(schedule.shape, name)
        if got != want:
            raise ValueError(f"Megakernel: schedule must be for {want} {name}, it is for {got}")


def check_state(config: KimiConfig, weights: ModelWeights, state: State, device: torch.device) -> None:
    """Pools of the layers of `weights`: shapes but for slots and pages, dtypes, what must be contiguous, alignment."""
    if len(state.layers) != len(weights.layers):
        raise ValueError(f"Megakernel: state must have {len(weights.layers)} layers, got {len(state.layers)}")
    expected = State.zeros(config, 1, 1, 1, "meta", [layer.index for layer in weights.layers])
    for layer, want, got in zip(weights.layers, expected.layers, state.layers, strict=True):
        where = f"Megakernel: state of layer {layer.index}"
        if type(want) is not type(got):
            raise ValueError(f"{where} must be {type(want).__name__}, got {type(got).__name__}")
        for name, pool in vars(want).items():
            _check_pool(f"{where}: {name}", pool, getattr(got, name), device)


def _check_pool(where: str, want: Tensor, got: Tensor, device: torch.device) -> None:
    paged = where.endswith("latent_cache")
    first = 2 if paged else 1  # dims that are free: slots, or pages and tokens of a page
    inner = list(want.shape[first:])
    fits = got.ndim == want.ndim and list(got.shape[first:]) == inner
    elsewhere = got.device.type != device.type or device.index not in (None, got.device.index)
    if not fits or got.dtype != want.dtype or elsewhere:
        free = ["any"] * first
        raise ValueError(
            f"{where} must be [{', '.join(map(str, [*free, *inner]))}] {want.dtype} on {device}, "
            f"got {list(got.shape)} {got.dtype} on {got.device}"
        )
    contiguous = got.is_contiguous() if paged else got[0].is_contiguous()
    if not contiguous:
        raise ValueError(f"{where} must be contiguous{'' if paged else ' within a slot'}, got strides {got.stride()}")
    if got.data_ptr() % ALIGNED or got.stride(0) * got.element_size() % ALIGNED:
        raise ValueError(f"{where} must begin, slot by slot, at multiples of {ALIGNED} bytes, strides {got.stride()}")


def check_limits(in_flight: int, limit_s: float) -> None:
    """0 in flight: as many as measured best."""
    if not isinstance(in_flight, int) or not 0 <= in_flight <= 64:
        raise ValueError(f"Megakernel: in_flight must be an int in [0, 64], got {in_flight!r}")
    if not isinstance(limit_s, int | float) or not math.isfinite(limit_s) or not 0 < limit_s <= 3600:
        raise ValueError(f"Megakernel: limit_s must be in (0, 3600] seconds, got {limit_s!r}")


def check_step(tokens: Tensor, batch: Batch, rows: int, device: torch.device) -> None:
    expected = {
        "tokens": (tokens, torch.int64, (rows,)),
        "slots": (batch.slots, torch.int32, (rows,)),
        "is_new": (batch.is_new, torch.bool, (rows,)),
        "seq_lens": (batch.seq_lens, torch.int32, (rows,)),
        "page_table": (batch.page_table, torch.int32, (rows, *batch.page_table.shape[1:2])),
    }
    for name, (tensor, dtype, shape) in expected.items():
        if tensor.dtype != dtype or tuple(tensor.shape) != shape or tensor.device != device:
            got = f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
            raise ValueError(f"step: {name} must be {list(shape)} {dtype} on {device}, got {got}")
        if tensor.stride(-1) != 1:
            raise ValueError(f"step: {name} must be contiguous along its last dim, got strides {tensor.stride()}")
