"""What the whole-step plugin serves, one MegakernelSpec per architecture; what it does not serve is a reason in words.

SGLang checks a spec before it loads weights and joins every reason into one refusal. Features that are not listed
(`features` is empty) are refused by name: pipeline, expert and context parallelism, speculative decoding, LoRA, ...
"""

import dataclasses
import functools
from typing import Any

import torch

from kimi_kernels.config import ConfigError, KimiConfig
from kimi_kernels.hf_config import DTYPES, load_config
from sglang_integration import compat
from sglang_integration.weight_table import weight_problems

MAX_ROWS = 8
NAMES = {"KIMI_LINEAR": "kimi-kernels-kimi-linear", "K3_TEXT": "kimi-kernels-k3-text", "K3": "kimi-kernels-k3"}
# Hopper is what was measured; tensor parallelism needs the collectives of the step on SGLang's group
ISAS = frozenset({"sm_90"})
TP_SIZES = frozenset({1})
# a setting of the server -> the values under which pools, weights and logits are what `views` and `build` read
SERVER_ARGS = {
    "enable_linear_replayssm": frozenset({False}),
    "enable_linear_replayssm_spec": frozenset({False}),
    "enable_unified_memory": frozenset({False}),
    "enable_page_major_kv_layout": frozenset({False}),
    "enable_int8_mamba_checkpoint": frozenset({False}),
    "enable_return_hidden_states": frozenset({False}),
    "enable_return_aux_hidden_states": frozenset({False}),
    "enable_fp32_lm_head": frozenset({False}),
    "kv_cache_dtype": frozenset({"auto", "bf16", "bfloat16"}),
    "mamba_ssm_dtype": frozenset({None, "float32"}),
}
# runners that leave bfloat16 experts as they were loaded: gate rows, then up rows
PLAIN_MOE_RUNNERS = ("auto", "triton")


def __getattr__(name: str) -> Any:
    """The specs, built when SGLang asks for one: `spec:K3` costs nothing until then."""
    if name in NAMES:
        return _spec(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _spec(name: str) -> Any:
    from sglang_integration.step import build

    types = compat.contract()
    return types.MegakernelSpec(
        name=NAMES[name],
        requires=types.Requirements(isas=ISAS, tp_sizes=TP_SIZES, dtypes=frozenset(DTYPES), server_args=SERVER_ARGS),
        features=frozenset(),
        # declared for bfloat16, not measured yet; in float32 the engine tests hold 1e-3
        numerics=types.Numerics(types.NumericsKind.TOLERANCE, {"logprob": 0.02}),
        max_rows=MAX_ROWS,
        build=build,
        api_version=compat.API_VERSION,
        config_disable_reasons=config_reasons,
        model_disable_reasons=model_reasons,
    )


def model_config(hf_config: Any, dtype: torch.dtype | None = None) -> KimiConfig:
    """Our config from the config object that SGLang read; `dtype` is what the server runs in. Raises ConfigError."""
    data = hf_config.to_dict()
    text = data["text_config"] if isinstance(data.get("text_config"), dict) else data
    # SGLang's config class fills in a default where the release has only model_max_length
    text.pop("model_max_length", None)
    config = load_config(data)
    return config if dtype is None else dataclasses.replace(config, dtype=dtype)


def config_reasons(server: Any, hf_config: Any) -> list[str]:
    """Before weights are loaded: `server` is SGLang's resolved settings."""
    reasons = [f"this SGLang ({compat.installed_version()}) lacks {name}" for name in compat.missing()]
    try:
        config = model_config(hf_config)
    except ConfigError as error:
        return reasons + [line.strip() for line in str(error).splitlines()[1:]]
    runner = server.moe_runner_backend
    if not config.mxfp4_experts and runner not in PLAIN_MOE_RUNNERS:
        reasons.append(f"moe_runner_backend {runner!r} is not one of {sorted(PLAIN_MOE_RUNNERS)}")
    if not config.mxfp4_experts and getattr(server, "quantization", None):
        reasons.append(f"quantization {server.quantization!r} is not supported, weights must be as released")
    return reasons


def model_reasons(model: Any, hf_config: Any) -> list[str]:
    """After weights are loaded, on each rank: what `build` would read and does not find as expected."""
    text = compat.text_model(model)
    config = model_config(hf_config, compat.act_dtype(text))
    reasons = weight_problems(text, config)
    if any(compat.up_rows_first(layer.mlp) for layer in text.model.layers):
        reasons.append("the experts hold their up rows before their gate rows")
    conv, temporal = compat.state_dtypes(hf_config)
    if conv != config.dtype:
        reasons.append(f"SGLANG_MAMBA_CONV_DTYPE gives {conv}, the model runs in {config.dtype}")
    if temporal != torch.float32:
        reasons.append(f"the state dtype is {temporal}, not torch.float32")
    if text.capture_aux_hidden_states:
        reasons.append("hidden states of inner layers are captured, the step does not return them")
    if getattr(text.config, "logit_scale", 1.0) != 1.0:
        reasons.append(f"config.logit_scale {text.config.logit_scale} is not 1.0")
    return reasons
