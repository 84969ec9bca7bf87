"""config.json as the releases and transformers 5.24 write it, reduced to fields with a meaning for the text model."""

import copy

MLA_OF_K3 = [*range(4, 93, 4), 93]
MXFP4_WEIGHTS = {
    "dynamic": False,
    "group_size": 32,
    "num_bits": 4,
    "scale_dtype": "torch.uint8",
    "strategy": "group",
    "symmetric": True,
    "type": "float",
}
RELEASED_K3 = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "model_type": "kimi_k3",
    "pad_token_id": 163839,
    "text_config": {
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "architectures": ["KimiLinearForCausalLM"],
        "attn_res_block_size": 12,
        "bos_token_id": 163584,
        "dtype": "bfloat16",
        "eos_token_id": 163586,
        "first_k_dense_replace": 1,
        "hidden_act": "situ",
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 33792,
        "kv_lora_rank": 512,
        "latent_moe_use_norm": True,
        "linear_attn_config": {
            "full_attn_layers": MLA_OF_K3,
            "gate_lower_bound": -5.0,
            "head_dim": 128,
            "kda_layers": [layer for layer in range(1, 94) if layer not in MLA_OF_K3],
            "num_heads": 96,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
        },
        "max_position_embeddings": 1048576,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "model_type": "kimi_linear",
        "moe_intermediate_size": 3072,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": 96,
        "num_expert_group": 1,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_hidden_layers": 93,
        "num_key_value_heads": 96,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 2,
        "pad_token_id": 163839,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "config_groups": {
                "group_0": {
                    "format": "mxfp4-pack-quantized",
                    "input_activations": None,
                    "output_activations": None,
                    "targets": ["Linear"],
                    "weights": MXFP4_WEIGHTS,
                }
            },
            "format": "mxfp4-pack-quantized",
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
        },
        "rms_norm_eps": 1e-05,
        "routed_expert_hidden_size": 3584,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "use_grouped_topk": True,
        "v_head_dim": 128,
        "vocab_size": 163840,
    },
    "tie_word_embeddings": False,
}
RELEASED_KIMI_LINEAR = {
    "architectures": ["KimiLinearForCausalLM"],
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [layer for layer in range(1, 27) if layer % 4],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": 163839,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
UNREAD = {"rope_scaling", "rope_theta", "transformers_version"}  # of the release, without meaning here

# What transformers 5.24 KimiLinearConfig.save_pretrained writes, at the sizes of KIMI_LINEAR_MINI.
TRANSFORMERS_FORM = {
    "attention_bias": False,
    "dtype": "bfloat16",
    "eos_token_id": 287,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 144,
    "intermediate_size": 208,
    "kv_lora_rank": 80,
    "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_head_dim": 32,
    "linear_num_heads": 2,
    "mlp_layer_types": ["dense"] + ["sparse"] * 4,
    "model_max_length": 1024,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 48,
    "moe_renormalize": True,
    "num_attention_heads": 4,
    "num_expert_group": 1,
    "num_experts": 12,
    "num_experts_per_token": 3,
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "rms_norm_eps": 1e-05,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "v_head_dim": 16,
    "vocab_size": 288,
}


def edited(form: dict, **edits: object) -> dict:
    """A copy of `form` with fields set, or removed where the value is `...`; `a__b` reaches into nested objects."""
    form = copy.deepcopy(form)
    for path, value in edits.items():
        *parents, name = path.split("__")
        target = form
        for parent in parents:
            target = target[parent]
        if value is ...:
            del target[name]
        else:
            target[name] = value
    return form


def contains(whole: object, part: object) -> bool:
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(name in whole and contains(whole[name], part[name]) for name in part)
    return type(whole) is type(part) and whole == part
