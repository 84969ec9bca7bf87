"""What cannot be loaded is refused in one error that names every tensor or the file, before anything is allocated."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kimi_kernels.checkpoint import CheckpointError, load_weights
from kimi_kernels.config import K3_MINI, KIMI_LINEAR_MINI, ConfigError
from kimi_kernels.mini import make_mini, random_tensors, write_checkpoint

Tensor = torch.Tensor
K3_LAYERS = "language_model.model.layers"
MOE = f"{K3_LAYERS}.1.block_sparse_moe"
FAULTS: dict[str, tuple[dict[str, Tensor | None], list[str]]] = {
    "norm removed": ({f"{MOE}.routed_expert_norm.weight": None}, ["1 missing", "routed_expert_norm.weight"]),
    "router bias removed": ({f"{MOE}.gate.e_score_correction_bias": None}, ["1 missing", "e_score_correction_bias"]),
    "extra name": ({f"{MOE}.gate.bias": torch.zeros(24)}, ["1 unknown", f"{MOE}.gate.bias"]),
    "expert beyond the last": ({f"{MOE}.experts.24.w1.weight_packed": torch.zeros(1)}, ["1 unknown", "experts.24"]),
    "wrong shape": (
        {f"{K3_LAYERS}.0.self_attn.b_proj.weight": torch.zeros(5, 160).bfloat16()},
        ["1 mis-shaped", "b_proj.weight: expected [4, 160], got [5, 160]"],
    ),
    "A_log shorter than the heads": (
        {f"{K3_LAYERS}.0.self_attn.A_log": torch.zeros(3)},
        ["1 mis-shaped", "A_log: expected [32], got [3]"],
    ),
    "rounded conv": (
        {f"{K3_LAYERS}.0.self_attn.q_conv1d.weight": torch.zeros(128, 1, 4).bfloat16()},
        ["1 mis-typed", "q_conv1d.weight: expected float32, got bfloat16"],
    ),
    "fp8 projection": (
        {f"{K3_LAYERS}.0.self_attn.q_proj.weight": torch.zeros(128, 160).to(torch.float8_e4m3fn)},
        ["1 mis-typed", "q_proj.weight: expected bfloat16, got F8_E4M3"],
    ),
    "several": (
        {f"{MOE}.gate.weight": None, "x.y": torch.zeros(1), "language_model.lm_head.weight": torch.zeros(1)},
        [
            "1 unknown, 1 missing, 1 mis-shaped, 1 mis-typed",
            "x.y",
            "gate.weight",
            "lm_head.weight: expected [320, 160]",
        ],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_tensor_is_named_before_anything_is_allocated(tmp_path: Path, monkeypatch, fault: str):
    """T08: a missing, unknown or wrong tensor must never load quietly."""
    changes, messages = FAULTS[fault]
    tensors = random_tensors(K3_MINI) | changes
    directory = write_checkpoint(
        tmp_path / "saved", K3_MINI, {name: tensor for name, tensor in tensors.items() if tensor is not None}
    )
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("allocated"))
    with pytest.raises(CheckpointError) as error:
        load_weights(directory, K3_MINI)
    assert all(message in str(error.value) for message in [str(directory), *messages]), error.value


def test_missing_prefix_is_refused_and_the_list_is_capped(tmp_path: Path):
    """T08: K3 names start with language_model."""
    tensors = {name.removeprefix("language_model."): t for name, t in random_tensors(K3_MINI).items()}
    with pytest.raises(CheckpointError) as error:
        load_weights(write_checkpoint(tmp_path / "saved", K3_MINI, tensors), K3_MINI)
    assert f"{len(tensors)} unknown, {len(tensors)} missing tensors" in str(error.value)
    assert str(error.value).count("\n") < 50 and f"... and {len(tensors) - 20} more" in str(error.value)


def test_vision_tensors_are_ignored_in_k3_only(tmp_path: Path):
    vision = {
        "vision_tower.encoder.final_layernorm.weight": torch.zeros(4),
        "mm_projector.proj.0.weight": torch.zeros(4),
    }
    load_weights(write_checkpoint(tmp_path / "saved", K3_MINI, random_tensors(K3_MINI) | vision), K3_MINI)
    write_checkpoint(tmp_path / "kl", KIMI_LINEAR_MINI, random_tensors(KIMI_LINEAR_MINI) | vision)
    with pytest.raises(CheckpointError, match="2 unknown"):
        load_weights(tmp_path / "kl", KIMI_LINEAR_MINI)


def test_tensor_in_two_shards_is_refused(tmp_path: Path):
    directory = tmp_path / "mini"
    make_mini(directory, "k3")
    first, second = sorted(directory.glob("*.safetensors"))
    save_file(
        load_file(second) | {"language_model.lm_head.weight": load_file(first)["language_model.lm_head.weight"]}, second
    )
    with pytest.raises(CheckpointError, match=r"1 duplicate tensors\n.*\n.*lm_head.weight: in model-00001"):
        load_weights(directory, K3_MINI)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


BROKEN: dict[str, tuple[str, Callable[[Path], None]]] = {
    "no config": ("config.json: not found", lambda d: (d / "config.json").unlink()),
    "no weights": ("neither model.safetensors nor", lambda d: (d / "model.safetensors.index.json").unlink()),
    "truncated": ("model-00002-of-00002.safetensors: ", lambda d: _truncate(d / "model-00002-of-00002.safetensors")),
    "pointer": (
        "model-00001-of-00002.safetensors: ",
        lambda d: (d / "model-00001-of-00002.safetensors").write_text("v1"),
    ),
    "empty": ("model.safetensors: ", lambda d: (d / "model.safetensors").touch()),
    "index": ("index.json: expected JSON", lambda d: (d / "model.safetensors.index.json").write_text("{")),
    "index nested": (
        "index.json: expected JSON",
        lambda d: (d / "model.safetensors.index.json").write_text("[" * 100_000),
    ),
    "index map": ("index.json: expected JSON", lambda d: (d / "model.safetensors.index.json").write_text('{"a": 1}')),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_directory_names_the_file(tmp_path: Path, kind: str):
    directory = tmp_path / "mini"
    make_mini(directory, "k3")
    message, damage = BROKEN[kind]
    damage(directory)
    with pytest.raises(CheckpointError) as error:
        load_weights(directory, K3_MINI)
    assert str(directory) in str(error.value) and message in str(error.value)


def test_bad_arguments_are_refused_before_a_file_is_opened(tmp_path: Path):
    with pytest.raises(ValueError, match=r"rank must be in \[0, 2\), got 2"):
        load_weights(tmp_path, K3_MINI, 2, 2)
    with pytest.raises(ValueError, match=r"layers must be in \[0, 6\), got \[6\]"):
        load_weights(tmp_path, K3_MINI, layers=[6])
    with pytest.raises(ConfigError, match="tp=4 does not divide mla_heads=2"):
        load_weights(tmp_path, K3_MINI, 4, 0)


def test_router_that_bfloat16_cannot_hold_is_refused(tmp_path: Path):
    tensors = random_tensors(KIMI_LINEAR_MINI)
    name = "model.layers.1.block_sparse_moe.gate.weight"
    tensors[name] = torch.full(tensors[name].shape, 1 + 2.0**-20)
    with pytest.raises(CheckpointError, match=f"{name}: its float32 values do not fit bfloat16"):
        load_weights(write_checkpoint(tmp_path / "saved", KIMI_LINEAR_MINI, tensors), KIMI_LINEAR_MINI)
