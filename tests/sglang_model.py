"""A checkpoint as SGLang's models hold it after loading: modules as plain namespaces, tensors in its order.

Written from SGLang's loaders, not from `sglang_integration.build`, which is tested with it.
"""

from types import SimpleNamespace as Namespace

import torch

from kimi_kernels.config import KimiConfig
from kimi_kernels.tensor_names import layer_prefix, name_prefix
from sglang_integration.compat import RAW_MXFP4

Tensors = dict[str, torch.Tensor]


def weight(*parts: torch.Tensor) -> Namespace:
    """A linear module whose weight is the parts one below the other."""
    return Namespace(weight=torch.nn.Parameter(torch.cat(parts), requires_grad=False))


def sglang_model(config: KimiConfig, tensors: Tensors, vocab_padding: int = 0) -> Namespace:
    """The causal LM of either family; SGLang pads the vocabulary to a multiple of 64."""
    prefix = name_prefix(config)
    pad = torch.full((vocab_padding, config.hidden_size), float("nan"), dtype=config.dtype)
    model = Namespace(
        embed_tokens=weight(tensors[f"{prefix}model.embed_tokens.weight"], pad),
        norm=weight(tensors[f"{prefix}model.norm.weight"]),
        layers=[_layer(config, tensors, layer) for layer in range(config.num_layers)],
    )
    if config.attn_res_block_size is not None:
        for part in ("norm", "proj"):
            stored = tensors[f"{prefix}model.output_attn_res_{part}.weight"]
            setattr(model, f"output_attn_res_{part}", weight(stored))
    return Namespace(model=model, lm_head=weight(tensors[f"{prefix}lm_head.weight"], pad))


def _layer(config: KimiConfig, tensors: Tensors, index: int) -> Namespace:
    prefix = layer_prefix(config, index)
    t = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    layer = Namespace(
        input_layernorm=weight(t["input_layernorm.weight"]),
        post_attention_layernorm=weight(t["post_attention_layernorm.weight"]),
        self_attn=_mla(config, t) if index in config.mla_layers else _kda(config, t),
        mlp=_glu(t, "mlp.") if index in config.dense_layers else _moe(config, t),
    )
    if config.attn_res_block_size is not None:
        for name in ("self_attention_res_norm", "self_attention_res_proj", "mlp_res_norm", "mlp_res_proj"):
            setattr(layer, name, weight(t[f"{name}.weight"]))
    return layer


def _kda(config: KimiConfig, t: Tensors) -> Namespace:
    heads = config.kda_heads
    p = {name: t[f"self_attn.{name}_proj.weight"] for name in ("q", "k", "v", "b", "f_a", "f_b", "o")}
    attention = Namespace(
        attn=Namespace(conv_weights=torch.cat([t[f"self_attn.{x}_conv1d.weight"] for x in "qkv"]).squeeze(1).float()),
        A_log=torch.nn.Parameter(t["self_attn.A_log"].flatten()[:heads].reshape(1, 1, heads, 1)),
        dt_bias=torch.nn.Parameter(t["self_attn.dt_bias"]),
        o_norm=weight(t["self_attn.o_norm.weight"]),
        o_proj=weight(p["o"]),
    )
    if not config.full_rank_out_gate:
        g_a, g_b = t["self_attn.g_a_proj.weight"], t["self_attn.g_b_proj.weight"]
        attention.fused_qkvbfg_a_proj = weight(p["q"], p["k"], p["v"], p["b"], p["f_a"], g_a)
        attention.fused_fg_b_proj = weight(p["f_b"][None], g_b[None])
        return attention
    attention.fused_qkvg_proj = weight(p["q"], p["k"], p["v"], t["self_attn.g_proj.weight"])
    attention.f_a_proj, attention.b_proj, attention.f_b_proj = weight(p["f_a"]), weight(p["b"]), weight(p["f_b"])
    merged = torch.cat([p["f_a"], p["b"]])
    attention._bfa_w = torch.cat([merged, merged.new_zeros(-len(merged) % 8, merged.shape[1])])
    attention.f_a_proj.weight.data = attention._bfa_w[: len(p["f_a"])]
    attention.b_proj.weight.data = attention._bfa_w[len(p["f_a"]) : len(merged)]
    return attention


def _mla(config: KimiConfig, t: Tensors) -> Namespace:
    p = {name.split(".")[1]: tensor for name, tensor in t.items() if name.startswith("self_attn.")}
    names = ["kv_b_proj", "o_proj", "kv_a_layernorm", *(["g_proj"] if config.mla_out_gate else [])]
    attention = Namespace(**{name: weight(p[name]) for name in names})
    if config.q_lora_rank is None:
        attention.q_proj, attention.kv_a_proj_with_mqa = weight(p["q_proj"]), weight(p["kv_a_proj_with_mqa"])
        return attention
    attention.fused_qkv_a_proj_with_mqa = weight(p["q_a_proj"], p["kv_a_proj_with_mqa"])
    attention.q_a_layernorm, attention.q_b_proj = weight(p["q_a_layernorm"]), weight(p["q_b_proj"])
    return attention


def _glu(t: Tensors, prefix: str) -> Namespace:
    gate, up, down = (t[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
    return Namespace(gate_up_proj=weight(gate, up), down_proj=weight(down))


def _moe(config: KimiConfig, t: Tensors) -> Namespace:
    p = {name.removeprefix("block_sparse_moe."): tensor for name, tensor in t.items() if "block_sparse_moe." in name}
    gate = weight(p["gate.weight"])
    gate.e_score_correction_bias = torch.nn.Parameter(p["gate.e_score_correction_bias"])
    moe = Namespace(gate=gate, experts=Namespace(), shared_experts=_glu(p, "shared_experts."))
    if config.latent_size is not None:
        for name in ("routed_expert_down_proj", "routed_expert_norm", "routed_expert_up_proj"):
            setattr(moe, name, weight(p[f"{name}.weight"]))

    def stacked(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        each = [[p[f"experts.{e}.{w}.{kind}"] for w in ("w1", "w3", "w2")] for e in range(config.num_experts)]
        return torch.stack([torch.cat([w1, w3]) for w1, w3, _ in each]), torch.stack([w2 for *_, w2 in each])

    if config.mxfp4_experts:
        (w13, w2), (w13_scale, w2_scale) = stacked("weight_packed"), stacked("weight_scale")
        setattr(moe.experts, RAW_MXFP4, (w13, w13_scale, w2, w2_scale))
    else:
        moe.experts.w13_weight, moe.experts.w2_weight = map(torch.nn.Parameter, stacked("weight"))
    return moe
