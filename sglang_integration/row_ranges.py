"""Each bfloat16 matrix of the step as ranges of rows in tensors that SGLang holds anyway: nothing is copied.

    path -> views [N, C] or [E, N, C], last dim contiguous, any pitch; stacked, they are the weight of that path

Paths are those of the megakernel's recording. Where the step reads a matrix the other way round, SGLang's absorbed
weights have it: `w_kc` lies as [H, L, nope], `w_vc` as [H, V, L].

    several ranges    KDA in_proj of Kimi-Linear, which SGLang stores as q k v b f_a g_a
    two readers       attn.absorb and attn.expand in place of attn.kv_b, halves of which they are
"""

from typing import Any

import torch

from cute_megakernel.recording import weight_paths
from kimi_kernels.config import KimiConfig
from kimi_kernels.weights import ModelWeights

Tensor = torch.Tensor


def row_ranges(text: Any, config: KimiConfig, weights: ModelWeights) -> dict[str, tuple[Tensor, ...]]:
    """Of the causal LM `text`; `weights` is what `build.model_weights` made of it. MXFP4 experts are not among them."""
    found = {path: (tensor,) for path, tensor in weight_paths(weights) if tensor.dtype == config.dtype}
    found = {path: ranges for path, ranges in found.items() if ranges[0].ndim > 1}
    for position, layer in enumerate(weights.layers):
        attention, prefix = text.model.layers[layer.index].self_attn, f"layers.{position}.attn."
        if layer.index in config.mla_layers:
            del found[f"{prefix}kv_b"]
            found |= {f"{prefix}absorb": (attention.w_kc.transpose(1, 2),)}
            found |= {f"{prefix}expand": (attention.w_vc.transpose(1, 2),)}
        elif not config.full_rank_out_gate:
            found[f"{prefix}in_proj"] = _low_rank_in_proj(attention, config)
    return found


def _low_rank_in_proj(attention: Any, config: KimiConfig) -> tuple[Tensor, ...]:
    """q k v, g_a, f_a, b: the order of `KdaWeights.in_proj`."""
    width, rank = config.kda_heads * config.kda_head_dim, config.decay_rank
    sizes = [3 * width, config.kda_heads, rank, rank]
    qkv, b, f_a, g_a = attention.fused_qkvbfg_a_proj.weight.data.split(sizes)
    return qkv, g_a, f_a, b
