"""config.json <-> KimiConfig: the released forms, transformers' form, and one error that lists every problem."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from released_configs import (
    MLA_OF_K3,
    RELEASED_K3,
    RELEASED_KIMI_LINEAR,
    TRANSFORMERS_FORM,
    UNREAD,
    contains,
    edited,
)

from kimi_kernels.config import CONFIGS, K3, K3_MINI, KIMI_LINEAR_48B, KIMI_LINEAR_MINI, ConfigError, KimiConfig
from kimi_kernels.hf_config import load_config, write_config


def test_released_configs_load_as_the_built_in_ones():
    assert load_config(RELEASED_K3) == K3
    assert load_config(RELEASED_K3["text_config"]) == K3
    assert load_config(RELEASED_KIMI_LINEAR) == KIMI_LINEAR_48B


def test_written_configs_have_every_released_field():
    assert contains(write_config(K3), RELEASED_K3)
    assert write_config(KIMI_LINEAR_48B) == {k: v for k, v in RELEASED_KIMI_LINEAR.items() if k not in UNREAD}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_written_config_loads_back(tmp_path: Path, name: str, dtype: torch.dtype):
    config = dataclasses.replace(CONFIGS[name], dtype=dtype)
    (tmp_path / "config.json").write_text(json.dumps(write_config(config)))
    assert load_config(tmp_path) == load_config(tmp_path / "config.json") == config


@st.composite
def configs(draw: st.DrawFn) -> KimiConfig:
    base = draw(st.sampled_from((K3_MINI, KIMI_LINEAR_MINI)))
    layers = draw(st.integers(1, 9))
    first, every = draw(st.integers(0, layers)), draw(st.integers(1, 3))
    return dataclasses.replace(
        base,
        num_layers=layers,
        mla_layers=tuple(l for l in range(layers) if draw(st.booleans())),
        dense_layers=tuple(l for l in range(layers) if l < first or l % every),
        shared_size=base.expert_size * draw(st.integers(1, 3)),
        q_lora_rank=draw(st.sampled_from((None, 16, 48))),
        routed_scaling=draw(st.floats(0.1, 4.0)),
        eos_token_ids=tuple(draw(st.lists(st.integers(0, 99), max_size=3))),
    )


@given(config=configs())
def test_any_layer_pattern_loads_back(config: KimiConfig):
    assert load_config(json.loads(json.dumps(write_config(config)))) == config


def test_transformers_form_loads():
    assert load_config(TRANSFORMERS_FORM) == KIMI_LINEAR_MINI
    attributes = edited(TRANSFORMERS_FORM, num_expert_group=..., num_experts=..., num_experts_per_token=..., dtype=...)
    attributes |= {"n_group": 1, "num_local_experts": 12, "num_experts_per_tok": 3, "torch_dtype": "bfloat16"}
    assert load_config(attributes) == KIMI_LINEAR_MINI


def test_lora_eps_is_not_rms_norm_eps():
    """Both model codes build kv_a_layernorm and q_a_layernorm with the class default, 1e-6."""
    assert load_config(edited(RELEASED_KIMI_LINEAR, rms_norm_eps=1e-3)).lora_eps == 1e-6
    assert load_config(edited(RELEASED_K3, text_config__rms_norm_eps=1e-3)).lora_eps == 1e-6


def test_quantization_config_may_sit_in_the_wrapper():
    quantization = RELEASED_K3["text_config"]["quantization_config"]
    moved = edited(RELEASED_K3, text_config__quantization_config=..., quantization_config=quantization)
    assert load_config(moved) == K3
    assert not load_config(edited(RELEASED_K3, text_config__quantization_config=...)).mxfp4_experts


def test_null_in_the_text_config_leaves_the_field_to_the_wrapper():
    assert load_config(edited(RELEASED_K3, text_config__dtype=None, text_config__eos_token_id=None)) == K3


LINEAR = "text_config__linear_attn_config__"
WEIGHTS = "text_config__quantization_config__config_groups__group_0__weights"
FAULTS_K3 = {
    "vocab_size: expected an integer of at least 1, got nothing": {"text_config__vocab_size": ...},
    "num_experts: expected an integer of at least 1, got '896'": {"text_config__num_experts": "896"},
    "num_hidden_layers: expected an integer of at least 1, got True": {"text_config__num_hidden_layers": True},
    "num_hidden_layers: expected at most 10000, got 1000000000000": {"text_config__num_hidden_layers": 10**12},
    "num_experts: expected at most 10000, got 20000": {"text_config__num_experts": 20000},
    "rms_norm_eps: expected a number above 0.0, got 1000": {"text_config__rms_norm_eps": 10**400},
    "gate_lower_bound: expected a number below 0.0 or null, got -1000": {LINEAR + "gate_lower_bound": -(10**400)},
    "num_key_value_heads: expected 96 as num_attention_heads, got 8": {"text_config__num_key_value_heads": 8},
    "num_expert_group: expected 1, got 8": {"text_config__num_expert_group": 8},
    "topk_method: expected noaux_tc, got 'greedy'": {"text_config__topk_method": "greedy"},
    "moe_router_activation_func: expected sigmoid, got 'softmax'": {
        "text_config__moe_router_activation_func": "softmax"
    },
    "mla_use_nope: expected True (rotary embedding is not supported), got False": {"text_config__mla_use_nope": False},
    "mla_use_nope: expected True (rotary embedding is not supported), got nothing": {"text_config__mla_use_nope": ...},
    "num_nextn_predict_layers: expected 0, got 1": {"text_config__num_nextn_predict_layers": 1},
    "moe_renormalize: expected True, got False": {"text_config__moe_renormalize": False},
    "tie_word_embeddings: expected False, got True": {
        "text_config__tie_word_embeddings": True,
        "tie_word_embeddings": True,
    },
    "latent_moe_use_norm: expected True": {"text_config__latent_moe_use_norm": False},
    "attn_res_block_size: expected an integer of at least 1 or null, got nothing": {
        "text_config__attn_res_block_size": ...
    },
    "hidden_act: expected situ or silu, got 'gelu'": {"text_config__hidden_act": "gelu"},
    "num_experts_per_token: expected at most num_experts=896, got 900": {"text_config__num_experts_per_token": 900},
    "linear_attn_config.head_dim: expected one of (16, 32, 64, 128, 256), got 96": {LINEAR + "head_dim": 96},
    "linear_attn_config.gate_lower_bound: expected a number below 0.0 or null, got 5.0": {
        LINEAR + "gate_lower_bound": 5.0
    },
    "qk_rope_head_dim: expected a positive multiple of 16, got 72": {"text_config__qk_rope_head_dim": 72},
    "moe_intermediate_size: expected a multiple of the MXFP4 group 32, got 3088": {
        "text_config__moe_intermediate_size": 3088
    },
    "dtype: expected bfloat16 or float32, got 'float16'": {"text_config__dtype": "float16", "dtype": "float16"},
    "dtype: expected bfloat16 as in text_config.dtype, got 'float32'": {"dtype": "float32"},
    "quantization_config.format: expected mxfp4-pack-quantized, got 'nvfp4-pack-quantized'": {
        "text_config__quantization_config__format": "nvfp4-pack-quantized"
    },
    "group_0.weights.group_size: expected 32, got 16": {WEIGHTS + "__group_size": 16},
    "group_0.weights: expected an object, got nothing": {WEIGHTS: ...},
    "model_type: expected kimi_k3 around a text_config, got 'kimi_k25'": {"model_type": "kimi_k25"},
    "text_config.model_type: expected kimi_linear, got 'deepseek_v3'": {"text_config__model_type": "deepseek_v3"},
    "once, got [93] in none": {LINEAR + "full_attn_layers": MLA_OF_K3[:-1]},
    "once, got [1] more than once": {LINEAR + "full_attn_layers": [1, *MLA_OF_K3]},
    "once, got [94] outside": {LINEAR + "full_attn_layers": [*MLA_OF_K3, 94]},
    "kda_layers: expected a list of layer numbers, got nothing": {LINEAR + "kda_layers": ...},
}


@pytest.mark.parametrize("message", FAULTS_K3)
def test_fault_is_reported_with_field_expected_and_got(message: str):
    with pytest.raises(ConfigError) as error:
        load_config(edited(RELEASED_K3, **FAULTS_K3[message]))
    assert message in str(error.value)
    assert "1 problem\n" in str(error.value)


@pytest.mark.parametrize(
    ("message", "edits"),
    [
        ("layer_types: expected 5 entries of linear_attention or full_attention", {"layer_types": ["full_attention"]}),
        ("linear_attn_config.num_heads: expected an integer of at least 1, got nothing", {"linear_num_heads": ...}),
        ("attention_bias: expected False, got True", {"attention_bias": True}),
        ("mlp_layer_types: expected dense at (0, 1) as in first_k_dense_replace", {"first_k_dense_replace": 2}),
        ("n_group: expected 1 as in num_expert_group, got 8", {"n_group": 8}),
        ("linear_head_dim: expected 64 as in linear_attn_config.head_dim", {"linear_attn_config": {"head_dim": 64}}),
        (
            "layer_types: expected full_attention at (0,) as in linear_attn_config",
            {"linear_attn_config": {"full_attn_layers": [1], "kda_layers": [2, 3, 4, 5]}},
        ),
    ],
)
def test_transformers_form_fault_is_reported(message: str, edits: dict):
    with pytest.raises(ConfigError, match="1 problem\n") as error:
        load_config(edited(TRANSFORMERS_FORM, **edits))
    assert message in str(error.value)


def test_one_error_lists_all_problems():
    with pytest.raises(ConfigError) as error:
        load_config(edited(RELEASED_KIMI_LINEAR, hidden_size=..., mla_use_nope=False, topk_group=4, vocab_size=0))
    lines = str(error.value).splitlines()
    assert lines[0] == "config: 4 problems"
    assert {line.split(":")[0].strip() for line in lines[1:]} == {
        "hidden_size",
        "mla_use_nope",
        "topk_group",
        "vocab_size",
    }


def test_a_foreign_model_type_is_the_one_problem():
    for data in ({"model_type": "llama"}, {"model_type": ["llama"]}, {"model_type": "llava", "text_config": {"a": 1}}):
        with pytest.raises(ConfigError, match=r"1 problem\n  model_type: expected kimi_k3"):
            load_config(data)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"text_config": 3}', "[" * 100_000])
def test_unreadable_config_names_the_file(tmp_path: Path, content: str | None):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=str(path)):
        load_config(path)


@pytest.mark.parametrize(
    ("field", "config"),
    [
        ("lora_eps", dataclasses.replace(K3_MINI, lora_eps=1e-5)),
        ("gate_lower_bound", dataclasses.replace(KIMI_LINEAR_MINI, gate_lower_bound=-5.0)),
        ("dense_layers", dataclasses.replace(K3_MINI, dense_layers=(0, 3))),
        ("shared_size", dataclasses.replace(K3_MINI, shared_size=100)),
    ],
)
def test_config_that_the_release_cannot_say_is_refused(field: str, config: KimiConfig):
    with pytest.raises(ConfigError, match=field):
        write_config(config)
