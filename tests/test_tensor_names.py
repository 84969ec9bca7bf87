"""The tensor lists that `checkpoint_specs` states are those of the releases, to the tensor and to the byte."""

import math
import re

import torch

from kimi_kernels.config import K3, KIMI_LINEAR_48B
from kimi_kernels.tensor_names import checkpoint_specs, layer_specs

K3_LAYERS = "language_model.model.layers"


def test_k3_specs_are_the_released_tensor_list():
    """The published index counts 497,220 tensors and 1,560,860,324,864 bytes, the vision tower included."""
    blocks = [(4096, 1024), (1024, 4096), (1024,), (1024,), (1024, 1536), (4608, 1024)] * 27
    vision = [*blocks, (1024,), (64, 64, 1024), (1024, 3, 14, 14), (7168,), (4096, 4096), (7168, 4096)]
    specs = checkpoint_specs(K3)
    assert len(specs) + len(vision) == 497_220
    sizes = [math.prod(spec.shape) * spec.dtype.itemsize for spec in specs.values()]
    assert sum(sizes) + sum(2 * math.prod(shape) for shape in vision) == 1_560_860_324_864
    counts = {
        "kda": (r"self_attn\.", K3.kda_layers, 966),
        "mla": (r"self_attn\.", K3.mla_layers, 192),
        "norm and residual": (r"\w+norm|\w+_res_", range(93), 558),
        "dense": (r"mlp\.", range(93), 3),
        "moe trunk": (r"block_sparse_moe\.(?!experts)", range(93), 736),
        "experts": (r"block_sparse_moe\.experts", range(93), 494_592),
    }
    by_layer = [layer_specs(K3, layer) for layer in range(93)]
    for kind, (pattern, layers, count) in counts.items():
        assert sum(bool(re.match(pattern, name)) for layer in layers for name in by_layer[layer]) == count, kind
    assert sum(count for *_, count in counts.values()) + 5 == len(specs) == 497_052


def test_kimi_linear_specs_are_the_released_tensor_list():
    """The release: 20,493 tensors, 49,122,681,728 parameters, bfloat16 but for A_log and dt_bias."""
    specs = checkpoint_specs(KIMI_LINEAR_48B)
    assert len(specs) == 20_493
    assert sum(math.prod(spec.shape) for spec in specs.values()) == 49_122_681_728
    float32 = {name.rsplit(".", 1)[1] for name, spec in specs.items() if spec.dtype == torch.float32}
    assert float32 == {"A_log", "dt_bias"}
    assert specs["model.layers.0.self_attn.A_log"].shape == (1, 1, 32, 1)


def test_layer_map_puts_91_and_92_on_mla_and_0_on_dense():
    """T09: 69 KDA and 24 MLA layers; g_proj has one shape in both kinds and must follow the layer."""
    specs = checkpoint_specs(K3)
    attention = {
        layer: "mla" if f"{K3_LAYERS}.{layer}.self_attn.kv_b_proj.weight" in specs else "kda" for layer in range(93)
    }
    assert list(attention.values()).count("kda") == 69
    assert attention[90] == "kda" and attention[91] == attention[92] == "mla"
    assert [l for l in range(93) if f"{K3_LAYERS}.{l}.mlp.up_proj.weight" in specs] == [0]
    shapes = {specs[f"{K3_LAYERS}.{layer}.self_attn.g_proj.weight"].shape for layer in range(93)}
    assert shapes == {(12288, 7168)}
    assert specs[f"{K3_LAYERS}.0.self_attn.A_log"].shape == (128,)
