"""Random checkpoints in the released form of each family, small enough for a test and complete in op kinds.

Values keep a whole model in range: weights at 1/sqrt(fan_in), norm weights near 1, A_log = log U(1, 16), decay biases
that leave some channels remembering and some forgetting, MXFP4 scales that give decoded weights the same spread.
So that tokens do not hang on bfloat16 rounding, each row of lm_head is half the embedding of some token, what a layer
adds to the residual is halved, and router biases are spread wide. Tensors are stored whole; nothing depends on tensor
parallelism.

Source   DESIGN.md section 5
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from kimi_kernels.checkpoint_files import INDEX_FILE, SINGLE_FILE
from kimi_kernels.config import K3_MINI, KIMI_LINEAR_MINI, MXFP4_GROUP, KimiConfig
from kimi_kernels.hf_config import write_config
from kimi_kernels.tensor_names import TensorSpec, checkpoint_specs, name_prefix

Tensor = torch.Tensor
MINI = {
    "k3": (K3_MINI, 2),
    "kimi-linear": (KIMI_LINEAR_MINI, 1),
}  # config, number of files
RESIDUAL_OUTPUTS = (".o_proj.weight", ".down_proj.weight", ".w2.weight", ".routed_expert_up_proj.weight")
E2M1_RMS = math.sqrt((0 + 0.25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 8)  # of uniformly random codes


def make_mini(directory: Path | str, family: str = "k3", seed: int = 0) -> KimiConfig:
    """Writes the mini checkpoint of a family and returns its config. Raises FileExistsError for a directory in use."""
    if family not in MINI:
        raise ValueError(f"make_mini: family must be one of {tuple(MINI)}, got {family!r}")
    config, shards = MINI[family]
    write_checkpoint(directory, config, random_tensors(config, seed), shards)
    return config


def random_tensors(config: KimiConfig, seed: int = 0) -> dict[str, Tensor]:
    """Every tensor of `checkpoint_specs`, random; equal seeds give equal bits."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _random(name, spec, config, generator) for name, spec in checkpoint_specs(config).items()}
    prefix = name_prefix(config)
    embed, head = tensors[f"{prefix}model.embed_tokens.weight"], tensors[f"{prefix}lm_head.weight"]
    order = torch.randperm(config.vocab_size, generator=generator)
    mixed = 0.5 * config.hidden_size**-0.5 * embed.float() + 0.75**0.5 * head.float()[order]
    head[order] = mixed.to(head.dtype)
    return tensors


def write_checkpoint(directory: Path | str, config: KimiConfig, tensors: Mapping[str, Tensor], shards: int = 1) -> Path:
    """config.json and safetensors, with an index if `shards` > 1; the tensors are written as given, unchecked.

    Everything goes to a sibling directory first, which takes the place of `directory` at the end: no reader sees half a
    checkpoint. Returns the resolved directory; raises FileExistsError if it exists and is not empty.
    """
    directory = Path(directory).resolve()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory}: exists and is not empty, pass a new directory")
    partial = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        (partial / "config.json").write_text(json.dumps(write_config(config), indent=2) + "\n")
        files = _files(list(tensors), shards)
        for file, names in files.items():
            save_file({name: tensors[name].contiguous() for name in names}, partial / file, metadata={"format": "pt"})
            shutil.copymode(partial / "config.json", partial / file)  # by umask; safetensors writes for the owner only
        if shards > 1:
            total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
            weight_map = {name: file for file, names in files.items() for name in names}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (partial / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        return partial.replace(directory)
    except BaseException:
        shutil.rmtree(partial)
        raise


def _files(names: list[str], shards: int) -> dict[str, list[str]]:
    """File name -> its tensors, in order and about equally many."""
    if shards == 1:
        return {SINGLE_FILE: names}
    size = -(-len(names) // shards)
    parts = [names[i : i + size] for i in range(0, len(names), size)]
    return {f"model-{i:05}-of-{len(parts):05}.safetensors": part for i, part in enumerate(parts, 1)}


def _random(name: str, spec: TensorSpec, config: KimiConfig, generator: torch.Generator) -> Tensor:
    shape, fan_in = spec.shape, spec.shape[-1]

    def normal(mean: float, std: float) -> Tensor:
        return mean + std * torch.randn(shape, generator=generator)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator)

    def a_log() -> Tensor:
        values = uniform(1.0, 16.0).log().flatten()
        values[config.kda_heads :] = 0.0  # the release pads with zeros
        return values.reshape(shape)

    def decay_bias() -> Tensor:
        if config.gate_lower_bound is not None:
            return normal(-1.5, 0.5)  # sigmoid(exp(A_log) * (x - 1.5)), x about N(0, 1): mostly remembering
        step = uniform(math.log(1e-3), math.log(1e-1)).exp()
        return step + torch.log(-torch.expm1(-step))  # inverse softplus of the step

    kinds: dict[str, Callable[[], Tensor]] = {
        "weight_packed": lambda: torch.randint(0, 256, shape, generator=generator),
        "w2.weight_scale": lambda: _scales(uniform(0.0, 1.0), fan_in * MXFP4_GROUP) - 1,
        "weight_scale": lambda: _scales(uniform(0.0, 1.0), fan_in * MXFP4_GROUP),
        "A_log": a_log,
        "dt_bias": decay_bias,
        "e_score_correction_bias": lambda: uniform(-0.5, 0.5),
        "norm.weight": lambda: normal(1.0, 0.1),
        "embed_tokens.weight": lambda: normal(0.0, 1.0),
        **dict.fromkeys(RESIDUAL_OUTPUTS, lambda: normal(0.0, 0.5 * fan_in**-0.5)),
    }
    draw = next((draw for ending, draw in kinds.items() if name.endswith(ending)), lambda: normal(0.0, fan_in**-0.5))
    return draw().to(spec.dtype)


def _scales(uniform: Tensor, fan_in: int) -> Tensor:
    """E8M0 bytes of the two powers of two around the wanted scale, mixed so that the mean square is exactly right."""
    wanted = fan_in**-0.5 / E2M1_RMS
    low = math.floor(math.log2(wanted))
    share_of_high = ((wanted / 2.0**low) ** 2 - 1) / 3
    return torch.where(uniform < share_of_high, low + 1, low) + 127
