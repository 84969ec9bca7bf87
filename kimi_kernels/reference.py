"""Every op of the decode step in plain torch: what the ops mean, in any float dtype up to float64.

Signatures are those of `op_specs.OPS`. The dtype of the first argument is the dtype of the whole computation and of the
float outputs; nothing is rounded to an activation dtype here (`backends.reference_ops` does that), and nothing is
shared
with the kernels. Loops over sequences and picks are Python loops on purpose. The functions use only what
`error_bound.Bounded` understands, so the same lines also yield a rounding-error bound.

Source   DESIGN.md section 5 names the public facts behind each formula.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from kimi_kernels.mxfp4 import dequantize

Tensor = torch.Tensor
L2_EPS = 1e-6


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """weight[tokens]; a token outside the table gives a zero row. -> [R, D]"""
    inside = (tokens >= 0) & (tokens < weight.shape[0])
    rows = weight[tokens.long().clamp(0, weight.shape[0] - 1)]
    return torch.where(inside[:, None], rows, torch.zeros_like(rows))


def attn_res_norm(prefix: Tensor, bank: list[Tensor], score_weight: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of the softmax mixture of the bank rows and, last, the prefix; scores are of the normed rows. -> [R,
    D]"""
    rows = torch.stack([*(b.to(prefix.dtype) for b in bank), prefix], dim=1)  # [R, N_BANK+1, D]
    scores = torch.rsqrt(rows.square().mean(-1) + eps) * (rows * score_weight.to(prefix.dtype)).sum(-1)
    mixture = (softmax(scores).unsqueeze(-1) * rows).sum(1)  # raw rows, not the normed ones
    return rms_norm(mixture, norm_weight, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight. -> [R, D]"""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """weight . x, no bias. -> [R, N]"""
    return torch.einsum("rc,nc->rn", x, weight.to(x.dtype))


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    conv_window: Tensor,
    slots: Tensor,
    is_new: Tensor,
    first_valid_slot: int,
) -> Tensor:
    """SiLU of a depthwise convolution over the W-1 cached inputs and the new one; the window keeps raw inputs. -> [R,
    CH]"""
    taps, steps = weight.to(x.dtype), x.shape[0] // max(1, slots.shape[0])
    z = []
    for b, slot in enumerate(slots.tolist()):
        rows = range(b * steps, (b + 1) * steps)
        if slot < first_valid_slot:
            z += [torch.zeros_like(x[r]) for r in rows]
            continue
        window = conv_window[slot].to(x.dtype)  # [W-1, CH], oldest first
        if is_new[b]:
            window = torch.zeros_like(window)
        for r in rows:
            window = torch.cat([window, x[r].unsqueeze(0)])
            z.append(silu((window * taps.T).sum(0)))
            window = window[1:]
        conv_window[slot] = window
    return torch.stack(z) if z else x


def kda_gate_bounded(
    raw_decay: Tensor, raw_beta: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float
) -> tuple[Tensor, Tensor]:
    """log_decay = lower_bound * sigmoid(exp(A_log) * (raw + dt_bias)), beta = sigmoid(raw_beta). -> [R, H, K], [R,
    H]"""
    log_decay = lower_bound * torch.sigmoid(decay_rate(A_log, raw_decay) * (raw_decay + dt_bias.to(raw_decay.dtype)))
    return log_decay, torch.sigmoid(raw_beta.to(raw_decay.dtype))


def kda_gate_softplus(raw_decay: Tensor, raw_beta: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """log_decay = -exp(A_log) * softplus(raw + dt_bias), beta = sigmoid(raw_beta). -> [R, H, K], [R, H]"""
    log_decay = -decay_rate(A_log, raw_decay) * F.softplus(raw_decay + dt_bias.to(raw_decay.dtype))
    return log_decay, torch.sigmoid(raw_beta.to(raw_decay.dtype))


def decay_rate(A_log: Tensor, like: Tensor) -> Tensor:
    """exp(A_log) per head, held at the float32 maximum so that 0 * inf cannot make a NaN. -> [H, 1]"""
    return torch.exp(A_log.to(like.dtype)).clamp(max=torch.finfo(torch.float32).max).unsqueeze(-1)


def kda_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    is_new: Tensor,
    first_valid_slot: int,
) -> Tensor:
    """Gated delta rule on state [SLOTS, H, V, K]: decay, predict from the decayed state, correct, read. -> [R, H, V]"""
    k, v, log_decay, beta = (t.to(q.dtype) for t in (k, v, log_decay, beta))
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + L2_EPS) * q.shape[-1] ** -0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + L2_EPS)
    steps = q.shape[0] // max(1, slots.shape[0])
    o = []
    for b, slot in enumerate(slots.tolist()):
        rows = range(b * steps, (b + 1) * steps)
        if slot < first_valid_slot:
            o += [torch.zeros_like(v[r]) for r in rows]
            continue
        s = state[slot].to(q.dtype)  # [H, V, K]
        if is_new[b]:
            s = torch.zeros_like(s)
        for r in rows:
            k_r = k[r].unsqueeze(1)  # [H, 1, K]
            s = s * torch.exp(log_decay[r]).unsqueeze(1)
            correction = beta[r].unsqueeze(-1) * (v[r] - (s * k_r).sum(-1))  # [H, V]
            s = s + correction.unsqueeze(-1) * k_r
            o.append((s * q[r].unsqueeze(1)).sum(-1))
        state[slot] = s
    return torch.stack(o) if o else v


def gated_rms_norm(o: Tensor, out_gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over each head's V channels times sigmoid(out_gate). -> [R, H, V]"""
    return rms_norm(o, weight, eps) * torch.sigmoid(out_gate.to(o.dtype))


def mla_kv_append(
    ckv: Tensor, norm_weight: Tensor, eps: float, latent_cache: Tensor, page_table: Tensor, seq_lens: Tensor
) -> None:
    """Writes [RMSNorm(ckv[:L]) | ckv[L:]] at positions seq_lens - T ... seq_lens - 1; seq_lens 0 writes nothing."""
    latent, page_size = norm_weight.shape[0], latent_cache.shape[1]
    steps = ckv.shape[0] // max(1, seq_lens.shape[0])
    rows = torch.cat([rms_norm(ckv[:, :latent], norm_weight, eps), ckv[:, latent:]], dim=-1)
    for b, seq_len in enumerate(seq_lens.tolist()):
        for t in range(steps):
            position = seq_len - steps + t
            if position >= 0:
                page = int(page_table[b, position // page_size])
                latent_cache[page, position % page_size] = rows[b * steps + t]


def mla_absorb_query(q: Tensor, w_uk: Tensor) -> Tensor:
    """[w_uk^T q[:nope] | q[nope:]] per head: the query against latent cache rows. -> [R, H, L+P]"""
    nope = w_uk.shape[1]
    return torch.cat([torch.einsum("rhn,hnl->rhl", q[..., :nope], w_uk.to(q.dtype)), q[..., nope:]], dim=-1)


def mla_decode(
    q_latent: Tensor,
    latent_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    kv_lora_rank: int,
) -> Tensor:
    """Attention over the cached rows, causal within the step; all channels score, the first kv_lora_rank are the
    values."""
    page_size, steps = latent_cache.shape[1], q_latent.shape[0] // max(1, seq_lens.shape[0])
    o = []
    for r in range(q_latent.shape[0]):
        b, t = divmod(r, steps)
        visible = int(seq_lens[b]) - steps + t + 1
        if visible <= 0:
            o.append(torch.zeros_like(q_latent[r][..., :kv_lora_rank]))
            continue
        positions = torch.arange(visible, device=page_table.device)
        rows = latent_cache[page_table[b, positions // page_size].long(), positions % page_size].to(q_latent.dtype)
        p = softmax(torch.einsum("hl,sl->hs", q_latent[r], rows) * scale)
        o.append(torch.einsum("hs,sl->hl", p, rows[:, :kv_lora_rank]))
    return torch.stack(o) if o else q_latent[..., :kv_lora_rank]


def mla_expand_value(o_latent: Tensor, w_uv: Tensor) -> Tensor:
    """w_uv . o_latent per head. -> [R, H, V]"""
    return torch.einsum("rhl,hvl->rhv", o_latent, w_uv.to(o_latent.dtype))


def output_gate(o: Tensor, out_gate: Tensor) -> Tensor:
    """o * sigmoid(out_gate). -> [R, N]"""
    return o * torch.sigmoid(out_gate.to(o.dtype))


def residual_add(x: Tensor, delta: Tensor) -> Tensor:
    """x + delta. -> [R, D]"""
    return x + delta.to(x.dtype)


def situ(gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta). -> [R, I]"""
    gate, up = gate_up.chunk(2, dim=-1)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * (linear_beta * torch.tanh(up / linear_beta))


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. -> [R, I]"""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """weight . x, kept in float32. -> [R, E]"""
    return linear(x, weight)


def moe_router(logits: Tensor, bias: Tensor, top_k: int, scaling: float) -> tuple[Tensor, Tensor]:
    """The top_k experts by sigmoid(logit) + bias, lower id on ties; weights from the unbiased scores. -> [R, A] twice

    A NaN score counts as 0 (a row of NaN picks experts 0 ... A-1 with weight 0).
    """
    scores = torch.nan_to_num(torch.sigmoid(logits), nan=0.0)
    key = scores + bias.to(logits.dtype)
    ids = torch.argsort(key, dim=-1, descending=True, stable=True)[:, :top_k]
    picked = scores.gather(-1, ids)
    return ids.int(), picked / (picked.sum(-1, keepdim=True) + 1e-20) * scaling


def moe_gate_up(x: Tensor, topk_ids: Tensor, w13: Tensor) -> Tensor:
    """w13[expert] . x for each pick; an id outside [0, E) gives zeros. -> [R, A, 2*I]"""
    return _per_pick(x, topk_ids, lambda e: w13[e].to(x.dtype), w13.shape[:2])


def moe_gate_up_mxfp4(x: Tensor, topk_ids: Tensor, w13_packed: Tensor, w13_scale: Tensor) -> Tensor:
    """`moe_gate_up` with MXFP4 weights. -> [R, A, 2*I]"""
    weight = lambda e: dequantize(w13_packed[e], w13_scale[e], x.dtype)  # noqa: E731
    return _per_pick(x, topk_ids, weight, w13_packed.shape[:2])


def moe_down(m: Tensor, topk_ids: Tensor, topk_weights: Tensor, w2: Tensor) -> Tensor:
    """Sum over picks of topk_weights * (w2[expert] . m); an id outside [0, E) adds nothing. -> [R, Z]"""
    y = _per_pick(m, topk_ids, lambda e: w2[e].to(m.dtype), w2.shape[:2])
    return _weighted_sum(y, topk_ids, topk_weights, w2.shape[0])


def moe_down_mxfp4(m: Tensor, topk_ids: Tensor, topk_weights: Tensor, w2_packed: Tensor, w2_scale: Tensor) -> Tensor:
    """`moe_down` with MXFP4 weights. -> [R, Z]"""
    weight = lambda e: dequantize(w2_packed[e], w2_scale[e], m.dtype)  # noqa: E731
    y = _per_pick(m, topk_ids, weight, w2_packed.shape[:2])
    return _weighted_sum(y, topk_ids, topk_weights, w2_packed.shape[0])


def argmax(logits: Tensor, vocab_start: int) -> tuple[Tensor, Tensor]:
    """Greedy token and its logit, the lowest index on ties; NaN never wins, a row of NaN gives index 0. -> [R], [R]"""
    finite = torch.where(torch.isnan(logits), torch.full_like(logits, -torch.inf), logits)
    index = (finite == finite.amax(-1, keepdim=True)).int().argmax(-1)
    return index + vocab_start, finite.gather(-1, index[:, None])[:, 0]


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def softmax(scores: Tensor) -> Tensor:
    """Softmax over the last dim."""
    p = torch.exp(scores - scores.amax(-1, keepdim=True))
    return p / p.sum(-1, keepdim=True)


def _weighted_sum(y: Tensor, topk_ids: Tensor, topk_weights: Tensor, num_experts: int) -> Tensor:
    """Sum over picks of topk_weights * y [R, A, Z]; an id outside [0, num_experts) adds nothing. -> [R, Z]"""
    known = (topk_ids >= 0) & (topk_ids < num_experts)
    weights = torch.where(known, topk_weights, torch.zeros_like(topk_weights))
    return (y * weights.to(y.dtype).unsqueeze(-1)).sum(1)


def _per_pick(x: Tensor, topk_ids: Tensor, weight: Callable[[int], Tensor], shape: Sequence[int]) -> Tensor:
    """weight(expert) . x[r] (or x[r, a]) for every row r and pick a. -> [R, A, N]"""
    num_experts, width = shape
    rows = []
    for r, ids in enumerate(topk_ids.tolist()):
        picks = [x[r] if x.ndim == 2 else x[r, a] for a in range(len(ids))]
        rows += [
            torch.einsum("c,nc->n", pick, weight(e))
            if 0 <= e < num_experts
            else torch.zeros(width, dtype=x.dtype, device=topk_ids.device)
            for a, (e, pick) in enumerate(zip(ids, picks, strict=True))
        ]
    if not rows:
        return torch.zeros(*topk_ids.shape, width, dtype=x.dtype, device=topk_ids.device)
    return torch.stack(rows).reshape(*topk_ids.shape, width)
