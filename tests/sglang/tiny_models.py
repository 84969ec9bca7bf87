"""Tiny float32 checkpoints that SGLang can run on a CPU: MINI configs with the dims that its kernels ask for.

SGLang's MLA kernel takes latents of 288 or 576 channels, its attention-residual kernel hidden sizes in multiples of
1024 (it has no mask), and its CPU experts leave `routed_scaling_factor` out. Three layers hold every kind: KDA with a
dense MLP, MLA with experts, KDA with experts at the start of a second residual block.
"""

import dataclasses
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from kimi_kernels.config import K3_MINI, KIMI_LINEAR_MINI, KimiConfig
from kimi_kernels.hf_config import write_config
from kimi_kernels.mini import random_tensors

FOR_SGLANG = dict(
    num_layers=3,
    mla_layers=(1,),
    kda_heads=2,
    mla_heads=2,
    kv_lora_rank=256,
    qk_rope_dim=32,
    qk_nope_dim=32,
    v_dim=32,
    routed_scaling=1.0,
    dtype=torch.float32,
)
TINY_KIMI_LINEAR = dataclasses.replace(KIMI_LINEAR_MINI, **FOR_SGLANG)
TINY_K3 = dataclasses.replace(K3_MINI, hidden_size=1024, mxfp4_experts=False, **FOR_SGLANG)
TINY_RELEASED = dataclasses.replace(TINY_K3, mxfp4_experts=True)
TINY = {"kimi-linear": TINY_KIMI_LINEAR, "k3": TINY_K3, "k3-released": TINY_RELEASED}
# nothing of it is run by text prompts
TINY_VISION = dict(
    vt_hidden_size=64, vt_num_hidden_layers=1, vt_num_attention_heads=2, vt_intermediate_size=64, qkv_hidden_size=64
)


def write_tiny(directory: Path | str, family: str, seed: int = 0) -> KimiConfig:
    """Writes the checkpoint of one family.

    "k3" is the text model alone, `KimiK3LinearForCausalLM`; "k3-released" has the released form, MXFP4 experts inside
    `KimiK3ForConditionalGeneration`, with a vision tower without weights.
    """
    config = TINY[family]
    tensors = random_tensors(config, seed)
    released = write_config(config)
    if family == "k3-released":
        released["vision_config"] = TINY_VISION
    if family == "k3":
        released = released["text_config"] | {"architectures": ["KimiK3LinearForCausalLM"], "dtype": "float32"}
        tensors = {
            name.removeprefix("language_model.").replace("block_sparse_moe", "mlp"): tensor
            for name, tensor in tensors.items()
        }
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(released, indent=2) + "\n")
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    return config
