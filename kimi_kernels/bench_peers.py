"""Kernels of other packages on the inputs of our ops: those of fla-core in Triton, those of torch (cuBLAS and its own).

`PEERS[op]` lists peers; `peer.prepare(*args)` takes the arguments of our op and returns a call without arguments.
Copies into the layout that a peer wants (contiguous rows, gathered state) are made there, outside the time. A note says
where a peer computes less than our op, or in another precision.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kimi_kernels.compare import reference_bounds
from kimi_kernels.error_bound import bounded

Tensor = torch.Tensor
Call = Callable[[], Tensor]


class PeerMissing(RuntimeError):
    """A peer that cannot run here, with the reason."""


@dataclass(frozen=True)
class Peer:
    """`prepare` raises PeerMissing where the package, or a function of it, is not there."""

    name: str
    prepare: Callable[..., Call]
    note: str = ""


def relative_error(op: str, args: tuple, output: Tensor) -> float:
    """Norm of the difference to the float64 reference over its norm; `args` must hold what the peer has read."""
    want = bounded(reference_bounds(op, args)[0][0]).value
    got = output.reshape(want.shape).double()
    return float(torch.linalg.vector_norm(got - want) / torch.linalg.vector_norm(want))


def _fla(module: str, name: str) -> Callable:
    try:
        return getattr(importlib.import_module(f"fla.{module}"), name)
    except ImportError as error:
        raise PeerMissing(f"fla-core is not installed here ({error})") from error
    except AttributeError as error:
        raise PeerMissing(f"this fla-core has no {name} in fla.{module}") from error


def _fla_attn_res_norm(prefix: Tensor, bank: list[Tensor], score_weight: Tensor, norm_weight: Tensor, eps: float):
    run, ones = _fla("ops.attnres", "fused_attnres"), torch.ones_like(score_weight)
    return lambda: run(score_weight, [*bank, prefix], ones, output_rms_weight=norm_weight, rms_eps=eps)


def _fla_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Call:
    run, x = _fla("modules.norm.layernorm", "rms_norm"), x.contiguous()
    return lambda: run(x, weight, None, eps=eps)


def _torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Call:
    return lambda: F.rms_norm(x, weight.shape, weight, eps)


def _cublas(x: Tensor, weight: Tensor) -> Call:
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    return lambda: torch.mm(x, weight.T, out=out)


def _fla_conv(x: Tensor, weight: Tensor, conv_window: Tensor, slots: Tensor, _new, _first: int) -> Call:
    run = _fla("modules.causal_conv1d", "causal_conv1d_update")
    window = conv_window[slots.long()].transpose(1, 2)  # [B, CH, W-1], oldest first; fla drops its first column
    cache = torch.cat([window[..., :1], window], dim=-1).contiguous()
    return lambda: run(x, cache, weight=weight, activation="silu")[0]


def _kda_inputs(q, k, v, log_decay, beta) -> dict[str, Tensor]:
    """[B, H, ...] of one token per sequence as fla's [B, 1, H, ...]."""
    named = {"q": q, "k": k, "v": v, "g": log_decay, "beta": beta}
    return {name: tensor.contiguous().unsqueeze(1) for name, tensor in named.items()}


def _fla_kda_in_place(q, k, v, log_decay, beta, state: Tensor, slots: Tensor, _new, _first: int) -> Call:
    run, inputs = _fla("ops.kda.fused_recurrent", "fused_recurrent_kda_fwd"), _kda_inputs(q, k, v, log_decay, beta)
    pool, out = state.clone(), torch.empty_like(inputs["v"])
    options = dict(inplace_final_state=True, state_v_first=True, use_qk_l2norm_in_kernel=True)
    return lambda: run(**inputs, initial_state=pool, ssm_state_indices=slots, out=out, **options)[0]


def _fla_kda(q, k, v, log_decay, beta, state: Tensor, slots: Tensor, _new, _first: int) -> Call:
    run, inputs = _fla("ops.kda", "fused_recurrent_kda"), _kda_inputs(q, k, v, log_decay, beta)
    initial = state[slots.long()]
    options = dict(output_final_state=True, state_v_first=True, use_qk_l2norm_in_kernel=True)
    return lambda: run(**inputs, initial_state=initial, **options)[0]


def _fla_gated_rms_norm(o: Tensor, out_gate: Tensor, weight: Tensor, eps: float) -> Call:
    run, o, gate = _fla("modules.norm.fused_norm_gate", "rms_norm_gated"), o.to(out_gate.dtype), out_gate.contiguous()
    return lambda: run(o, gate, weight, None, activation="sigmoid", eps=eps)


def _torch_mla_decode(
    q_latent: Tensor, latent_cache: Tensor, page_table: Tensor, seq_lens: Tensor, scale, rank
) -> Call:
    """Equal lengths only: two products around a softmax over contiguous rows."""
    length = int(seq_lens.max())
    rows = latent_cache[page_table.long()].flatten(1, 2)[:, :length].contiguous()  # [B, S, L+P]
    keys, values = rows.transpose(1, 2), rows[..., :rank]
    empty = torch.empty(1, dtype=rows.dtype, device=rows.device)

    def run() -> Tensor:
        scores = torch.baddbmm(empty, q_latent, keys, beta=0, alpha=scale)  # [B, H, S]
        return torch.bmm(torch.softmax(scores, dim=-1), values)

    return run


def _torch_absorb(q: Tensor, w_uk: Tensor) -> Call:
    nope, extra = w_uk.shape[1], q[..., w_uk.shape[1] :]
    heads_first = q[..., :nope].transpose(0, 1)
    return lambda: torch.cat([torch.bmm(heads_first, w_uk).transpose(0, 1), extra], dim=-1)


def _torch_expand(o_latent: Tensor, w_uv: Tensor) -> Call:
    heads_first, weight = o_latent.transpose(0, 1), w_uv.transpose(1, 2)
    return lambda: torch.bmm(heads_first, weight).transpose(0, 1)


PEERS: dict[str, tuple[Peer, ...]] = {
    "embedding": (Peer("torch embedding", lambda tokens, weight: lambda: F.embedding(tokens, weight)),),
    "attn_res_norm": (Peer("fla fused_attnres", _fla_attn_res_norm),),
    "rms_norm": (Peer("torch rms_norm", _torch_rms_norm), Peer("fla rms_norm", _fla_rms_norm, "contiguous rows")),
    "linear": (Peer("cuBLAS mm(out=)", _cublas),),
    "causal_conv1d": (Peer("fla causal_conv1d_update", _fla_conv, "act output, no slots"),),
    "kda_recurrent": (
        Peer("fla fused_recurrent_kda in place", _fla_kda_in_place),
        Peer("fla fused_recurrent_kda", _fla_kda, "writes a new state"),
    ),
    "gated_rms_norm": (Peer("fla rms_norm_gated", _fla_gated_rms_norm, "act input"),),
    "mla_absorb_query": (Peer("torch bmm + cat", _torch_absorb),),
    "mla_decode": (Peer("torch bmm + softmax", _torch_mla_decode, "contiguous cache, no pages"),),
    "mla_expand_value": (Peer("torch bmm", _torch_expand),),
    "residual_add": (Peer("torch add", lambda x, delta: lambda: torch.add(x, delta)),),
    "router_logits": (Peer("cuBLAS mm(out=)", _cublas, "logits rounded to act"),),
    "argmax": (Peer("torch argmax", lambda logits, _start: lambda: torch.argmax(logits, dim=-1), "no value"),),
}
