"""The decode step, stated once. Reference, Triton ops, megakernel schedule and byte budget all run this page.

`ops` is any namespace with the functions of `op_specs.OPS` and the two collectives `all_reduce` and `all_reduce_max`.
Every op returns new tensors; only `causal_conv1d`, `kda_recurrent` and `mla_kv_append` change the pools of `state`.

Source   DESIGN.md section 5 (HF modeling_kimi_linear.py of moonshotai/Kimi-K3, five engines agree).
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from kimi_kernels.config import KimiConfig
from kimi_kernels.state import Batch, KdaState, MlaState, State
from kimi_kernels.weights import DenseWeights, KdaWeights, MlaWeights, ModelWeights, MoeWeights

Tensor = torch.Tensor


@dataclass(frozen=True)
class StepOutput:
    tokens: Tensor  # [R] int64, greedy next token
    logits: Tensor  # [R, VOCAB] act, this rank's part of the vocabulary


def decode_step(
    ops: SimpleNamespace, config: KimiConfig, weights: ModelWeights, state: State, batch: Batch, tokens: Tensor
) -> StepOutput:
    """Runs rows of `tokens` [R] through the model. `config` and `weights` are this rank's; `state` is updated in
    place."""
    prefix = ops.embedding(tokens, weights.embed)  # [R, D]
    bank: list[Tensor] = []  # residual bank: prefix at the start of each block, oldest first
    for layer, layer_state in zip(weights.layers, state.layers, strict=True):
        h = mix(ops, config, prefix, bank, layer.attn_res_weight, layer.input_norm)
        attention: Callable = kda if isinstance(layer.attn, KdaWeights) else mla
        a = attention(ops, config, layer.attn, layer_state, batch, h)
        if config.starts_block(layer.index):
            bank = [*bank, prefix]
            prefix = a
        else:
            prefix = ops.residual_add(prefix, a)
        h = mix(ops, config, prefix, bank, layer.mlp_res_weight, layer.post_norm)
        mlp: Callable = dense_mlp if isinstance(layer.mlp, DenseWeights) else moe
        prefix = ops.residual_add(prefix, mlp(ops, config, layer.mlp, h))
    h = mix(ops, config, prefix, bank, weights.output_res_weight, weights.final_norm)
    logits = ops.linear(h, weights.lm_head)  # [R, VOCAB]
    tokens, values = ops.argmax(logits, weights.vocab_start)
    return StepOutput(ops.all_reduce_max(tokens, values), logits)


def mix(ops, config: KimiConfig, prefix: Tensor, bank: list[Tensor], score_weight: Tensor | None, norm_weight: Tensor):
    """The normed input of a sublayer: attention-residual mixture where there is a bank, else the prefix itself."""
    if not bank:
        return ops.rms_norm(prefix, norm_weight, config.rms_eps)
    return ops.attn_res_norm(prefix, bank, score_weight, norm_weight, config.rms_eps)


def kda(ops, config: KimiConfig, w: KdaWeights, state: KdaState, batch: Batch, h: Tensor) -> Tensor:
    """Kimi Delta Attention: short convolution, decay gate, delta rule, gated norm."""
    heads = (-1, config.kda_heads, config.kda_head_dim)
    width = config.kda_heads * config.kda_head_dim
    gate_width = width if w.g_b is None else config.decay_rank
    qkv, out_gate, f_a, raw_beta = ops.linear(h, w.in_proj).split(
        [3 * width, gate_width, config.decay_rank, config.kda_heads], dim=-1
    )
    if w.g_b is not None:
        out_gate = ops.linear(out_gate, w.g_b)
    raw_decay = ops.linear(f_a, w.f_b).unflatten(-1, heads[1:])  # [R, H, K]
    where = (batch.slots, batch.is_new, batch.first_valid_slot)
    q, k, v = (
        x.unflatten(-1, heads[1:]) for x in ops.causal_conv1d(qkv, w.conv, state.conv_window, *where).chunk(3, dim=-1)
    )
    if config.gate_lower_bound is None:
        log_decay, beta = ops.kda_gate_softplus(raw_decay, raw_beta, w.A_log, w.dt_bias)
    else:
        log_decay, beta = ops.kda_gate_bounded(raw_decay, raw_beta, w.A_log, w.dt_bias, config.gate_lower_bound)
    o = ops.kda_recurrent(q, k, v, log_decay, beta, state.recurrent, *where)  # [R, H, V]
    y = ops.gated_rms_norm(o, out_gate.unflatten(-1, heads[1:]), w.out_norm, config.rms_eps)
    return ops.all_reduce(ops.linear(y.flatten(-2), w.o_proj))


def mla(ops, config: KimiConfig, w: MlaWeights, state: MlaState, batch: Batch, h: Tensor) -> Tensor:
    """Multi-head latent attention without rotary embedding, absorbed form, over the paged latent cache."""
    nope, latent = config.qk_nope_dim, config.kv_lora_rank
    q_width = config.q_lora_rank or config.mla_heads * (nope + config.qk_rope_dim)
    gate_width = config.mla_heads * config.v_dim if config.mla_out_gate else 0
    q, ckv, out_gate = ops.linear(h, w.in_proj).split([q_width, latent + config.qk_rope_dim, gate_width], dim=-1)
    if w.q_b is not None:
        q = ops.linear(ops.rms_norm(q, w.q_norm, config.lora_eps), w.q_b)
    cache = (state.latent_cache, batch.page_table, batch.seq_lens)
    ops.mla_kv_append(ckv, w.kv_norm, config.lora_eps, *cache)
    q_latent = ops.mla_absorb_query(q.unflatten(-1, (config.mla_heads, -1)), w.kv_b[:, :nope])  # [R, H, L+P]
    o_latent = ops.mla_decode(q_latent, *cache, config.softmax_scale, latent)  # [R, H, L]
    o = ops.mla_expand_value(o_latent, w.kv_b[:, nope:]).flatten(-2)  # [R, H*V]
    if config.mla_out_gate:
        o = ops.output_gate(o, out_gate)
    return ops.all_reduce(ops.linear(o, w.o_proj))


def dense_mlp(ops, config: KimiConfig, w: DenseWeights, h: Tensor) -> Tensor:
    return ops.all_reduce(glu_mlp(ops, config, w, h))


def glu_mlp(ops, config: KimiConfig, w: DenseWeights, h: Tensor) -> Tensor:
    """down(act(gate(h), up(h))); a partial sum under tensor parallel."""
    return ops.linear(activation(ops, config, ops.linear(h, w.gate_up)), w.down)


def activation(ops, config: KimiConfig, gate_up: Tensor) -> Tensor:
    if config.activation == "situ":
        return ops.situ(gate_up, config.situ_beta, config.situ_linear_beta)
    return ops.swiglu(gate_up)


def moe(ops, config: KimiConfig, w: MoeWeights, h: Tensor) -> Tensor:
    """Routed experts, on the latent where the model has one, plus shared experts on the hidden size."""
    logits = ops.router_logits(h, w.router)
    topk_ids, topk_weights = ops.moe_router(logits, w.router_bias, config.top_k, config.routed_scaling)
    z = h if w.latent_down is None else ops.linear(h, w.latent_down)  # [R, Z]
    routed = experts(ops, config, w, z, topk_ids, topk_weights)
    shared = glu_mlp(ops, config, w.shared, h)
    if w.latent_down is None:
        return ops.all_reduce(ops.residual_add(routed, shared))
    # the norm needs the complete latent sum: norm(sum) != sum(norm)
    routed, shared = ops.all_reduce(routed), ops.all_reduce(shared)
    routed = ops.linear(ops.rms_norm(routed, w.latent_norm, config.rms_eps), w.latent_up)
    return ops.residual_add(routed, shared)


def experts(ops, config: KimiConfig, w: MoeWeights, z: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """Weighted sum over the picked experts of w2 act(w1 z, w3 z); a partial sum under tensor parallel."""
    if w.w13_scale is None:
        gate_up = ops.moe_gate_up(z, topk_ids, w.w13)  # [R, A, 2*I]
    else:
        gate_up = ops.moe_gate_up_mxfp4(z, topk_ids, w.w13, w.w13_scale)
    m = activation(ops, config, gate_up.flatten(0, 1)).unflatten(0, topk_ids.shape)  # [R, A, I]
    if w.w2_scale is None:
        return ops.moe_down(m, topk_ids, topk_weights, w.w2)
    return ops.moe_down_mxfp4(m, topk_ids, topk_weights, w.w2, w.w2_scale)
