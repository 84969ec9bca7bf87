"""`config.json` content in the released form of each family: field names, nesting and constants as Moonshot ships them.

Left out are fields without meaning for the text model (generation defaults, remote-code map, vision tower).

Source   config.json of moonshotai/Kimi-K3 and moonshotai/Kimi-Linear-48B-A3B-Instruct
"""

from typing import Any

from kimi_kernels.config import MXFP4_GROUP, ConfigError, KimiConfig

BOS, PAD = 163584, 163839


def released_form(config: KimiConfig) -> dict[str, Any]:
    text = _common(config)
    if config.family == "kimi-linear":
        return text | {"head_dim": config.hidden_size // config.mla_heads, "model_max_length": config.max_positions}
    text |= {
        "activation_situ_beta": config.situ_beta,
        "activation_situ_linear_beta": config.situ_linear_beta,
        "attn_res_block_size": config.attn_res_block_size,
        "latent_moe_use_norm": config.latent_size is not None,
        "max_position_embeddings": config.max_positions,
        "mla_use_output_gate": config.mla_out_gate,
        "routed_expert_hidden_size": config.latent_size,
        "topk_method": "noaux_tc",
    }
    text["linear_attn_config"] |= {
        "gate_lower_bound": config.gate_lower_bound,
        "use_full_rank_gate": config.full_rank_out_gate,
    }
    if config.mxfp4_experts:
        text["quantization_config"] = _mxfp4()
    shared = ("bos_token_id", "dtype", "eos_token_id", "pad_token_id", "tie_word_embeddings")
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        **{name: text[name] for name in shared},
        "text_config": text,
    }


def _common(config: KimiConfig) -> dict[str, Any]:
    first_dense, moe_every = _dense_rule(config)
    shared, rest = divmod(config.shared_size, config.expert_size)
    if rest or not shared:
        raise ConfigError(f"shared_size={config.shared_size} must be a multiple of expert_size={config.expert_size}")
    linear: dict[str, Any] = {
        "full_attn_layers": [layer + 1 for layer in config.mla_layers],
        "head_dim": config.kda_head_dim,
        "kda_layers": [layer + 1 for layer in config.kda_layers],
        "num_heads": config.kda_heads,
        "short_conv_kernel_size": config.conv_taps,
    }
    eos = list(config.eos_token_ids)
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "bos_token_id": BOS if BOS < config.vocab_size else 0,
        "dtype": str(config.dtype).removeprefix("torch."),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "first_k_dense_replace": first_dense,
        "hidden_act": config.activation,
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.dense_size,
        "kv_lora_rank": config.kv_lora_rank,
        "linear_attn_config": linear,
        "mla_use_nope": True,
        "model_type": "kimi_linear",
        "moe_intermediate_size": config.expert_size,
        "moe_layer_freq": moe_every,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": config.mla_heads,
        "num_expert_group": 1,
        "num_experts": config.num_experts,
        "num_experts_per_token": config.top_k,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.mla_heads,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": shared,
        "pad_token_id": PAD if PAD < config.vocab_size else 0,
        "q_lora_rank": config.q_lora_rank,
        "qk_nope_head_dim": config.qk_nope_dim,
        "qk_rope_head_dim": config.qk_rope_dim,
        "rms_norm_eps": config.rms_eps,
        "routed_scaling_factor": config.routed_scaling,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_cache": True,
        "use_grouped_topk": True,
        "v_head_dim": config.v_dim,
        "vocab_size": config.vocab_size,
    }


def _dense_rule(config: KimiConfig) -> tuple[int, int]:
    """(first_k_dense_replace, moe_layer_freq) that give the dense layers: l < first or l % freq != 0."""
    for every in range(1, config.num_layers + 1):
        first = next((l for l in range(config.num_layers) if l not in config.dense_layers), config.num_layers)
        dense = tuple(l for l in range(config.num_layers) if l < first or l % every)
        if dense == config.dense_layers:
            return first, every
    raise ConfigError(f"dense_layers={config.dense_layers} is not of the form l < first_k or l % moe_layer_freq != 0")


def _mxfp4() -> dict[str, Any]:
    weights: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": MXFP4_GROUP,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "scale_dtype": "torch.uint8",
        "strategy": "group",
        "symmetric": True,
        "type": "float",
        "zp_dtype": None,
    }
    group = {
        "format": "mxfp4-pack-quantized",
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    kept_plain = ("self_attn.*", "shared_experts.*", r"mlp\.(gate|up|gate_up|down)_proj.*", "lm_head.*")
    return {
        "config_groups": {"group_0": group},
        "format": "mxfp4-pack-quantized",
        "global_compression_ratio": None,
        "ignore": [f"re:.*{pattern}" for pattern in (*kept_plain, "vision_tower.*", "mm_projector.*")],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
