"""Which tensors of a loaded SGLang model `build` reads: path under the causal LM, shape and dtype on this rank.

    Kimi-Linear KDA   fused_qkvbfg_a_proj [q | k | v | b | f_a | g_a], fused_fg_b_proj [2, H*K, F]
    K3 KDA            fused_qkvg_proj [q | k | v | g], f_a_proj, b_proj, f_b_proj
    MLA               q_proj and kv_a_proj_with_mqa, or fused_qkv_a_proj_with_mqa [q_a | kv_a]; g_proj where gated
    experts           w13 [E, 2*I, Z] gate rows then up rows, w2 [E, Z, I]; MXFP4 as loaded, before SGLang repacks it

Source   sgl-project/sglang srt/models/kimi_linear.py, srt/models/kimi_k3.py, srt/models/deepseek_v2.py (0.5.23)
"""

import functools
from typing import Any, NamedTuple

import torch

from kimi_kernels.config import MXFP4_GROUP, KimiConfig
from sglang_integration.compat import RAW_MXFP4

MAX_SHOWN = 8


class Want(NamedTuple):
    """`at_least`: the first dim may be larger (SGLang pads the vocabulary); dtype None: any, it is converted."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    at_least: bool = False


def weight_table(config: KimiConfig) -> dict[str, Want]:
    """Path -> what is expected there; `config` is this rank's."""
    act, D = config.dtype, config.hidden_size
    table = {
        "model.embed_tokens.weight": Want((config.vocab_size, D), act, at_least=True),
        "lm_head.weight": Want((config.vocab_size, D), act, at_least=True),
        "model.norm.weight": Want((D,), act),
    }
    if config.attn_res_block_size is not None:
        table |= _residual(config, "model.output_attn_res")
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        attention = _mla(config) if layer in config.mla_layers else _kda(config)
        mlp = _glu(config, "mlp.", config.dense_size) if layer in config.dense_layers else _moe(config)
        table |= {prefix + path: want for path, want in (_norms(config) | attention | mlp).items()}
    return table


def weight_problems(text: Any, config: KimiConfig) -> list[str]:
    """What `build` would not find in the causal LM `text`, at most a few lines."""
    problems = [line for path, want in weight_table(config).items() if (line := _problem(text, path, want))]
    more = len(problems) - MAX_SHOWN
    return problems[:MAX_SHOWN] + ([f"and {more} more weights"] if more > 0 else [])


def find(text: Any, path: str) -> Any:
    """The object at a dotted path, digits being list indices; None where a part is missing."""

    def step(found: Any, name: str) -> Any:
        if name.isdigit():
            return found[int(name)] if found is not None and int(name) < len(found) else None
        return getattr(found, name, None)

    return functools.reduce(step, path.split("."), text)


def _problem(text: Any, path: str, want: Want) -> str | None:
    found = find(text, path)
    expected = f"{list(want.shape)} {'' if want.dtype is None else want.dtype}".strip()
    if not isinstance(found, torch.Tensor):
        return f"weight {path} {expected} is missing"
    rows = found.shape[:1] >= want.shape[:1] if want.at_least else found.shape[:1] == want.shape[:1]
    fits = rows and found.shape[1:] == want.shape[1:] and want.dtype in (None, found.dtype)
    if fits and found.stride(-1) == 1:
        return None
    return f"weight {path} must be {expected}, got {list(found.shape)} {found.dtype} strides {found.stride()}"


def _norms(config: KimiConfig) -> dict[str, Want]:
    D = config.hidden_size
    table = {f"{name}_layernorm.weight": Want((D,), config.dtype) for name in ("input", "post_attention")}
    if config.attn_res_block_size is not None:
        table |= _residual(config, "self_attention_res") | _residual(config, "mlp_res")
    return table


def _residual(config: KimiConfig, name: str) -> dict[str, Want]:
    D = config.hidden_size
    return {f"{name}_norm.weight": Want((D,), config.dtype), f"{name}_proj.weight": Want((1, D), config.dtype)}


