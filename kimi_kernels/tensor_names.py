"""Names, shapes and dtypes of every text tensor of a released checkpoint, for both families.

    K3            language_model.model.layers.L....   experts MXFP4, small KDA parameters float32
    Kimi-Linear   model.layers.L....                  experts plain, only A_log and dt_bias float32

Source   DESIGN.md section 5; published tensor lists of moonshotai/Kimi-K3 (497,220 tensors with the vision tower)
         and moonshotai/Kimi-Linear-48B-A3B-Instruct (20,493 tensors).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kimi_kernels.config import MXFP4_GROUP, KimiConfig

VISION_PREFIXES = ("vision_tower.", "mm_projector.")
FP32_PARAMETERS = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")


class TensorSpec(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


def checkpoint_specs(config: KimiConfig, layers: Sequence[int] | None = None) -> dict[str, TensorSpec]:
    """Full name -> (shape, dtype), in layer order; `layers` limits the per-layer tensors. `config` is unsharded."""
    specs = {name_prefix(config) + name: spec for name, spec in _top(config).items()}
    for layer in range(config.num_layers) if layers is None else layers:
        prefix = layer_prefix(config, layer)
        specs |= {prefix + name: spec for name, spec in layer_specs(config, layer).items()}
    return specs


def layer_specs(config: KimiConfig, layer: int) -> dict[str, TensorSpec]:
    """The tensors of one layer, names relative to `layer_prefix`."""
    attention = _mla(config) if layer in config.mla_layers else _kda(config)
    mlp = _glu(config, "mlp.", config.dense_size) if layer in config.dense_layers else _moe(config)
    return _act(config, _norms(config)) | attention | mlp


def name_prefix(config: KimiConfig) -> str:
    return "language_model." if config.family == "k3" else ""


def layer_prefix(config: KimiConfig, layer: int) -> str:
    return f"{name_prefix(config)}model.layers.{layer}."


def stored_name_aliases(config: KimiConfig) -> dict[str, str]:
    """Stored name -> released name, where transformers 5.24 `save_pretrained` differs from the release.

    It renames every `mlp` back to `block_sparse_moe`, the dense layers too, which the release keeps as `mlp`.
    """
    if config.family == "k3":
        return {}
    return {
        f"{layer_prefix(config, layer)}block_sparse_moe.{part}_proj.weight": (
            f"{layer_prefix(config, layer)}mlp.{part}_proj.weight"
        )
        for layer in config.dense_layers
        for part in ("gate", "up", "down")
    }


def accepts_shape(name: str, spec: TensorSpec, heads: int, shape: tuple[int, ...]) -> bool:
    """A_log is per head; K3 stores it longer than the head count, Kimi-Linear as [1, 1, H, 1]. All else is exact."""
    if not name.endswith("A_log"):
        return shape == spec.shape
    return shape in ((heads,), (1, 1, heads, 1)) or (len(spec.shape) == len(shape) == 1 and shape[0] >= heads)


def accepted_dtypes(name: str, spec: TensorSpec, family: str) -> tuple[torch.dtype, ...]:
    """Kimi-Linear keeps small parameters in bfloat16 or float32, depending on who saved it.

    K3 is strict: its small parameters are float32, and bfloat16 ones have been rounded by a generic loader.
    """
    loose = (*FP32_PARAMETERS, "block_sparse_moe.gate.weight")  # transformers keeps the router in float32
    if family == "k3" or not name.endswith(loose):
        return (spec.dtype,)
    if name.endswith("gate.weight"):
        return tuple(dict.fromkeys((spec.dtype, torch.float32)))
    return (torch.bfloat16, torch.float32)


def _act(config: KimiConfig, shapes: dict[str, tuple[int, ...]]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(shape, config.dtype) for name, shape in shapes.items()}


def _top(config: KimiConfig) -> dict[str, TensorSpec]:
    D = config.hidden_size
    shapes = {"model.embed_tokens.weight": (config.vocab_size, D), "model.norm.weight": (D,)}
    if config.attn_res_block_size is not None:
        shapes |= {"model.output_attn_res_norm.weight": (D,), "model.output_attn_res_proj.weight": (1, D)}
    return _act(config, shapes | {"lm_head.weight": (config.vocab_size, D)})


def _norms(config: KimiConfig) -> dict[str, tuple[int, ...]]:
    D = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,)}
    if config.attn_res_block_size is not None:
        for part in ("self_attention_res", "mlp_res"):
            shapes |= {f"{part}_norm.weight": (D,), f"{part}_proj.weight": (1, D)}
    return shapes


def _kda(config: KimiConfig) -> dict[str, TensorSpec]:
    D, H, K, F = config.hidden_size, config.kda_heads, config.kda_head_dim, config.decay_rank
    gate = {"g_proj": (H * K, D)} if config.full_rank_out_gate else {"g_a_proj": (F, D), "g_b_proj": (H * K, F)}
    shapes = {"q_proj": (H * K, D), "k_proj": (H * K, D), "v_proj": (H * K, D), **gate}
    shapes |= {"f_a_proj": (F, D), "f_b_proj": (H * K, F), "b_proj": (H, D), "o_proj": (D, H * K)}
    small = torch.float32 if config.family == "k3" else config.dtype
    a_log = (max(H, K),) if config.family == "k3" else (1, 1, H, 1)
    return {
        **_act(config, {f"self_attn.{name}.weight": shape for name, shape in shapes.items()}),
        **{f"self_attn.{x}_conv1d.weight": TensorSpec((H * K, 1, config.conv_taps), small) for x in "qkv"},
        "self_attn.A_log": TensorSpec(a_log, torch.float32),
        "self_attn.dt_bias": TensorSpec((H * K,), torch.float32),
        "self_attn.o_norm.weight": TensorSpec((K,), small),
    }


def _mla(config: KimiConfig) -> dict[str, TensorSpec]:
    D, H, L, P = config.hidden_size, config.mla_heads, config.kv_lora_rank, config.qk_rope_dim
    nope, V, rank = config.qk_nope_dim, config.v_dim, config.q_lora_rank
    if rank is None:
        shapes: dict[str, tuple[int, ...]] = {"q_proj": (H * (nope + P), D)}
    else:
        shapes = {"q_a_proj": (rank, D), "q_a_layernorm": (rank,), "q_b_proj": (H * (nope + P), rank)}
    shapes |= {"kv_a_proj_with_mqa": (L + P, D), "kv_a_layernorm": (L,), "kv_b_proj": (H * (nope + V), L)}
    if config.mla_out_gate:
        shapes["g_proj"] = (H * V, D)
    shapes["o_proj"] = (D, H * V)
    return _act(config, {f"self_attn.{name}.weight": shape for name, shape in shapes.items()})


def _glu(config: KimiConfig, prefix: str, width: int) -> dict[str, TensorSpec]:
    D = config.hidden_size
    shapes = {"gate_proj": (width, D), "up_proj": (width, D), "down_proj": (D, width)}
    return _act(config, {f"{prefix}{name}.weight": shape for name, shape in shapes.items()})


def _moe(config: KimiConfig) -> dict[str, TensorSpec]:
    D, E, Z, I = config.hidden_size, config.num_experts, config.expert_in, config.expert_size
    specs = _act(config, {"block_sparse_moe.gate.weight": (E, D)})
    bias = torch.float32 if config.family == "k3" else config.dtype
    specs["block_sparse_moe.gate.e_score_correction_bias"] = TensorSpec((E,), bias)
    if config.latent_size is not None:
        latent = {"down_proj": (Z, D), "norm": (Z,), "up_proj": (D, Z)}
        specs |= _act(config, {f"block_sparse_moe.routed_expert_{n}.weight": shape for n, shape in latent.items()})
    specs |= _glu(config, "block_sparse_moe.shared_experts.", config.shared_size)
    matrices = (("w1", I, Z), ("w2", Z, I), ("w3", I, Z))
    parts = {f"{w}.{kind}": spec for w, *shape in matrices for kind, spec in _expert(config, *shape).items()}
    return specs | {f"block_sparse_moe.experts.{e}.{part}": spec for e in range(E) for part, spec in parts.items()}


def _expert(config: KimiConfig, rows: int, cols: int) -> dict[str, TensorSpec]:
    """One expert matrix [rows, cols]: as it is, or two E2M1 codes a byte with one E8M0 byte per group."""
    if not config.mxfp4_experts:
        return {"weight": TensorSpec((rows, cols), config.dtype)}
    return {
        "weight_packed": TensorSpec((rows, cols // 2), torch.uint8),
        "weight_scale": TensorSpec((rows, cols // MXFP4_GROUP), torch.uint8),
    }
