"""Takes `ModelWeights` apart into named pieces and says, independently of the loader, what each piece must hold."""

import torch

from kimi_kernels.config import KimiConfig
from kimi_kernels.weights import ModelWeights

Tensor = torch.Tensor


def pieces(weights: ModelWeights, local: KimiConfig) -> dict[str, tuple[Tensor, int | None]]:
    """Every weight by name, stacked ones taken apart, with the dim along which ranks split it (None: all hold all)."""
    out: dict[str, tuple[Tensor, int | None]] = {}

    def put(name: str, tensor: Tensor | None, dim: int | None = None) -> None:
        if tensor is not None:
            out[name] = tensor, dim

    def split(name: str, stacked: Tensor, parts: dict[str, tuple[int, int | None]]) -> None:
        tensors = stacked.split([rows for rows, _ in parts.values()])
        for (part, (_, dim)), tensor in zip(parts.items(), tensors, strict=True):
            put(f"{name}.{part}", tensor, dim)

    def glu(name: str, w) -> None:
        split(name, w.gate_up, dict.fromkeys(("gate", "up"), (len(w.gate_up) // 2, 0)))
        put(f"{name}.down", w.down, 1)

    put("embed", weights.embed)
    put("output_res", weights.output_res_weight)
    put("final_norm", weights.final_norm)
    put("lm_head", weights.lm_head, 0)
    width, mla_width = local.kda_heads * local.kda_head_dim, local.mla_heads * local.v_dim
    for layer in weights.layers:
        n, a, m = f"{layer.index}", layer.attn, layer.mlp
        for name in ("input_norm", "post_norm", "attn_res_weight", "mlp_res_weight"):
            put(f"{n}.{name}", getattr(layer, name))
        if layer.index in local.mla_layers:
            q = (
                (local.q_lora_rank, None)
                if a.q_b is not None
                else (local.mla_heads * (local.qk_nope_dim + local.qk_rope_dim), 0)
            )
            parts = {"q": q, "kv_a": (local.kv_lora_rank + local.qk_rope_dim, None)}
            split(f"{n}.in", a.in_proj, parts | ({"g": (mla_width, 0)} if local.mla_out_gate else {}))
            for name, dim in (("q_norm", None), ("q_b", 0), ("kv_norm", None), ("kv_b", 0), ("o_proj", 1)):
                put(f"{n}.{name}", getattr(a, name), dim)
        else:
            gate = (width, 0) if a.g_b is None else (local.decay_rank, None)
            parts = {"q": (width, 0), "k": (width, 0), "v": (width, 0), "g": gate, "f_a": (local.decay_rank, None)}
            split(f"{n}.in", a.in_proj, parts | {"b": (local.kda_heads, 0)})
            split(f"{n}.conv", a.conv, dict.fromkeys("qkv", (width, 0)))
            for name, dim in (("f_b", 0), ("g_b", 0), ("A_log", 0), ("dt_bias", 0), ("out_norm", None), ("o_proj", 1)):
                put(f"{n}.{name}", getattr(a, name), dim)
        if layer.index in local.dense_layers:
            glu(f"{n}.mlp", m)
            continue
        for name in ("router", "router_bias", "latent_down", "latent_norm", "latent_up"):
            put(f"{n}.{name}", getattr(m, name))
        for name in ("w13", "w13_scale"):
            for part, tensor in zip(("w1", "w3"), _halves(getattr(m, name)), strict=True):
                put(f"{n}.{name}.{part}", tensor, 1)
        put(f"{n}.w2", m.w2, 2)
        put(f"{n}.w2_scale", m.w2_scale, 2)
        glu(f"{n}.shared", m.shared)
    return out


def _halves(w13: Tensor | None) -> tuple[Tensor | None, ...]:
    return (None, None) if w13 is None else w13.chunk(2, dim=1)


def expected_pieces(tensors: dict[str, Tensor], config: KimiConfig) -> dict[str, Tensor]:
    """What `pieces` of the whole model must hold, straight from the stored tensors."""
    prefix = "language_model." if config.family == "k3" else ""
    out = {
        "embed": tensors[f"{prefix}model.embed_tokens.weight"],
        "final_norm": tensors[f"{prefix}model.norm.weight"],
        "lm_head": tensors[f"{prefix}lm_head.weight"],
    }

    def fold(name: str) -> Tensor:
        return tensors[f"{name}_norm.weight"].float() * tensors[f"{name}_proj.weight"].float().flatten()

    def glu(name: str, p: str) -> None:
        out.update({f"{name}.{part}": tensors[f"{p}.{part}_proj.weight"] for part in ("gate", "up", "down")})

    if config.attn_res_block_size:
        out["output_res"] = fold(f"{prefix}model.output_attn_res")
    for n in range(config.num_layers):
        p = f"{prefix}model.layers.{n}"
        a, m = f"{p}.self_attn", f"{p}.block_sparse_moe"
        out[f"{n}.input_norm"] = tensors[f"{p}.input_layernorm.weight"]
        out[f"{n}.post_norm"] = tensors[f"{p}.post_attention_layernorm.weight"]
        if config.attn_res_block_size:
            out[f"{n}.attn_res_weight"], out[f"{n}.mlp_res_weight"] = (
                fold(f"{p}.self_attention_res"),
                fold(f"{p}.mlp_res"),
            )
        if n in config.mla_layers:
            names = {
                "in.kv_a": "kv_a_proj_with_mqa",
                "kv_norm": "kv_a_layernorm",
                "kv_b": "kv_b_proj",
                "o_proj": "o_proj",
            }
            lora = {"in.q": "q_a_proj", "q_norm": "q_a_layernorm", "q_b": "q_b_proj"}
            names |= lora if config.q_lora_rank else {"in.q": "q_proj"}
            names |= {"in.g": "g_proj"} if config.mla_out_gate else {}
        else:
            names = {f"in.{x}": f"{x}_proj" for x in ("q", "k", "v", "f_a", "b")} | {"f_b": "f_b_proj"}
            names |= {"out_norm": "o_norm", "o_proj": "o_proj"} | {f"conv.{x}": f"{x}_conv1d" for x in "qkv"}
            names |= {"in.g": "g_proj"} if config.full_rank_out_gate else {"in.g": "g_a_proj", "g_b": "g_b_proj"}
            out[f"{n}.A_log"] = tensors[f"{a}.A_log"].flatten()[: config.kda_heads]
            out[f"{n}.dt_bias"] = tensors[f"{a}.dt_bias"]
        out |= {f"{n}.{piece}": tensors[f"{a}.{name}.weight"] for piece, name in names.items()}
        if n in config.dense_layers:
            glu(f"{n}.mlp", f"{p}.mlp")
            continue
        out[f"{n}.router"] = tensors[f"{m}.gate.weight"]
        out[f"{n}.router_bias"] = tensors[f"{m}.gate.e_score_correction_bias"]
        if config.latent_size:
            for piece, name in (("latent_down", "down_proj"), ("latent_norm", "norm"), ("latent_up", "up_proj")):
                out[f"{n}.{piece}"] = tensors[f"{m}.routed_expert_{name}.weight"]
        for suffix, kind in (
            (("", "weight_packed"), ("_scale", "weight_scale")) if config.mxfp4_experts else (("", "weight"),)
        ):
            for piece, w in ((f"w13{suffix}.w1", "w1"), (f"w13{suffix}.w3", "w3"), (f"w2{suffix}", "w2")):
                stored = [tensors[f"{m}.experts.{e}.{w}.{kind}"] for e in range(config.num_experts)]
                out[f"{n}.{piece}"] = torch.stack(stored)
        glu(f"{n}.shared", f"{m}.shared_experts")
    return out


def assert_whole(got: dict[str, tuple[Tensor, int | None]], config: KimiConfig, tensors: dict[str, Tensor]) -> None:
    expected = expected_pieces(tensors, config)
    assert got.keys() == expected.keys()
    for name, (tensor, _) in got.items():
        values = expected[name].to(tensor.dtype)
        assert torch.equal(values.float(), expected[name].float()), f"{name} was rounded"
        assert torch.equal(tensor, values.reshape(tensor.shape)), name