def _kda(config: KimiConfig) -> dict[str, Want]:
    act, D, H, F = config.dtype, config.hidden_size, config.kda_heads, config.decay_rank
    width = H * config.kda_head_dim
    shapes: dict[str, tuple[int, ...]] = {"o_proj": (D, width)}
    if config.full_rank_out_gate:
        shapes |= {"fused_qkvg_proj": (4 * width, D), "f_a_proj": (F, D), "b_proj": (H, D), "f_b_proj": (width, F)}
    else:
        shapes |= {"fused_qkvbfg_a_proj": (3 * width + H + 2 * F, D), "fused_fg_b_proj": (2, width, F)}
    return {
        **{f"self_attn.{name}.weight": Want(shape, act) for name, shape in shapes.items()},
        "self_attn.attn.conv_weights": Want((3 * width, config.conv_taps), torch.float32),
        "self_attn.A_log": Want((1, 1, H, 1), torch.float32),
        "self_attn.dt_bias": Want((width,), torch.float32),
        "self_attn.o_norm.weight": Want((config.kda_head_dim,), None),
    }


def _mla(config: KimiConfig) -> dict[str, Want]:
    D, H, L, P = config.hidden_size, config.mla_heads, config.kv_lora_rank, config.qk_rope_dim
    query, rank = H * (config.qk_nope_dim + P), config.q_lora_rank
    shapes: dict[str, tuple[int, ...]] = {"kv_a_layernorm": (L,), "o_proj": (D, H * config.v_dim)}
    shapes["kv_b_proj"] = (H * (config.qk_nope_dim + config.v_dim), L)
    if rank is None:
        shapes |= {"q_proj": (query, D), "kv_a_proj_with_mqa": (L + P, D)}
    else:
        shapes |= {"fused_qkv_a_proj_with_mqa": (rank + L + P, D), "q_a_layernorm": (rank,), "q_b_proj": (query, rank)}
    if config.mla_out_gate:
        shapes["g_proj"] = (H * config.v_dim, D)
    return {f"self_attn.{name}.weight": Want(shape, config.dtype) for name, shape in shapes.items()}


def _glu(config: KimiConfig, prefix: str, width: int) -> dict[str, Want]:
    D = config.hidden_size
    shapes = {"gate_up_proj": (2 * width, D), "down_proj": (D, width)}
    return {f"{prefix}{name}.weight": Want(shape, config.dtype) for name, shape in shapes.items()}


def _moe(config: KimiConfig) -> dict[str, Want]:
    D, E, Z = config.hidden_size, config.num_experts, config.expert_in
    table = {
        "mlp.gate.weight": Want((E, D), config.dtype),
        "mlp.gate.e_score_correction_bias": Want((E,), None),
    }
    if config.latent_size is not None:
        shapes = {"down_proj": (Z, D), "norm": (Z,), "up_proj": (D, Z)}
        table |= {f"mlp.routed_expert_{name}.weight": Want(shape, config.dtype) for name, shape in shapes.items()}
    return table | _experts(config) | _glu(config, "mlp.shared_experts.", config.shared_size)


def _experts(config: KimiConfig) -> dict[str, Want]:
    E, Z, I = config.num_experts, config.expert_in, config.expert_size
    if not config.mxfp4_experts:
        shapes = {"w13_weight": (E, 2 * I, Z), "w2_weight": (E, Z, I)}
        return {f"mlp.experts.{name}": Want(shape, config.dtype) for name, shape in shapes.items()}
    packed = ((E, 2 * I, Z // 2), (E, 2 * I, Z // MXFP4_GROUP), (E, Z, I // 2), (E, Z, I // MXFP4_GROUP))
    return {f"mlp.experts.{RAW_MXFP4}.{part}": Want(shape, torch.uint8) for part, shape in enumerate(packed)}
