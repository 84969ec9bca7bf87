"""`--linear-attn-decode-backend kimi_triton`: SGLang's own step with our Triton ops in its KDA layers.

    causal_conv1d, kda_gate_bounded or kda_gate_softplus, kda_recurrent      in place of SGLang's conv and recurrence

For a look at single ops in the real engine, and for models that the whole step does not cover. The gated norm and the
projections stay SGLang's. Prefill keeps SGLang's Triton kernels. SGLang's dispatcher knows no backend from outside
(sgl-project/sglang pull request 40414 proposes one), so its constructor and the decode of its KDA backend are wrapped.
"""

import logging
from typing import Any

from sglang_integration import compat

NAME = "kimi_triton"
MARK = "_kimi_decode_calls"  # on SGLang's backend object: how many layers decoded through our ops

logger = logging.getLogger(__name__)


def register() -> None:
    compat.add_linear_attn_backend(NAME)
    compat.hook_around(f"{compat.KDA_DISPATCHER}.__init__", around_dispatcher)
    compat.hook_around(f"{compat.KDA_BACKEND}.forward_decode", around_decode)


def chosen() -> bool:
    """Whether this server decodes KDA through our ops."""
    base, decode = compat.linear_attn_backends()
    return (decode or base) == NAME


def around_dispatcher(original: Any, dispatcher: Any, decode: Any, prefill: Any, verify: Any) -> None:
    """SGLang maps names it does not know to one value and then refuses it: ours becomes its Triton backend."""
    if chosen():
        decode, prefill, verify = (
            compat.triton_backend() if backend.is_custom() else backend for backend in (decode, prefill, verify)
        )
    original(dispatcher, decode, prefill, verify)


def around_decode(
    original: Any, backend: Any, layer: Any, forward_batch: Any, mixed_qkv: Any, a: Any, b: Any, **kwargs: Any
) -> Any:
    """One KDA layer of a decode step: mixed_qkv [B, 3*H*K], a [B, H*K], b [1, B, H] act. -> [1, B, H, V] act"""
    if not chosen():
        return original(backend, layer, forward_batch, mixed_qkv=mixed_qkv, a=a, b=b, **kwargs)
    cache = backend.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
    conv, state = cache.conv[0], cache.temporal
    slots = backend.forward_metadata.mamba_cache_indices
    if not hasattr(backend, MARK):
        _announce(layer, conv, state)
        setattr(backend, MARK, 0)
    setattr(backend, MARK, getattr(backend, MARK) + 1)
    out = kda_decode(layer, conv, state, slots, mixed_qkv, a, b)
    backend._track_mamba_state_decode(forward_batch, conv, state, slots, layer.layer_id)
    return out


def kda_decode(layer: Any, conv: Any, state: Any, slots: Any, mixed_qkv: Any, a: Any, b: Any) -> Any:
    """The ops over one layer's pools conv [SLOTS, W-1, 3*H*K], state [SLOTS, H, V, K]. -> [1, B, H, V] act"""
    import torch

    import triton_ops
    from sglang_integration.views import FIRST_VALID_SLOT

    rows, heads = len(slots), state.shape[1:2]
    where = (slots, torch.zeros_like(slots, dtype=torch.bool), FIRST_VALID_SLOT)
    z = triton_ops.causal_conv1d(mixed_qkv, layer.conv_weights, conv, *where)
    q, k, v = (x.unflatten(-1, (*heads, -1)) for x in z.chunk(3, dim=-1))
    gates = (a.reshape(rows, *heads, -1), b.reshape(rows, *heads))
    parameters = (layer.A_log.reshape(heads), layer.dt_bias.reshape(*heads, -1))
    if layer.lower_bound is None:
        log_decay, beta = triton_ops.kda_gate_softplus(*gates, *parameters)
    else:
        log_decay, beta = triton_ops.kda_gate_bounded(*gates, *parameters, float(layer.lower_bound))
    o = triton_ops.kda_recurrent(q, k, v, log_decay, beta, state, *where)
    return o.to(mixed_qkv.dtype).unsqueeze(0)


def _announce(layer: Any, conv: Any, state: Any) -> None:
    gate = "kda_gate_softplus" if layer.lower_bound is None else "kda_gate_bounded"
    logger.info(
        "kimi-kernels: KDA layers decode through causal_conv1d, %s, kda_recurrent (%d heads of %d, conv %s, state %s)",
        gate,
        state.shape[1],
        state.shape[2],
        conv.dtype,
        state.dtype,
    )
