"""Reads a Hugging Face `config.json` into `KimiConfig`, and writes it back in the released form of its family.

Three forms are read: K3 (in `text_config`, or bare), the released Kimi-Linear, and what transformers' `save_pretrained`
writes for Kimi-Linear (`layer_types`, `mlp_layer_types`, `linear_head_dim`, ... in place of `linear_attn_config` and
`first_k_dense_replace`). Every problem of a config is reported in one ConfigError.

Source   config.json of moonshotai/Kimi-K3 and moonshotai/Kimi-Linear-48B-A3B-Instruct; `KimiLinearConfig` of
         transformers 5.24. No form has a field for the eps of kv_a_layernorm and q_a_layernorm: the model codes of both
         families build these norms with their class default, 1e-6, whatever rms_norm_eps says.
"""

import json
from pathlib import Path
from typing import Any

import torch

from kimi_kernels.config import MXFP4_GROUP, ConfigError, KimiConfig
from kimi_kernels.hf_fields import ABSENT, Fields
from kimi_kernels.hf_released import released_form

LORA_EPS = 1e-6
MAX_LAYERS = MAX_EXPERTS = 10_000  # more is a typing error, and would only take for ever
MODEL_TYPES = ("kimi_k3", "kimi_linear")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
KDA_HEAD_DIMS = (16, 32, 64, 128, 256)  # a program holds whole rows of the state, padded to a power of two
MLA_DIM_MULTIPLE = 16  # the smallest contraction of a tensor-core product
K3_ONLY = (
    "attn_res_block_size",
    "routed_expert_hidden_size",
    "activation_situ_beta",
    "latent_moe_use_norm",
    "mla_use_output_gate",
)


def load_config(source: Path | str | dict[str, Any]) -> KimiConfig:
    """The config of a checkpoint directory, a config.json or its parsed dict. Raises ConfigError with every problem."""
    where, data = _read(source)
    outer = data if "text_config" in data else {}
    text = data["text_config"] if outer else data
    if not isinstance(text, dict):
        raise ConfigError(f"{where}: text_config: expected an object, got {text!r}")
    f = Fields(text, outer)
    family = _family(f, outer)
    if any(given not in (None, *MODEL_TYPES) for given in (data.get("model_type"), text.get("model_type"))):
        _raise_on(where, f.problems[:1])  # of a foreign model nothing else would fit either
    native = "mlp_layer_types" in f.data  # transformers' own form: what it leaves out is fixed in its model code
    linear = f.section("linear_attn_config", required=not native)
    required_in_k3 = ABSENT if family == "k3" else None
    values = _sizes(f)
    values |= _layers(f, linear, values["num_layers"]) | _kda(linear, required_in_k3)
    values |= _mla(f, native, required_in_k3) | _moe(f, native, required_in_k3)
    _check_fixed(f)
    _raise_on(where, f.problems)
    return KimiConfig(family=family, lora_eps=LORA_EPS, **values)


def write_config(config: KimiConfig) -> dict[str, Any]:
    """config.json content in the released form of the family. Raises ConfigError where that form cannot say it."""
    data = released_form(config)
    again = load_config(data)
    if again != config:
        lost = [name for name in vars(config) if getattr(config, name) != getattr(again, name)]
        raise ConfigError(f"the released form of {config.family} cannot express {', '.join(lost)} of this config")
    return data


