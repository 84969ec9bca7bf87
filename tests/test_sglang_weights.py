"""SGLang's loaded weights become ours bit for bit, without a second copy; what does not fit is named. Needs none."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from sglang_model import sglang_model

from kimi_kernels.checkpoint import load_weights
from kimi_kernels.config import K3_MINI, KIMI_LINEAR_MINI, KimiConfig
from kimi_kernels.mini import random_tensors, write_checkpoint
from kimi_kernels.weights import ModelWeights
from sglang_integration.build import Extra, model_weights, stack_in_place
from sglang_integration.compat import RAW_MXFP4
from sglang_integration.weight_table import MAX_SHOWN, find, weight_problems, weight_table

FLOAT32 = dataclasses.replace(K3_MINI, mxfp4_experts=False, dtype=torch.float32)
CONFIGS = {"kimi-linear": KIMI_LINEAR_MINI, "k3": K3_MINI, "k3 in float32": FLOAT32}


def leaves(value, path: str = "") -> Iterator[tuple[str, object]]:
    """Every field of nested dataclasses and tuples."""
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict | tuple):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, f"{path}.{name}")
    else:
        yield path, value


def made(config: KimiConfig, tensors) -> tuple[object, ModelWeights, Extra]:
    text, extra = sglang_model(config, tensors, vocab_padding=32), Extra()
    assert weight_problems(text, config) == []
    return text, model_weights(text, config, extra), extra


@pytest.mark.parametrize("name", CONFIGS)
def test_the_weights_are_those_of_the_checkpoint_reader(name, tmp_path):
    """Faults T06, T09, T10: A_log beyond the heads, two kinds of g_proj, q | k | v of a fused conv."""
    config = CONFIGS[name]
    tensors = random_tensors(config)
    write_checkpoint(tmp_path / "checkpoint", config, tensors)
    want = dict(leaves(load_weights(tmp_path / "checkpoint", config, progress=False)))
    got = dict(leaves(made(config, tensors)[1]))
    assert got.keys() == want.keys()
    for path, value in want.items():
        same = torch.equal(got[path], value) if isinstance(value, torch.Tensor) else got[path] == value
        assert same and getattr(got[path], "dtype", None) == getattr(value, "dtype", None), path


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_shared_not_doubled(name):
    """What is copied: small vectors, and Kimi-Linear's KDA input projection, which SGLang stores in another order."""
    config = CONFIGS[name]
    text, weights, extra = made(config, random_tensors(config))
    owned = {find(text, path).untyped_storage().data_ptr() for path in weight_table(config)}
    copied = {path: tensor for path, tensor in leaves(weights)
              if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in owned}  # fmt: skip
    allowed = ("_res_weight", "router_bias", "out_norm", *(["in_proj"] if name == "kimi-linear" else []))
    assert all(path.endswith(allowed) for path in copied), sorted(copied)
    rows = [tensor for path, tensor in leaves(weights) if isinstance(tensor, torch.Tensor)]
    assert all(tensor.stride(-1) == 1 for tensor in rows)  # what reads whole rows reads them here
    assert extra.copied_bytes == sum(tensor.numel() * tensor.element_size() for tensor in copied.values())
    assert (extra.kept_bytes > 0) == config.mxfp4_experts


@pytest.mark.parametrize("name", CONFIGS)
def test_sglang_still_reads_its_own_values(name):
    """Its modules are pointed into stacked tensors; fault T11: a merged weight must follow, `_bfa_w` included."""
    config = CONFIGS[name]
    tensors = random_tensors(config)
    text, *_ = made(config, tensors)
    untouched = sglang_model(config, tensors, vocab_padding=32)
    for path in weight_table(config):
        assert torch.equal(find(text, path), find(untouched, path)) or "embed" in path or "lm_head" in path, path
    for layer in config.kda_layers if config.full_rank_out_gate else ():
        ours, theirs = text.model.layers[layer].self_attn, untouched.model.layers[layer].self_attn
        assert torch.equal(ours._bfa_w, theirs._bfa_w)
        assert ours._bfa_w.untyped_storage().data_ptr() == ours.b_proj.weight.untyped_storage().data_ptr()


@pytest.mark.parametrize("path", [
    "model.layers.1.mlp.routed_expert_norm.weight",
    "model.layers.1.mlp.gate.e_score_correction_bias",
    "model.layers.3.self_attn.g_proj.weight",
    f"model.layers.2.mlp.experts.{RAW_MXFP4}",
])  # fmt: skip
def test_a_missing_weight_is_named(path):
    """Fault T08: a model that loads and is quietly worse."""
    text = sglang_model(K3_MINI, random_tensors(K3_MINI))
    owner, _, name = path.rpartition(".")
    delattr(find(text, owner), name)
    problems = weight_problems(text, K3_MINI)
    assert problems and all(line.startswith(f"weight {path}") and "is missing" in line for line in problems)


def test_a_weight_of_another_form_is_named():
    text = sglang_model(K3_MINI, random_tensors(K3_MINI))
    experts = text.model.layers[1].mlp.experts
    w13, *rest = getattr(experts, RAW_MXFP4)
    setattr(experts, RAW_MXFP4, (w13.view(torch.int8), *rest))
    text.model.layers[0].self_attn.b_proj = text.model.layers[0].self_attn.f_a_proj
    found = weight_problems(text, K3_MINI)
    assert len(found) == 2
    assert "self_attn.b_proj.weight must be [4, 160] torch.bfloat16, got [32, 160]" in found[0]
    assert "torch.uint8, got" in found[1] and "torch.int8" in found[1]


def test_many_problems_are_counted():
    text = sglang_model(K3_MINI, random_tensors(K3_MINI))
    found = weight_problems(text, dataclasses.replace(K3_MINI, hidden_size=192))
    assert len(found) == MAX_SHOWN + 1 and found[-1].endswith("more weights")


def test_stacking_frees_the_old_storage():
    modules = [sglang_model(KIMI_LINEAR_MINI, random_tensors(KIMI_LINEAR_MINI)).model.norm for _ in range(2)]
    for module, rows in zip(modules, (3, 5), strict=True):
        module.weight.data = torch.randn(rows, 4)
    values = [module.weight.data.clone() for module in modules]
    stacked = stack_in_place(modules, torch.zeros(1, 4))
    assert torch.equal(stacked, torch.cat([*values, torch.zeros(1, 4)]))
    assert all(module.weight.untyped_storage().data_ptr() == stacked.untyped_storage().data_ptr() for module in modules)
