"""SGLang's pools and request tables as `State` and `Batch`, in place.

    conv window      mamba pool conv[0][layer]     [SLOTS, 3, 3*H*K], oldest first, q | k | v
    recurrent state  mamba pool temporal[layer]    [SLOTS, H, V, K] float32
    latent cache     key buffer of the layer       [tokens, 1, L+P] seen as [tokens/PAGE, PAGE, L+P]
    slots            mamba_cache_indices           [B] int32; 0 while graphs are captured, -1 in padded rows
    page table       req_to_token[request]         every PAGE-th token slot, divided by PAGE

Slot 0 of the mamba pool is SGLang's for padding, so the first valid slot is 1. A padded row keeps no tokens: its
seq_len becomes 0, whatever fill value the graph's buffer holds. Decode never starts a sequence: `is_new` is False.

Source   sgl-project/sglang srt/mem_cache/memory_pool.py, srt/layers/attention/hybrid_linear_attn_backend.py (0.5.23)
"""

from typing import Any

import torch

from kimi_kernels.config import KimiConfig
from kimi_kernels.state import Batch, KdaState, MlaState, State
from sglang_integration.compat import Running

FIRST_VALID_SLOT = 1


class PoolViews:
    """Views of one model's pools, made at the first forward: SGLang allocates the pools after the model is built."""

    def __init__(self, config: KimiConfig):
        self.config = config
        self._state: State | None = None
        self._sealed: tuple | None = None

    def state(self, running: Running) -> State:
        """Raises ValueError for a layout other than the one above, RuntimeError once the pools have moved."""
        seal = (running.conv.data_ptr(), running.temporal.data_ptr(), running.temporal.shape)
        if self._state is None:
            self._state, self._sealed = pool_state(running, self.config), seal
        if seal != self._sealed:
            raise RuntimeError("kimi-kernels: SGLang's state pools moved after the first step that used them")
        return self._state


def pool_state(running: Running, config: KimiConfig) -> State:
    """One KdaState or MlaState per layer; `config` is this rank's. Raises ValueError naming a misfit."""
    return State(tuple(_layer_state(running, config, layer) for layer in range(config.num_layers)))


def _layer_state(running: Running, config: KimiConfig, layer: int) -> KdaState | MlaState:
    heads, dim = config.kda_heads, config.kda_head_dim
    if layer in config.mla_layers:
        tokens = running.key_buffer(layer)
        _check(f"key buffer of layer {layer}", tokens, (1, config.kv_lora_rank + config.qk_rope_dim), config.dtype)
        return MlaState(tokens.squeeze(1).unflatten(0, (-1, running.page_size)))
    index = running.pool_index[layer]
    conv, temporal = running.conv[index], running.temporal[index]
    _check(f"conv state of layer {layer}", conv, (config.conv_taps - 1, 3 * heads * dim), config.dtype)
    _check(f"temporal state of layer {layer}", temporal, (heads, dim, dim), torch.float32)
    return KdaState(conv, temporal)


def _check(name: str, pool: torch.Tensor, inner: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(pool.shape[1:]) != inner or pool.dtype != dtype or pool.stride(-1) != 1:
        raise ValueError(
            f"kimi-kernels: {name} must be [any, {', '.join(map(str, inner))}] {dtype}, contiguous in its last dim, "
            f"got {list(pool.shape)} {pool.dtype} with strides {pool.stride()}"
        )


def step_batch(running: Running, forward_batch: Any) -> Batch:
    """Where the rows of this step live; device tensors only, no host read, so a graph may capture it.

    The page table is gathered for the whole width of req_to_token: B * positions / PAGE int32, read by SGLang's own
    backends in the same way. With long contexts a page size above 1 (`--page-size 64`) makes it as much shorter.
    """
    live = running.slots >= FIRST_VALID_SLOT
    token_slots = running.req_to_token[:, :: running.page_size].index_select(0, forward_batch.req_pool_indices)
    return Batch(
        slots=running.slots,
        is_new=torch.zeros_like(live),
        seq_lens=torch.where(live, forward_batch.seq_lens, 0).to(torch.int32),
        page_table=token_slots if running.page_size == 1 else token_slots // running.page_size,
        first_valid_slot=FIRST_VALID_SLOT,
    )