def _read(source: Path | str | dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if isinstance(source, dict):
        return "config", source
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: its JSON is nested too deeply") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return str(path), data


def _raise_on(where: str, problems: list[str]) -> None:
    if problems:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise ConfigError(f"{where}: {count}\n  " + "\n  ".join(problems))


def _family(f: Fields, outer: dict[str, Any]) -> str:
    if outer and outer.get("model_type") != "kimi_k3":
        f.problem("model_type", "kimi_k3 around a text_config", outer.get("model_type"), prefix="")
    given = f.raw("model_type")
    if given != "kimi_linear":
        bare = not outer and given not in (ABSENT, *MODEL_TYPES)
        f.problem("model_type", "kimi_k3 or kimi_linear" if bare else "kimi_linear", given)
    linear = f.data.get("linear_attn_config")
    marks = [f.data.get(name) for name in K3_ONLY]
    marks += [linear.get("use_full_rank_gate"), linear.get("gate_lower_bound")] if isinstance(linear, dict) else []
    return "k3" if outer or any(marks) else "kimi-linear"


def _sizes(f: Fields) -> dict[str, Any]:
    dtype = f.raw("dtype")
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        f.problem("dtype", "bfloat16 or float32", dtype)
    eos = f.raw("eos_token_id", None)
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    if not all(isinstance(token, int) for token in eos_ids):
        f.problem("eos_token_id", "an integer or a list of integers", eos)
    return {
        "num_layers": f.integer("num_hidden_layers", maximum=MAX_LAYERS),
        "hidden_size": f.integer("hidden_size", multiple=16),
        "vocab_size": f.integer("vocab_size"),
        "max_positions": f.integer("max_position_embeddings"),
        "rms_eps": f.number("rms_norm_eps", above=0.0),
        "eos_token_ids": eos_ids,
        "dtype": DTYPES.get(name),
    }


def _layers(f: Fields, linear: Fields, count: int | None) -> dict[str, Any]:
    """Which layers are MLA and which have a dense MLP, 0-based; the lists of `linear_attn_config` are 1-based."""
    if count is None:
        return {}
    mla = linear.layer_split("kda_layers", "full_attn_layers", count)
    kinds = f.layer_kinds("layer_types", ("linear_attention", "full_attention"), count)
    if mla is None and kinds is None:
        linear.problem("kda_layers and full_attn_layers", f"every layer of 1..{count} once", ABSENT)
    elif None not in (mla, kinds) and mla != kinds:
        f.problem("layer_types", f"full_attention at {mla} as in linear_attn_config", kinds)
    dense = f.layer_kinds("mlp_layer_types", ("sparse", "dense"), count)
    if dense is None or "first_k_dense_replace" in f.data:
        first, every = f.integer("first_k_dense_replace", minimum=0), f.integer("moe_layer_freq", default=1)
        by_rule = tuple(layer for layer in range(count) if layer < (first or 0) or layer % (every or 1))
        if dense not in (None, by_rule):
            f.problem("mlp_layer_types", f"dense at {by_rule} as in first_k_dense_replace", dense)
        dense = by_rule
    return {"mla_layers": kinds if mla is None else mla, "dense_layers": dense}


def _kda(linear: Fields, required_in_k3: object) -> dict[str, Any]:
    head_dim = linear.integer("head_dim", choices=KDA_HEAD_DIMS)
    return {
        "kda_heads": linear.integer("num_heads"),
        "kda_head_dim": head_dim,
        "conv_taps": linear.integer("short_conv_kernel_size", minimum=2),
        "full_rank_out_gate": linear.flag("use_full_rank_gate", default=required_in_k3) or False,
        "gate_lower_bound": linear.number("gate_lower_bound", below=0.0, nullable=True, default=required_in_k3),
    }


def _mla(f: Fields, native: bool, required_in_k3: object) -> dict[str, Any]:
    heads, kv_heads = f.integer("num_attention_heads"), f.raw("num_key_value_heads", None)
    if kv_heads not in (None, heads):
        f.problem("num_key_value_heads", f"{heads} as num_attention_heads", kv_heads)
    f.fixed("mla_use_nope", True, default=True if native else ABSENT, why="rotary embedding is not supported")
    return {
        "mla_heads": heads,
        "q_lora_rank": f.integer("q_lora_rank", multiple=MLA_DIM_MULTIPLE, nullable=True),
        "kv_lora_rank": f.integer("kv_lora_rank", multiple=MLA_DIM_MULTIPLE),
        "qk_nope_dim": f.integer("qk_nope_head_dim", multiple=MLA_DIM_MULTIPLE),
        "qk_rope_dim": f.integer("qk_rope_head_dim", multiple=MLA_DIM_MULTIPLE),
        "v_dim": f.integer("v_head_dim", multiple=MLA_DIM_MULTIPLE),
        "mla_out_gate": f.flag("mla_use_output_gate", default=required_in_k3) or False,
    }


def _moe(f: Fields, native: bool, required_in_k3: object) -> dict[str, Any]:
    f.fixed("moe_router_activation_func", "sigmoid", default="sigmoid" if native else ABSENT)
    experts = f.integer("num_experts", maximum=MAX_EXPERTS)
    top_k, width = f.integer("num_experts_per_token"), f.integer("moe_intermediate_size")
    if experts and top_k and top_k > experts:
        f.problem("num_experts_per_token", f"at most num_experts={experts}", top_k)
    latent = f.integer("routed_expert_hidden_size", nullable=True, default=required_in_k3)
    f.fixed("latent_moe_use_norm", latent is not None, default=False, why="a norm exactly where there is a latent")
    activation = f.raw("hidden_act")
    if activation not in ("situ", "silu"):
        f.problem("hidden_act", "situ or silu", activation)
    beta = ABSENT if activation == "situ" else None
    mxfp4 = _mxfp4(f)
    for name, size in (("routed_expert_hidden_size", latent), ("moe_intermediate_size", width)):
        if mxfp4 and size and size % MXFP4_GROUP:
            f.problem(name, f"a multiple of the MXFP4 group {MXFP4_GROUP}", size)
    return {
        "dense_size": f.integer("intermediate_size"),
        "num_experts": experts,
        "top_k": top_k,
        "expert_size": width,
        "shared_size": (f.integer("num_shared_experts") or 0) * (width or 0),
        "latent_size": latent,
        "routed_scaling": f.number("routed_scaling_factor", above=0.0),
        "activation": activation,
        "situ_beta": f.number("activation_situ_beta", above=0.0, default=beta) or 4.0,
        "situ_linear_beta": f.number("activation_situ_linear_beta", above=0.0, default=beta) or 25.0,
        "mxfp4_experts": mxfp4,
        "attn_res_block_size": f.integer("attn_res_block_size", nullable=True, default=required_in_k3),
    }


def _mxfp4(f: Fields) -> bool:
    """Whether the experts are MXFP4; any other quantisation is a problem."""
    if f.raw("quantization_config", None) is None:
        return False
    quantization = f.section("quantization_config")
    quantization.fixed("quant_method", "compressed-tensors")
    quantization.fixed("format", "mxfp4-pack-quantized")
    quantization.fixed("kv_cache_scheme", None, default=None)
    groups = quantization.section("config_groups")
    for name in groups.data:
        group = groups.section(name)
        group.fixed("input_activations", None, default=None)
        group.fixed("output_activations", None, default=None)
        weights = group.section("weights")
        for field, expected in (("num_bits", 4), ("type", "float"), ("strategy", "group"), ("group_size", MXFP4_GROUP)):
            weights.fixed(field, expected)
        weights.fixed("symmetric", True, default=True)
        weights.fixed("scale_dtype", "torch.uint8", default="torch.uint8")
    return True


def _check_fixed(f: Fields) -> None:
    """Fields with one supported value; the default is what the released model codes assume."""
    f.fixed("moe_renormalize", True)
    f.fixed("num_expert_group", 1, default=1)
    f.fixed("topk_group", 1, default=1)
    f.fixed("topk_method", "noaux_tc", default="noaux_tc")
    f.fixed("num_nextn_predict_layers", 0, default=0)
    f.fixed("tie_word_embeddings", False, default=False)
    f.fixed("attention_bias", False, default=False)
