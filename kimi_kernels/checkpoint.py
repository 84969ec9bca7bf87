"""Loads one tensor-parallel rank of a safetensors checkpoint into `ModelWeights`, reading that rank's part only.

Every stored projection is cut in one of three ways, and everything the ops read stacked is allocated once and filled in
place, experts included:

    rows    output rows of this rank: heads, MLP widths, vocabulary of lm_head
    cols    input columns of this rank: o_proj, down_proj, expert w2 (whole MXFP4 groups, since the width is a multiple)
    whole   replicated: norms, router, latent projections, f_a, g_a, q_a, kv_a, embedding

Source   DESIGN.md section 5
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

from kimi_kernels.checkpoint_files import CheckpointError, CheckpointFiles, dtype_name
from kimi_kernels.config import KimiConfig
from kimi_kernels.tensor_names import checkpoint_specs, layer_prefix, name_prefix
from kimi_kernels.weights import DenseWeights, KdaWeights, LayerWeights, MlaWeights, ModelWeights, MoeWeights

__all__ = ["CheckpointError", "checkpoint_specs", "load_weights"]

Tensor = torch.Tensor
Cut = Literal["rows", "cols", "whole"]


def load_weights(
    directory: Path | str,
    config: KimiConfig,
    tp: int = 1,
    rank: int = 0,
    layers: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
    progress: bool | Literal["always"] = True,
) -> ModelWeights:
    """Weights of rank `rank` of `tp`; `config` is the whole model's, `layers` (0-based) limits what is read.

    `progress=True` shows a bar on stderr where that is a terminal. Raises, before anything is allocated, one
    CheckpointError that names every missing, unknown, mis-shaped or mis-typed tensor; ConfigError where `tp` does not
    divide the model.
    """
    config.shard(tp)
    if not 0 <= rank < tp:
        raise ValueError(f"load_weights: rank must be in [0, {tp}), got {rank}")
    layers = range(config.num_layers) if layers is None else layers
    if not all(0 <= layer < config.num_layers for layer in layers):
        raise ValueError(f"load_weights: layers must be in [0, {config.num_layers}), got {list(layers)}")
    with CheckpointFiles(directory, config, layers) as files:
        total = sum(math.prod(files.slice(name).get_shape()) for name in files.specs)
        disable = {True: None, False: True, "always": False}[progress]  # None: tqdm asks whether stderr is a terminal
        with tqdm(total=total, unit=" values", unit_scale=True, desc=f"rank {rank}/{tp}", disable=disable) as bar:
            return _model(_Reader(files, config, tp, rank, device, bar), layers)


class _Reader:
    """Copies this rank's part of stored tensors into fresh tensors on `device`."""

    def __init__(self, files: CheckpointFiles, config: KimiConfig, tp: int, rank: int, device, bar: tqdm):
        self.files, self.config, self.tp, self.rank, self.device, self.bar = files, config, tp, rank, device, bar

    def has(self, name: str) -> bool:
        return name in self.files.specs

    def shape(self, name: str, cut: Cut) -> list[int]:
        """Shape of this rank's part."""
        shape = list(self.files.specs[name].shape)
        if cut != "whole":
            shape[("rows", "cols").index(cut)] //= self.tp
        return shape

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def fill(self, out: Tensor, name: str, cut: Cut) -> None:
        """Writes this rank's part of `name` into `out`, widening exactly; narrowing must be exact too."""
        rows, *rest = self.shape(name, cut)
        start = self.rank * rows if cut == "rows" else 0
        index = [slice(start, start + rows), *(slice(0, n) for n in rest)]
        if cut == "cols":
            index[1] = slice(self.rank * rest[0], (self.rank + 1) * rest[0])
        part = self.files.slice(name)[tuple(index)].reshape(out.shape)
        if part.dtype != out.dtype == torch.bfloat16 and not torch.equal(part, part.bfloat16().float()):
            raise CheckpointError(f"{name}: its float32 values do not fit {dtype_name(out.dtype)}")
        out.copy_(part)
        self.bar.update(math.prod(self.files.specs[name].shape))

    def stack(self, *parts: tuple[str, Cut], dtype: torch.dtype | None = None) -> Tensor:
        """The parts one below the other. -> [sum of rows, ...]"""
        shapes = [self.shape(name, cut) for name, cut in parts]
        rows = [shape[0] for shape in shapes]
        out = self.empty((sum(rows), *shapes[0][1:]), dtype or self.config.dtype)
        for target, (name, cut) in zip(out.split(rows), parts, strict=True):
            self.fill(target, name, cut)
        return out

    def read(self, name: str, cut: Cut = "whole", dtype: torch.dtype | None = None) -> Tensor:
        return self.stack((name, cut), dtype=dtype)

    def a_log(self, name: str) -> Tensor:
        """This rank's heads among the first H entries; K3 stores more, Kimi-Linear [1, 1, H, 1]. -> [H/tp] float32"""
        heads = self.config.kda_heads // self.tp
        stored = self.files.slice(name)[...].flatten()[self.rank * heads : (self.rank + 1) * heads]
        self.bar.update(math.prod(self.files.slice(name).get_shape()))
        return self.empty([heads], torch.float32).copy_(stored)

    def score(self, part: str) -> Tensor | None:
        """Attention-residual score weight: norm weight times projection, folded in float32. -> [D] float32"""
        if self.config.attn_res_block_size is None:
            return None
        norm, projection = (self.read(f"{part}_{x}.weight", dtype=torch.float32) for x in ("norm", "proj"))
        return norm * projection[0]


