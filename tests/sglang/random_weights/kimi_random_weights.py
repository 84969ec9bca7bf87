"""Random weights that a model can work with, in place of SGLang's own for `--load-format dummy`; a plugin, for tests.

SGLang fills every parameter, norms and expert biases included, with values up to 1e-3: the logits are then flat and all
tokens pick the same experts. The rules here are those of `kimi_kernels.mini`, by SGLang's names. Values depend on the
name of a parameter alone, so that engines with and without a plugin, in any number of processes, hold the same model.

On Hopper SGLang turns MXFP4 experts to bfloat16 unless another runner is asked for, with a function of triton_kernels,
a package that may be missing: one that gives the same values stands in for it while weights are loaded.
"""

import math
import sys
import types
import zlib
from unittest import mock

RESIDUAL_OUTPUTS = (".o_proj.weight", ".down_proj.weight", ".w2_weight", ".routed_expert_up_proj.weight")
ENDS = ("embed_tokens.weight", "lm_head.weight")


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.model_loader.weight_utils.initialize_dummy_weights"
    HookRegistry.register(target, lambda original, model, *args, **kwargs: fill(model), HookType.AROUND)
    target = "sglang.srt.layers.quantization.mxfp4.Mxfp4MoEMethod.process_weights_after_loading"
    HookRegistry.register(target, with_upcast, HookType.AROUND)


def with_upcast(original, *args):
    path = "triton_kernels.numerics_details.mxfp"
    parents = {name: types.ModuleType(name) for name in ("triton_kernels", "triton_kernels.numerics_details")}
    with mock.patch.dict(sys.modules, parents | {path: types.SimpleNamespace(upcast_from_mxfp=upcast)}):
        return original(*args)


def upcast(packed, scale, target_dtype, axis):
    """Experts one by one: all of them in float32 would take four times their memory."""
    import torch

    from kimi_kernels.mxfp4 import dequantize

    assert axis == -1
    return torch.stack([dequantize(*expert, target_dtype) for expert in zip(packed, scale, strict=True)])


def fill(model) -> None:
    """Fills all parameters of a model of SGLang in place, on their device."""
    import torch

    bounded = any(getattr(module, "lower_bound", None) is not None for module in model.modules())
    with torch.no_grad():
        state = model.state_dict()
        for name, parameter in state.items():
            generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
            _draw(name, parameter, generator, bounded)
        embed, head = (next(p for name, p in state.items() if name.endswith(end)) for end in ENDS)
        _tie_loosely(embed, head, layers=sum(name.endswith("input_layernorm.weight") for name in state))


def _draw(name: str, p, generator, bounded: bool) -> None:
    import torch

    fan_in = p.shape[-1] if p.ndim else 1
    if p.dtype == torch.uint8:
        if name.endswith("scale"):
            _draw_scale(p, 0.5 if ".w2" in name else 1.0, generator)
        else:
            p.random_(0, 256, generator=generator)
    elif name.endswith("A_log"):
        p.uniform_(1.0, 16.0, generator=generator).log_()
    elif name.endswith("dt_bias") and bounded:
        p.normal_(-1.5, 0.5, generator=generator)
    elif name.endswith("dt_bias"):
        p.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_().expm1_().log_()  # inverse softplus
    elif name.endswith("e_score_correction_bias"):
        p.uniform_(-0.5, 0.5, generator=generator)
    elif p.ndim < 2 and "norm" in name:
        p.normal_(1.0, 0.1, generator=generator)
    elif p.ndim < 2 or name.endswith("bias"):
        p.zero_()
    elif name.endswith("embed_tokens.weight"):
        p.normal_(0.0, 1.0, generator=generator)
    else:
        share = 0.5 if name.endswith(RESIDUAL_OUTPUTS) else 1.0
        p.normal_(0.0, share * fan_in**-0.5, generator=generator)


def _draw_scale(p, share: float, generator) -> None:
    """E8M0 codes of the two powers of two around the wanted scale of uniformly random E2M1 codes; one has 32 inputs."""
    e2m1_rms = math.sqrt((0 + 0.25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 8)
    wanted = share * (32 * p.shape[-1]) ** -0.5 / e2m1_rms
    low = math.floor(math.log2(wanted))
    p.bernoulli_(((wanted / 2.0**low) ** 2 - 1) / 3, generator=generator).add_(low + 127)


def _tie_loosely(embed, head, layers: int) -> None:
    """Adds some token's embedding to each row of the head, so that tokens do not hang on bfloat16 rounding.

    By as much as puts the logit of one token above the largest of VOCAB normal ones, and no further: a logprob shall
    show what the layers do. What is left of an embedding after them was measured with 4 and 12 layers.
    """
    import torch

    vocab, width = head.shape
    left = (1 + 0.35 * layers) ** -0.5
    share = min(0.5, (math.sqrt(2 * math.log(vocab)) + 1.5) / (left * width**0.5))
    order = torch.randperm(vocab, generator=torch.Generator(head.device).manual_seed(0), device=head.device)
    mixed = share * width**-0.5 * embed.float() + (1 - share**2) ** 0.5 * head.float()[order]
    head[order] = mixed.to(head.dtype)
