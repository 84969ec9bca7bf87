"""What lives between decode steps, and what a serving engine hands over with each step.

Layouts are those of SGLang and vLLM, so that their pools can be used in place:

    conv_window   [SLOTS, W-1, 3*H*K] act    channels in the order q | k | v, index 0 is the oldest input
    recurrent     [SLOTS, H, V, K] float32   K innermost
    latent_cache  [PAGES, PAGE, L+P] act     normed latent | unrotated extra dims; one cache for all heads

Source   DESIGN.md section 5: sgl-project/sglang srt/configs/mamba_utils.py, vllm-project/vllm mamba_utils.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kimi_kernels.config import KimiConfig


@dataclass(frozen=True)
class KdaState:
    """Pools of one KDA layer; slot pitch may be any stride, the inner dims are contiguous."""

    conv_window: torch.Tensor  # [SLOTS, W-1, 3*H*K] act
    recurrent: torch.Tensor  # [SLOTS, H, V, K] float32


@dataclass(frozen=True)
class MlaState:
    """Paged latent cache of one MLA layer."""

    latent_cache: torch.Tensor  # [PAGES, PAGE, L+P] act


@dataclass(frozen=True)
class Batch:
    """Where the rows of this step live. Row b*T + t is token t of sequence b; T = R // B.

    A row with `slots[b] < first_valid_slot` is padding: its outputs are zero, the pools stay untouched. SGLang pads
    with -1
    (`first_valid_slot=0`), vLLM reserves block 0 (`first_valid_slot=1`). A padded row has `seq_lens[b] = 0`.

    The values are the engine's word: ops cannot check them without waiting for the device. `batch_checks.check_batch`
    does, for callers that build batches by hand. Writes to slots, positions and pages outside the pools are dropped.
    """

    slots: torch.Tensor  # [B] int32, index into the KDA pools
    is_new: torch.Tensor  # [B] bool, True: state starts from zero, whatever the slot holds
    seq_lens: torch.Tensor  # [B] int32, cached tokens including the T of this step
    page_table: torch.Tensor  # [B, MAX_PAGES] int32, page of token j is page_table[b, j // PAGE]
    first_valid_slot: int = 0


@dataclass(frozen=True)
class State:
    """One entry per layer in the order of `config`: KdaState or MlaState."""

    layers: tuple[KdaState | MlaState, ...]

    @classmethod
    def zeros(
        cls,
        config: KimiConfig,
        slots: int,
        pages: int,
        page_size: int,
        device: torch.device | str = "cpu",
        layers: Sequence[int] | None = None,
    ) -> "State":
        """Fresh pools for `slots` sequences and `pages * page_size` cached tokens; `config` is this rank's
        (sharded)."""
        heads, dim = config.kda_heads, config.kda_head_dim
        latent = config.kv_lora_rank + config.qk_rope_dim

        def layer_state(layer: int) -> KdaState | MlaState:
            if layer in config.mla_layers:
                return MlaState(torch.zeros(pages, page_size, latent, dtype=config.dtype, device=device))
            window = (slots, config.conv_taps - 1, 3 * heads * dim)
            return KdaState(
                conv_window=torch.zeros(window, dtype=config.dtype, device=device),
                recurrent=torch.zeros(slots, heads, dim, dim, dtype=torch.float32, device=device),
            )

        return cls(tuple(layer_state(l) for l in (range(config.num_layers) if layers is None else layers)))
