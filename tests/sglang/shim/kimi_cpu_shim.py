"""What SGLang 0.5.23 needs on a machine without a GPU, for tests only: a plugin that SGLang loads in every process.

Nothing under test is replaced. SGLang's decode kernels run in Triton's interpreter as they are; what is replaced is

    prefill of KDA       the chunked kernel is wrong in the interpreter (8 % in float32): the recurrence, token by token
    fla's exp and log    aliases made when a module is imported, which the interpreter does not see
    the GPU              `binding.torch` reports one Hopper GPU, so that the flag's checks go on
    CUDA streams of K3   the model makes three and uses them under graph capture only
    MXFP4 experts        dequantised in float32 and run by SGLang's own plain torch experts; loading is SGLang's
"""

import os
import sys
import types

ALIASES = ("exp", "exp2", "log", "log2")


def register() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    _late_bound_math()
    _recurrent_prefill()
    _pretend_hopper()
    _no_streams()
    _plain_mxfp4()


def _late_bound_math() -> None:
    import sglang.kernels.ops.attention.fla.fused_recurrent  # noqa: F401
    import sglang.kernels.ops.attention.fla.op as op
    import triton.language as tl

    originals = {name: getattr(op, name) for name in ALIASES}

    def late(name):
        def call(*args, **kwargs):
            kwargs.pop("_semantic", None)
            return getattr(tl, name)(*args, **kwargs)

        return call

    replacements = {name: late(name) for name in ALIASES}
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType) and module.__name__.startswith("sglang.kernels"):
            for name in ALIASES:
                if vars(module).get(name) is originals[name]:
                    setattr(module, name, replacements[name])


def _recurrent_prefill() -> None:
    from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel

    def extend(
        self,
        q,
        k,
        v,
        g,
        beta,
        *,
        ssm_states,
        cache_indices,
        query_start_loc,
        A_log=None,
        dt_bias=None,
        lower_bound=None,
        beta_is_raw=False,
        return_intermediate_states=False,
        **_,
    ):
        import torch

        out = torch.empty_like(v)
        starts = query_start_loc.tolist()
        decay_scale = A_log.reshape(-1, 1).exp()
        bias = dt_bias.reshape(q.shape[-2:])
        for sequence, (start, stop) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
            slot = int(cache_indices[sequence])
            state = ssm_states[slot].float()
            for t in range(start, stop):
                raw = g[0, t].float() + bias
                if lower_bound is None:
                    log_decay = -decay_scale * torch.nn.functional.softplus(raw)
                else:
                    log_decay = lower_bound * torch.sigmoid(decay_scale * raw)
                rate = beta[0, t].float()
                rate = rate.sigmoid() if beta_is_raw else rate
                out[0, t], state = _delta_step(q[0, t], k[0, t], v[0, t], log_decay, rate, state)
            ssm_states[slot] = state.to(ssm_states.dtype)
        return (out, None) if return_intermediate_states else out

    TritonKDAKernel.extend = extend


def _delta_step(q, k, v, log_decay, beta, state):
    """One token of the delta rule: q, k [H, K], v [H, V], state [H, V, K] float32. -> o [H, V], new state"""
    import torch

    unit = [x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6) for x in (q, k)]
    state = state * log_decay.exp().unsqueeze(-2)
    error = v.float() - torch.einsum("hvk,hk->hv", state, unit[1])
    state = state + (beta.unsqueeze(-1) * error).unsqueeze(-1) * unit[1].unsqueeze(-2)
    o = torch.einsum("hvk,hk->hv", state, unit[0]) * q.shape[-1] ** -0.5
    return o.to(v.dtype), state


class _Overlay:
    """A module with some of its names replaced."""

    def __init__(self, module, **names):
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name):
        return getattr(self._module, name)


def _pretend_hopper() -> None:
    import sglang.srt.kernel_plugins.nvidia.binding as binding
    import torch

    properties = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    cuda = _Overlay(
        torch.cuda,
        is_available=lambda: True,
        current_device=lambda: 0,
        get_device_properties=lambda device=None: properties,
        mem_get_info=lambda device=None: (2**34, 2**34),
        is_current_stream_capturing=lambda: False,
    )
    binding.torch = _Overlay(torch, cuda=cuda)


def _no_streams() -> None:
    import sglang.srt.models.kimi_k3 as kimi_k3
    import torch

    kimi_k3.torch = _Overlay(torch, cuda=_Overlay(torch.cuda, Stream=lambda *args, **kwargs: None))


def _plain_mxfp4() -> None:
    import torch
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from sglang.srt.layers.quantization.mxfp4 import Mxfp4MoEMethod

    from kimi_kernels.mxfp4 import dequantize

    def process(self, layer):
        for name in ("w13", "w2"):
            packed, scale = getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_weight_scale")
            values = dequantize(packed.data, scale.data, torch.float32)
            for old in (f"{name}_weight", f"{name}_weight_scale", f"{name}_weight_bias"):
                delattr(layer, old)
            setattr(layer, f"{name}_weight", torch.nn.Parameter(values, requires_grad=False))

    def apply(self, layer, dispatch_output):
        out = moe_forward_native(
            layer, dispatch_output.hidden_states, dispatch_output.topk_output, self.moe_runner_config
        )
        return StandardCombineInput(hidden_states=out)

    # bfloat16 arithmetic of the interpreter is wrong
    CompressedTensorsConfig.get_supported_act_dtypes = lambda self: [torch.float32]
    Mxfp4MoEMethod.process_weights_after_loading = process
    Mxfp4MoEMethod.apply = apply
