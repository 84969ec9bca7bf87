"""SGLang's loaded weights as `ModelWeights`: views where the layouts agree, one storage for both where they do not.

    shared   everything read as it lies; and stacked projections of one input: the parameters of SGLang's modules become
             views of the stacked tensor, as in its own `_merge_weights_as_views`, and the old storage is freed
    copied   Kimi-Linear's KDA input projection (SGLang: q k v b f_a g_a, here: q k v g_a f_a b; both orders are read),
             and small vectors that the ops want in float32
    kept     MXFP4 experts as loaded, beside the repacked ones that SGLang's prefill reads

Call it after `weight_table.weight_problems` found nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kimi_kernels.config import KimiConfig
from kimi_kernels.weights import DenseWeights, KdaWeights, LayerWeights, MlaWeights, ModelWeights, MoeWeights
from sglang_integration.compat import RAW_MXFP4

Tensor = torch.Tensor


@dataclass
class Extra:
    """Device memory that the build holds beyond SGLang's own, in bytes."""

    copied_bytes: int = 0
    kept_bytes: int = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """Counts a tensor that did not exist before."""
        self.copied_bytes += tensor.numel() * tensor.element_size()
        return tensor

    def float32(self, parameter: Tensor) -> Tensor:
        """The values in float32: the tensor itself where it is."""
        data = parameter.data
        return data if data.dtype == torch.float32 else self.copy(data.float())


def model_weights(text: Any, config: KimiConfig, extra: Extra) -> ModelWeights:
    """Weights of the causal LM `text` on this rank; `config` is the rank's, vocabulary padding is cut off."""
    model = text.model
    residual = config.attn_res_block_size is not None
    return ModelWeights(
        embed=model.embed_tokens.weight.data[: config.vocab_size],
        layers=tuple(_layer(model.layers[index], index, config, extra) for index in range(config.num_layers)),
        output_res_weight=_score(model, "output_attn_res", extra) if residual else None,
        final_norm=model.norm.weight.data,
        lm_head=text.lm_head.weight.data[: config.vocab_size],
        vocab_start=0,
    )


def stack_in_place(modules: Sequence[Any], tail: Tensor | None = None) -> Tensor:
    """The weights [N_i, C] of `modules` one below the other in one new tensor; their parameters become views of it.

    `tail` [M, C] is appended and belongs to no module. -> [sum of N_i + M, C]
    """
    parts = [module.weight.data for module in modules]
    stacked = torch.cat(parts if tail is None else [*parts, tail])
    start = 0
    for module, part in zip(modules, parts, strict=True):
        module.weight.data = stacked[start : start + len(part)]
        start += len(part)
    return stacked


def _layer(layer: Any, index: int, config: KimiConfig, extra: Extra) -> LayerWeights:
    residual = config.attn_res_block_size is not None
    attention = _mla if index in config.mla_layers else _kda
    dense = index in config.dense_layers
    return LayerWeights(
        index=index,
        input_norm=layer.input_layernorm.weight.data,
        post_norm=layer.post_attention_layernorm.weight.data,
        attn_res_weight=_score(layer, "self_attention_res", extra) if residual else None,
        mlp_res_weight=_score(layer, "mlp_res", extra) if residual else None,
        attn=attention(layer.self_attn, config, extra),
        mlp=_glu(layer.mlp) if dense else _moe(layer.mlp, config, extra),
    )


def _score(owner: Any, name: str, extra: Extra) -> Tensor:
    """Attention-residual score weight: norm weight times projection, folded in float32. -> [D] float32"""
    norm, projection = (getattr(owner, f"{name}_{part}").weight.data for part in ("norm", "proj"))
    return extra.copy(norm.float() * projection[0].float())