def _model(read: _Reader, layers: Sequence[int]) -> ModelWeights:
    prefix = name_prefix(read.config)
    lm_head = read.read(f"{prefix}lm_head.weight", "rows")
    return ModelWeights(
        embed=read.read(f"{prefix}model.embed_tokens.weight"),
        layers=tuple(_layer(read, layer) for layer in layers),
        output_res_weight=read.score(f"{prefix}model.output_attn_res"),
        final_norm=read.read(f"{prefix}model.norm.weight"),
        lm_head=lm_head,
        vocab_start=read.rank * len(lm_head),
    )


def _layer(read: _Reader, layer: int) -> LayerWeights:
    prefix = layer_prefix(read.config, layer)
    attention = _mla if layer in read.config.mla_layers else _kda
    dense = layer in read.config.dense_layers
    return LayerWeights(
        index=layer,
        input_norm=read.read(f"{prefix}input_layernorm.weight"),
        post_norm=read.read(f"{prefix}post_attention_layernorm.weight"),
        attn_res_weight=read.score(f"{prefix}self_attention_res"),
        mlp_res_weight=read.score(f"{prefix}mlp_res"),
        attn=attention(read, f"{prefix}self_attn."),
        mlp=_glu(read, f"{prefix}mlp.") if dense else _moe(read, f"{prefix}block_sparse_moe."),
    )


def _kda(read: _Reader, p: str) -> KdaWeights:
    low_rank = read.has(f"{p}g_a_proj.weight")
    gate: tuple[str, Cut] = (f"{p}g_a_proj.weight", "whole") if low_rank else (f"{p}g_proj.weight", "rows")
    qkv: list[tuple[str, Cut]] = [(f"{p}{x}_proj.weight", "rows") for x in "qkv"]
    conv: list[tuple[str, Cut]] = [(f"{p}{x}_conv1d.weight", "rows") for x in "qkv"]
    return KdaWeights(
        in_proj=read.stack(*qkv, gate, (f"{p}f_a_proj.weight", "whole"), (f"{p}b_proj.weight", "rows")),
        conv=read.stack(*conv, dtype=torch.float32).squeeze(1),
        f_b=read.read(f"{p}f_b_proj.weight", "rows"),
        g_b=read.read(f"{p}g_b_proj.weight", "rows") if low_rank else None,
        A_log=read.a_log(f"{p}A_log"),
        dt_bias=read.read(f"{p}dt_bias", "rows", torch.float32).unflatten(0, (-1, read.config.kda_head_dim)),
        out_norm=read.read(f"{p}o_norm.weight", dtype=torch.float32),
        o_proj=read.read(f"{p}o_proj.weight", "cols"),
    )


def _mla(read: _Reader, p: str) -> MlaWeights:
    lora = read.has(f"{p}q_a_proj.weight")
    parts: list[tuple[str, Cut]] = [(f"{p}q_a_proj.weight", "whole") if lora else (f"{p}q_proj.weight", "rows")]
    parts.append((f"{p}kv_a_proj_with_mqa.weight", "whole"))
    if read.config.mla_out_gate:
        parts.append((f"{p}g_proj.weight", "rows"))
    kv_b = read.read(f"{p}kv_b_proj.weight", "rows")  # per head the K rows, then the V rows
    return MlaWeights(
        in_proj=read.stack(*parts),
        q_norm=read.read(f"{p}q_a_layernorm.weight") if lora else None,
        q_b=read.read(f"{p}q_b_proj.weight", "rows") if lora else None,
        kv_norm=read.read(f"{p}kv_a_layernorm.weight"),
        kv_b=kv_b.unflatten(0, (-1, read.config.qk_nope_dim + read.config.v_dim)),
        o_proj=read.read(f"{p}o_proj.weight", "cols"),
    )


def _glu(read: _Reader, p: str) -> DenseWeights:
    gate_up = read.stack((f"{p}gate_proj.weight", "rows"), (f"{p}up_proj.weight", "rows"))
    return DenseWeights(gate_up, read.read(f"{p}down_proj.weight", "cols"))


def _moe(read: _Reader, p: str) -> MoeWeights:
    latent = read.config.latent_size is not None
    w13, w2 = _experts(read, p, "weight_packed" if read.config.mxfp4_experts else "weight")
    w13_scale, w2_scale = _experts(read, p, "weight_scale") if read.config.mxfp4_experts else (None, None)
    return MoeWeights(
        router=read.read(f"{p}gate.weight"),
        router_bias=read.read(f"{p}gate.e_score_correction_bias", dtype=torch.float32),
        latent_down=read.read(f"{p}routed_expert_down_proj.weight") if latent else None,
        latent_norm=read.read(f"{p}routed_expert_norm.weight") if latent else None,
        latent_up=read.read(f"{p}routed_expert_up_proj.weight") if latent else None,
        w13=w13,
        w13_scale=w13_scale,
        w2=w2,
        w2_scale=w2_scale,
        shared=_glu(read, f"{p}shared_experts."),
    )


def _experts(read: _Reader, p: str, kind: str) -> tuple[Tensor, Tensor]:
    """All experts stacked: w1 (gate) rows then w3 (up) rows, and w2. -> [E, 2*I, ...], [E, Z, ...]"""
    E, dtype = read.config.num_experts, read.files.specs[f"{p}experts.0.w1.{kind}"].dtype
    rows, cols = read.shape(f"{p}experts.0.w1.{kind}", "rows")
    w13 = read.empty((E, 2 * rows, cols), dtype)
    w2 = read.empty((E, *read.shape(f"{p}experts.0.w2.{kind}", "cols")), dtype)
    for e in range(E):
        read.fill(w13[e, :rows], f"{p}experts.{e}.w1.{kind}", "rows")
        read.fill(w13[e, rows:], f"{p}experts.{e}.w3.{kind}", "rows")
        read.fill(w2[e], f"{p}experts.{e}.w2.{kind}", "cols")
    return w13, w2
