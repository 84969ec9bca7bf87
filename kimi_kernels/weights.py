"""One rank's weights in the form the ops read, as plain frozen dataclasses.

Projections of the same input are stacked along their output dim and read by one `linear`. Widths are this rank's.
"""

from dataclasses import dataclass

import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class KdaWeights:
    in_proj: Tensor  # [3*H*K | gate | F | H, D] act: q, k, v, g (or g_a), f_a, b stacked
    conv: Tensor  # [3*H*K, W] float32, tap W-1 multiplies the newest input
    f_b: Tensor  # [H*K, F] act
    g_b: Tensor | None  # [H*K, F] act, low-rank output gate only
    A_log: Tensor  # [H] float32, per head
    dt_bias: Tensor  # [H, K] float32
    out_norm: Tensor  # [V] float32
    o_proj: Tensor  # [D, H*V] act


@dataclass(frozen=True)
class MlaWeights:
    in_proj: Tensor  # [q | L+P | gate, D] act: q_a (or q), kv_a, g stacked
    q_norm: Tensor | None  # [q_lora_rank] act
    q_b: Tensor | None  # [H*(nope+P), q_lora_rank] act
    kv_norm: Tensor  # [L] act
    kv_b: Tensor  # [H, nope+V, L] act, per head UK rows then UV rows
    o_proj: Tensor  # [D, H*V] act


@dataclass(frozen=True)
class DenseWeights:
    gate_up: Tensor  # [2*I, D] act, gate rows then up rows
    down: Tensor  # [D, I] act


@dataclass(frozen=True)
class MoeWeights:
    router: Tensor  # [E, D] act
    router_bias: Tensor  # [E] float32
    latent_down: Tensor | None  # [Z, D] act
    latent_norm: Tensor | None  # [Z] act
    latent_up: Tensor | None  # [D, Z] act
    w13: Tensor  # [E, 2*I, Z] act, or [E, 2*I, Z/2] uint8 with two E2M1 codes a byte
    w13_scale: Tensor | None  # [E, 2*I, Z/32] uint8 E8M0
    w2: Tensor  # [E, Z, I] act, or [E, Z, I/2] uint8
    w2_scale: Tensor | None  # [E, Z, I/32] uint8
    shared: DenseWeights


@dataclass(frozen=True)
class LayerWeights:
    index: int  # 0-based in the whole model
    input_norm: Tensor  # [D] act
    post_norm: Tensor  # [D] act
    attn_res_weight: Tensor | None  # [D] float32: norm weight times projection, folded in float32
    mlp_res_weight: Tensor | None  # [D] float32
    attn: KdaWeights | MlaWeights
    mlp: DenseWeights | MoeWeights


@dataclass(frozen=True)
class ModelWeights:
    embed: Tensor  # [VOCAB_full, D] act, replicated on every rank
    layers: tuple[LayerWeights, ...]
    output_res_weight: Tensor | None  # [D] float32
    final_norm: Tensor  # [D] act
    lm_head: Tensor  # [VOCAB, D] act, rows vocab_start ...
    vocab_start: int
