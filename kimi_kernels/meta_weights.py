"""The weight tensors of one rank without data: the shapes of `weights.py`, stated in config fields."""

from collections.abc import Callable, Sequence

import torch

from kimi_kernels.config import MXFP4_GROUP, KimiConfig
from kimi_kernels.weights import DenseWeights, KdaWeights, LayerWeights, MlaWeights, ModelWeights, MoeWeights

Tensor = torch.Tensor
Act = Callable[..., Tensor]  # dims -> meta tensor in the activation dtype


def meta_weights(config: KimiConfig, tp: int = 1, rank: int = 0, layers: Sequence[int] | None = None) -> ModelWeights:
    """What `checkpoint.load_weights` returns for the same arguments, on device meta; `config` is the whole model's."""
    local = config.shard(tp)
    residual_bank = config.attn_res_block_size is not None

    def act(*dims: int) -> Tensor:
        return torch.empty(dims, dtype=config.dtype, device="meta")

    def score_weight() -> Tensor | None:
        return _float32(config.hidden_size) if residual_bank else None

    def layer_weights(layer: int) -> LayerWeights:
        return LayerWeights(
            index=layer,
            input_norm=act(config.hidden_size),
            post_norm=act(config.hidden_size),
            attn_res_weight=score_weight(),
            mlp_res_weight=score_weight(),
            attn=_mla(local, act) if layer in config.mla_layers else _kda(local, act),
            mlp=_glu(local, act, local.dense_size) if layer in config.dense_layers else _moe(local, act),
        )

    return ModelWeights(
        embed=act(config.vocab_size, config.hidden_size),
        layers=tuple(layer_weights(layer) for layer in (range(config.num_layers) if layers is None else layers)),
        output_res_weight=score_weight(),
        final_norm=act(config.hidden_size),
        lm_head=act(local.vocab_size, config.hidden_size),
        vocab_start=rank * local.vocab_size,
    )


def _float32(*dims: int) -> Tensor:
    return torch.empty(dims, dtype=torch.float32, device="meta")


def _uint8(*dims: int) -> Tensor:
    return torch.empty(dims, dtype=torch.uint8, device="meta")


def _kda(c: KimiConfig, act: Act) -> KdaWeights:
    D, H, K, F = c.hidden_size, c.kda_heads, c.kda_head_dim, c.decay_rank
    gate = H * K if c.full_rank_out_gate else F
    return KdaWeights(
        in_proj=act(3 * H * K + gate + F + H, D),
        conv=_float32(3 * H * K, c.conv_taps),
        f_b=act(H * K, F),
        g_b=None if c.full_rank_out_gate else act(H * K, F),
        A_log=_float32(H),
        dt_bias=_float32(H, K),
        out_norm=_float32(K),
        o_proj=act(D, H * K),
    )


def _mla(c: KimiConfig, act: Act) -> MlaWeights:
    D, H, L, P, V = c.hidden_size, c.mla_heads, c.kv_lora_rank, c.qk_rope_dim, c.v_dim
    q_width = H * (c.qk_nope_dim + P)
    return MlaWeights(
        in_proj=act((c.q_lora_rank or q_width) + L + P + (H * V if c.mla_out_gate else 0), D),
        q_norm=None if c.q_lora_rank is None else act(c.q_lora_rank),
        q_b=None if c.q_lora_rank is None else act(q_width, c.q_lora_rank),
        kv_norm=act(L),
        kv_b=act(H, c.qk_nope_dim + V, L),
        o_proj=act(D, H * V),
    )


def _glu(c: KimiConfig, act: Act, width: int) -> DenseWeights:
    return DenseWeights(gate_up=act(2 * width, c.hidden_size), down=act(c.hidden_size, width))


def _moe(c: KimiConfig, act: Act) -> MoeWeights:
    D, E, Z, I = c.hidden_size, c.num_experts, c.expert_in, c.expert_size
    latent = c.latent_size is not None
    packed = c.mxfp4_experts
    return MoeWeights(
        router=act(E, D),
        router_bias=_float32(E),
        latent_down=act(Z, D) if latent else None,
        latent_norm=act(Z) if latent else None,
        latent_up=act(D, Z) if latent else None,
        w13=_uint8(E, 2 * I, Z // 2) if packed else act(E, 2 * I, Z),
        w13_scale=_uint8(E, 2 * I, Z // MXFP4_GROUP) if packed else None,
        w2=_uint8(E, Z, I // 2) if packed else act(E, Z, I),
        w2_scale=_uint8(E, Z, I // MXFP4_GROUP) if packed else None,
        shared=_glu(c, act, c.shared_size),
    )
