"""Checks the values of a `Batch` against the pools it points into, which ops cannot do without waiting for the device.

The decode path trusts its engine; a caller that builds batches by hand, a test or a debugging engine calls this first.
"""

import torch

from kimi_kernels.state import Batch, KdaState, MlaState, State


def check_batch(batch: Batch, state: State, rows: int) -> None:
    """Raises one ValueError that names the field, what is allowed and what came; changes nothing.

    Reads the batch on the host, so it synchronises. `rows` is R = B * T of the step.
    """
    size = batch.slots.shape[0]
    lengths = [len(batch.slots), len(batch.is_new), len(batch.seq_lens), len(batch.page_table)]
    if len(set(lengths)) > 1:
        raise ValueError(f"batch: slots, is_new, seq_lens and page_table must have one length, got {lengths}")
    if rows == size == 0:
        return
    if size == 0 or rows == 0 or rows % size:
        raise ValueError(f"batch: rows R={rows} must be a positive multiple of sequences B={size}")
    if batch.first_valid_slot < 0:
        raise ValueError(f"batch: first_valid_slot must be at least 0, got {batch.first_valid_slot}")
    slots = batch.slots.tolist()
    live = [b for b, slot in enumerate(slots) if slot >= batch.first_valid_slot]
    for layer in state.layers:
        if isinstance(layer, KdaState):
            _check_slots(slots, live, min(layer.recurrent.shape[0], layer.conv_window.shape[0]), batch.first_valid_slot)
        else:
            _check_pages(batch, layer, live, rows // size)


def _check_slots(slots: list[int], live: list[int], pool: int, first_valid: int) -> None:
    used = [slots[b] for b in live]
    if outside := [slot for slot in used if slot >= pool]:
        raise ValueError(f"batch: slots must be below {pool} (or below {first_valid} for padding), got {outside[:8]}")
    if twice := sorted({slot for slot in used if used.count(slot) > 1}):
        raise ValueError(f"batch: slots of live sequences must differ, got {twice[:8]} more than once")


def _check_pages(batch: Batch, layer: MlaState, live: list[int], steps: int) -> None:
    pages, page_size = layer.latent_cache.shape[:2]
    capacity = batch.page_table.shape[1] * page_size
    seq_lens = batch.seq_lens.tolist()
    for b, seq_len in enumerate(seq_lens):
        low, high = (steps, capacity) if b in live else (0, 0)
        if not low <= seq_len <= high:
            kind = "the pages of a row" if b in live else "a padded sequence"
            raise ValueError(f"batch: seq_lens[{b}] must be in [{low}, {high}] ({kind}), got {seq_len}")
    written: dict[int, int] = {}
    for b in live:
        table = batch.page_table[b, : -(-seq_lens[b] // page_size)].to(torch.int64).tolist()
        if outside := [page for page in table if not 0 <= page < pages]:
            raise ValueError(f"batch: page_table[{b}] must hold pages in [0, {pages}), got {outside[:8]}")
        for page in {table[position // page_size] for position in range(seq_lens[b] - steps, seq_lens[b])}:
            if written.setdefault(page, b) != b:
                raise ValueError(f"batch: page_table rows {written[page]} and {b} both write page {page}")
