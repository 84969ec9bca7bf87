"""The mini checkpoints: released file layout, values in range, and a writer that never leaves half a checkpoint."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kimi_kernels.config import K3_MINI, KIMI_LINEAR_MINI
from kimi_kernels.mini import make_mini, random_tensors
from kimi_kernels.mxfp4 import dequantize
from kimi_kernels.tensor_names import checkpoint_specs

K3_LAYERS = "language_model.model.layers"


def test_mini_has_the_released_file_layout(tmp_path: Path):
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    files = {
        "k3": ["config.json", *shards, "model.safetensors.index.json"],
        "kimi-linear": ["config.json", "model.safetensors"],
    }
    for family, expected in files.items():
        make_mini(tmp_path / family, family)
        assert sorted(path.name for path in (tmp_path / family).iterdir()) == expected
    index = json.loads((tmp_path / "k3" / "model.safetensors.index.json").read_text())
    stored = {name: tensor for shard in shards for name, tensor in load_file(tmp_path / "k3" / shard).items()}
    assert index["weight_map"].keys() == stored.keys() == checkpoint_specs(K3_MINI).keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in stored.values())


def test_mini_values_keep_the_model_in_range():
    tensors = random_tensors(K3_MINI, seed=3)
    assert all(torch.equal(tensors[name], again) for name, again in random_tensors(K3_MINI, seed=3).items())
    a_log = tensors[f"{K3_LAYERS}.0.self_attn.A_log"]
    assert a_log.shape == (32,) and (a_log[4:] == 0).all() and (a_log[:4] > 0).all() and (a_log < math.log(16)).all()
    bias = torch.stack([t for name, t in tensors.items() if name.endswith("e_score_correction_bias")])
    assert 0 < bias.abs().min() and 0.2 < bias.abs().max() <= 0.5  # wide: routing is decided by more than rounding
    softplus = random_tensors(KIMI_LINEAR_MINI)["model.layers.0.self_attn.dt_bias"]
    step = torch.nn.functional.softplus(softplus)
    assert 9e-4 < step.min() and step.max() < 0.11


def test_mini_mxfp4_weights_have_fan_in_spread_halved_on_the_way_out():
    tensors = random_tensors(K3_MINI)
    experts = f"{K3_LAYERS}.1.block_sparse_moe.experts"
    for w, fan_in, spread in (("w1", K3_MINI.latent_size, 1.0), ("w2", K3_MINI.expert_size, 0.5)):
        packed = torch.stack([tensors[f"{experts}.{e}.{w}.weight_packed"] for e in range(K3_MINI.num_experts)])
        scale = torch.stack([tensors[f"{experts}.{e}.{w}.weight_scale"] for e in range(K3_MINI.num_experts)])
        assert abs(dequantize(packed, scale, torch.float32).std() * fan_in**0.5 - spread) < 0.05 * spread
        assert len(scale.unique()) == 2


def test_writer_refuses_a_directory_in_use_and_leaves_nothing_behind(tmp_path: Path, monkeypatch):
    used, empty = tmp_path / "used", tmp_path / "empty"
    used.mkdir()
    (used / "notes.txt").write_text("")
    with pytest.raises(FileExistsError, match="exists and is not empty, pass a new directory"):
        make_mini(used, "kimi-linear")
    assert [path.name for path in used.iterdir()] == ["notes.txt"]
    empty.mkdir()
    assert make_mini(empty, "kimi-linear") == KIMI_LINEAR_MINI
    assert {path.stat().st_mode for path in empty.iterdir()} == {(used / "notes.txt").stat().st_mode}  # by umask
    monkeypatch.setattr("kimi_kernels.mini.save_file", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make_mini(tmp_path / "fails", "k3")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "used"]
    with pytest.raises(ValueError, match="family must be one of"):
        make_mini(tmp_path / "other", "k2")