def _kda(attention: Any, config: KimiConfig, extra: Extra) -> KdaWeights:
    heads = config.kda_heads
    in_proj, f_b, g_b = (_full_rank if config.full_rank_out_gate else _low_rank)(attention, config, extra)
    return KdaWeights(
        in_proj=in_proj,
        conv=attention.attn.conv_weights.data,
        f_b=f_b,
        g_b=g_b,
        A_log=attention.A_log.data.reshape(heads),
        dt_bias=attention.dt_bias.data.unflatten(0, (heads, config.kda_head_dim)),
        out_norm=extra.float32(attention.o_norm.weight),
        o_proj=attention.o_proj.weight.data,
    )


def _low_rank(attention: Any, config: KimiConfig, extra: Extra) -> tuple[Tensor, Tensor, Tensor]:
    """Kimi-Linear: in_proj [q | k | v | g_a | f_a | b, D], f_b and g_b [H*K, F]."""
    width, rank = config.kda_heads * config.kda_head_dim, config.decay_rank
    sizes = [3 * width, config.kda_heads, rank, rank]
    qkv, b, f_a, g_a = attention.fused_qkvbfg_a_proj.weight.data.split(sizes)
    f_b, g_b = attention.fused_fg_b_proj.weight.data
    return extra.copy(torch.cat([qkv, g_a, f_a, b])), f_b, g_b


def _full_rank(attention: Any, config: KimiConfig, extra: Extra) -> tuple[Tensor, Tensor, None]:
    """K3: in_proj [q | k | v | g | f_a | b, D], f_b [H*K, F].

    SGLang reads [f_a | b | zeros] as one weight too: it becomes the tail of the same tensor, as on ROCm.
    """
    modules = [attention.fused_qkvg_proj, attention.f_a_proj, attention.b_proj]
    rows = sum(len(module.weight) for module in modules)
    merged = attention._bfa_w
    wide = len(attention.fused_qkvg_proj.weight)
    padding = None if merged is None else merged[rows - wide :]
    stacked = stack_in_place(modules, padding)
    if merged is not None:
        attention._bfa_w = stacked[wide:]
    return stacked[:rows], attention.f_b_proj.weight.data, None


def _mla(attention: Any, config: KimiConfig, extra: Extra) -> MlaWeights:
    lora = config.q_lora_rank is not None
    names = ["fused_qkv_a_proj_with_mqa"] if lora else ["q_proj", "kv_a_proj_with_mqa"]
    if config.mla_out_gate:
        names.append("g_proj")
    modules = [getattr(attention, name) for name in names]
    return MlaWeights(
        in_proj=stack_in_place(modules) if len(modules) > 1 else modules[0].weight.data,
        q_norm=attention.q_a_layernorm.weight.data if lora else None,
        q_b=attention.q_b_proj.weight.data if lora else None,
        kv_norm=attention.kv_a_layernorm.weight.data,
        kv_b=attention.kv_b_proj.weight.data.unflatten(0, (config.mla_heads, -1)),
        o_proj=attention.o_proj.weight.data,
    )


def _glu(mlp: Any) -> DenseWeights:
    return DenseWeights(mlp.gate_up_proj.weight.data, mlp.down_proj.weight.data)


def _moe(moe: Any, config: KimiConfig, extra: Extra) -> MoeWeights:
    latent = config.latent_size is not None
    if config.mxfp4_experts:
        w13, w13_scale, w2, w2_scale = experts = getattr(moe.experts, RAW_MXFP4)
        extra.kept_bytes += sum(part.numel() for part in experts)
    else:
        w13, w13_scale, w2, w2_scale = moe.experts.w13_weight.data, None, moe.experts.w2_weight.data, None
    return MoeWeights(
        router=moe.gate.weight.data,
        router_bias=extra.float32(moe.gate.e_score_correction_bias),
        latent_down=moe.routed_expert_down_proj.weight.data if latent else None,
        latent_norm=moe.routed_expert_norm.weight.data if latent else None,
        latent_up=moe.routed_expert_up_proj.weight.data if latent else None,
        w13=w13,
        w13_scale=w13_scale,
        w2=w2,
        w2_scale=w2_scale,
        shared=_glu(moe.shared_experts),
    )
