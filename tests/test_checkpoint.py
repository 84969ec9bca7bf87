"""Loading: every weight lands where it belongs, for the whole model and for each tensor-parallel rank."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from weight_pieces import assert_whole, pieces

from kimi_kernels.checkpoint import CheckpointError, load_weights
from kimi_kernels.config import K3_MINI, KIMI_LINEAR_MINI
from kimi_kernels.meta_weights import meta_weights
from kimi_kernels.mini import MINI, make_mini, random_tensors, write_checkpoint

Tensor = torch.Tensor
K3_LAYERS = "language_model.model.layers"
CONFIGS = {
    "k3": K3_MINI,
    "kimi-linear": KIMI_LINEAR_MINI,
    "k3-float32": dataclasses.replace(K3_MINI, dtype=torch.float32),
    "k3-plain-experts": dataclasses.replace(K3_MINI, mxfp4_experts=False),
    "k3-query-direct-plain-residual": dataclasses.replace(
        K3_MINI, q_lora_rank=None, attn_res_block_size=None, mla_out_gate=False, latent_size=None
    ),
}
# 96 heads of 128 stored decay values, everything else small
WIDE = dataclasses.replace(
    K3_MINI,
    num_layers=1,
    mla_layers=(),
    kda_heads=96,
    kda_head_dim=16,
    mla_heads=16,
    expert_size=512,
    shared_size=512,
)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_weight_lands_where_it_belongs(tmp_path: Path, name: str):
    config = CONFIGS[name]
    tensors = random_tensors(config, seed=1)
    weights = load_weights(write_checkpoint(tmp_path / "saved", config, tensors), config)
    assert weights.vocab_start == 0
    assert_whole(pieces(weights, config), config, tensors)


@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_together_hold_the_whole(tmp_path: Path, name: str):
    config, tp = CONFIGS[name], 2
    tensors = random_tensors(config, seed=2)
    directory = write_checkpoint(tmp_path / "saved", config, tensors, shards=2)
    ranks = [load_weights(directory, config, tp, rank) for rank in range(tp)]
    assert [rank.vocab_start for rank in ranks] == [0, config.vocab_size // 2]
    parts = [pieces(rank, config.shard(tp)) for rank in ranks]
    whole = {}
    for piece, (first, dim) in parts[0].items():
        same = [part[piece][0] for part in parts]
        if dim is None:
            assert torch.equal(same[0], same[1]), f"{piece} differs between ranks"
        whole[piece] = (first if dim is None else torch.cat(same, dim), dim)
    assert_whole(whole, config, tensors)


@pytest.mark.parametrize("family", MINI)
@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 1)])
def test_loaded_tensors_have_the_layout_of_the_rank(tmp_path: Path, family: str, tp: int, rank: int):
    def layout(weights) -> list:
        if isinstance(weights, Tensor):
            return [tuple(weights.shape), weights.dtype, weights.is_contiguous()]
        if dataclasses.is_dataclass(weights):
            return [(field.name, layout(getattr(weights, field.name))) for field in dataclasses.fields(weights)]
        return [layout(x) for x in weights] if isinstance(weights, tuple) else [weights]

    config = make_mini(tmp_path / "mini", family)
    assert layout(load_weights(tmp_path / "mini", config, tp, rank)) == layout(meta_weights(config, tp, rank))


@pytest.mark.parametrize(("tp", "rank", "heads"), [(8, 7, range(84, 96)), (16, 15, range(90, 96)), (1, 0, range(96))])
def test_a_log_is_cut_among_the_first_heads(tmp_path: Path, tp: int, rank: int, heads: range):
    """T06: 128 values are stored for 96 heads; those beyond are never loaded, NaN or not."""
    tensors = random_tensors(WIDE)
    tensors[f"{K3_LAYERS}.0.self_attn.A_log"] = torch.cat([torch.arange(96.0), torch.full((32,), torch.nan)])
    weights = load_weights(write_checkpoint(tmp_path / "saved", WIDE, tensors), WIDE, tp, rank)
    assert weights.layers[0].attn.A_log.tolist() == list(heads)


@pytest.mark.parametrize("rank", [0, 1])
def test_conv_rows_of_a_rank_are_its_q_then_k_then_v_heads(tmp_path: Path, rank: int):
    """T10: a fused q|k|v weight must not be cut at contiguous boundaries."""
    tensors = random_tensors(K3_MINI)
    rows = torch.arange(3 * 128.0).reshape(3, 128)
    for part, values in zip("qkv", rows, strict=True):
        tensors[f"{K3_LAYERS}.0.self_attn.{part}_conv1d.weight"] = values[:, None, None].expand(128, 1, 4)
    conv = (
        load_weights(write_checkpoint(tmp_path / "saved", K3_MINI, tensors), K3_MINI, 2, rank, layers=[0])
        .layers[0]
        .attn.conv
    )
    assert torch.equal(conv[:, 0], rows[:, 64 * rank : 64 * (rank + 1)].flatten())


def test_layers_selects_what_is_read(tmp_path: Path):
    """A shard that no wanted layer needs may be absent."""
    directory = tmp_path / "mini"
    make_mini(directory, "k3")
    whole = load_weights(directory, K3_MINI)
    (directory / "model-00002-of-00002.safetensors").unlink()
    weights = load_weights(directory, K3_MINI, layers=[1, 0])
    assert [layer.index for layer in weights.layers] == [1, 0]
    assert torch.equal(weights.layers[0].mlp.w2, whole.layers[1].mlp.w2)
    with pytest.raises(
        CheckpointError, match=r"index.json: 1 of its shards not found: model-00002-of-00002.safetensors"
    ):
        load_weights(directory, K3_MINI)


def test_kimi_linear_small_parameters_may_be_either_dtype(tmp_path: Path):
    """A_log may be per head without the padding dims; a float32 router is taken where bfloat16 holds it exactly."""
    tensors = random_tensors(KIMI_LINEAR_MINI)
    changed = ("conv1d.weight", "o_norm.weight", "gate.weight", "e_score_correction_bias")
    other = {name: t.float() if name.endswith(changed) else t for name, t in tensors.items()}
    other |= {name: t.bfloat16().flatten() for name, t in tensors.items() if name.endswith("A_log")}
    weights = load_weights(write_checkpoint(tmp_path / "saved", KIMI_LINEAR_MINI, other), KIMI_LINEAR_MINI)
    assert weights.layers[1].mlp.router.dtype == torch.bfloat16
    assert_whole(pieces(weights, KIMI_LINEAR_MINI), KIMI_LINEAR_MINI, other)


def test_progress_bar_is_drawn_on_a_terminal_or_when_asked(tmp_path: Path, capsys, monkeypatch):
    directory = tmp_path / "mini"
    make_mini(directory, "k3")
    load_weights(directory, K3_MINI)
    assert capsys.readouterr().err == ""
    load_weights(directory, K3_MINI, progress="always")
    assert "rank 0/1: 100%" in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    load_weights(directory, K3_MINI, progress=False)
    assert capsys.readouterr().err == ""
