"""Bytes of a step against the published sizes of K3 and Kimi-Linear (DESIGN.md section 5), and how they grow."""

import pytest
import torch

from kimi_kernels.config import CONFIGS, K3, K3_MINI, KIMI_LINEAR_48B, KIMI_LINEAR_MINI, KimiConfig
from kimi_kernels.meta_weights import meta_weights
from kimi_kernels.op_specs import OPS
from kimi_kernels.places import PARTS
from kimi_kernels.traffic import (
    OpCall,
    argument_kind,
    expected_experts,
    floor_us,
    record_step,
    resident_bytes,
    sequence_bytes,
    total_bytes,
)

MB = 1e6
KDA_LAYER, MLA_LAYER = 1, 3
ROUTED = ("moe_gate_up_mxfp4", "moe_down_mxfp4", "moe_gate_up", "moe_down")


def weights_mb(calls: list[OpCall], layer: int | None, part: str, routed: bool | None = None) -> float:
    """Weight bytes of one part of one layer in MB; `routed` keeps only the routed experts, or only the rest."""
    kept = [c for c in calls if (c.layer, c.part) == (layer, part) and routed in (None, c.op in ROUTED)]
    return round(sum(c.weight_bytes for c in kept) / MB, 3)


def state_mb(calls: list[OpCall], layer: int) -> float:
    return round(sum(c.state_bytes for c in calls if c.layer == layer) / MB, 3)


@pytest.mark.parametrize(
    ("tp", "kda", "state", "mla", "moe", "routed", "dense", "head", "total"),
    (
        (1, 887.801, 13.025, 464.392, 379.857, 280.756, 1453.326, 2348.810, 137_889),
        (8, 112.581, 1.628, 84.546, 148.646, 35.095, 181.666, 293.601, 27_297),
        (16, 57.208, 0.814, 57.414, 132.131, 17.547, 90.833, 146.801, 19_398),
    ),
)
def test_k3_moves_the_published_bytes(tp, kda, state, mla, moe, routed, dense, head, total):
    calls = record_step(K3, tp)
    assert weights_mb(calls, KDA_LAYER, "kda") == kda
    assert state_mb(calls, KDA_LAYER) == state
    assert weights_mb(calls, MLA_LAYER, "mla") == mla
    assert weights_mb(calls, KDA_LAYER, "moe", routed=False) == moe
    assert weights_mb(calls, KDA_LAYER, "moe", routed=True) == routed
    assert weights_mb(calls, 0, "dense") == dense
    assert weights_mb(calls, None, "head") == head
    assert round(total_bytes(calls) / MB) == total


@pytest.mark.parametrize(("tp", "kda_layer", "mla_layer"), ((8, 298.036, 268.372), (16, 207.787, 207.178)))
def test_k3_layers_add_up(tp, kda_layer, mla_layer):
    """Whole layers, norms and mixtures included; the cache rows of one token are not in the published figure."""
    for layer, published in ((KDA_LAYER, kda_layer), (MLA_LAYER, mla_layer)):
        moved = sum(c.memory_bytes for c in record_step(K3, tp) if c.layer == layer)
        assert moved / MB == pytest.approx(published, abs=0.004)


def test_kimi_linear_moves_the_published_bytes():
    calls = record_step(KIMI_LINEAR_48B)
    assert weights_mb(calls, KDA_LAYER, "kda") == 79.135
    assert state_mb(calls, KDA_LAYER) == 4.342
    assert weights_mb(calls, MLA_LAYER, "mla") == 58.230
    assert weights_mb(calls, KDA_LAYER, "moe", routed=True) == pytest.approx(8 * 14.156, abs=0.005)
    assert weights_mb(calls, KDA_LAYER, "moe", routed=False) == pytest.approx(1.181 + 14.156, abs=0.002)
    assert weights_mb(calls, 0, "dense") == 127.402
    assert weights_mb(calls, None, "head") == 754.975
    assert round(total_bytes(calls) / MB) == 6303


def test_resident_bytes_match_the_published_sizes():
    """The K3 figure of a rank shards the embedding; ours keeps it whole on every rank."""
    assert resident_bytes(meta_weights(KIMI_LINEAR_48B)) / 1e9 == pytest.approx(98.25, abs=0.01)
    embedding = K3.vocab_size * K3.hidden_size * 2
    assert (resident_bytes(meta_weights(K3, 8)) - embedding * 7 / 8) / 1e9 == pytest.approx(205.06, abs=0.01)
    assert (resident_bytes(meta_weights(K3, 16)) - embedding * 15 / 16) / 1e9 == pytest.approx(108.28, abs=0.01)


def test_state_of_a_sequence_matches_the_published_sizes():
    pools, per_token = 449_372_160, 27_648
    assert sequence_bytes(K3, 64) == pools + 64 * per_token
    assert sequence_bytes(K3.shard(8), 65) == pools // 8 + 128 * per_token  # whole pages of 64 tokens


def test_context_adds_the_latent_rows_of_every_sequence():
    """27,648 B per cached token, on every rank."""
    for tp in (1, 8):
        short, long = (total_bytes(record_step(K3, tp, rows=2, context=c)) for c in (1, 4097))
        assert long - short == 2 * 4096 * 27_648


def test_rows_share_the_weights_but_not_the_experts():
    one, many = record_step(K3, 8), record_step(K3, 8, rows=8)
    assert [c.op for c in one] == [c.op for c in many]
    for a, b in zip(one, many, strict=True):
        if a.op in ROUTED:
            assert b.weight_bytes / a.weight_bytes == pytest.approx(expected_experts(896, 16, 8) / 16)
        elif a.op == "embedding":
            assert b.weight_bytes == 8 * a.weight_bytes
        else:
            assert b.weight_bytes == a.weight_bytes
        assert b.state_bytes == 8 * a.state_bytes
        assert b.output_bytes == 8 * a.output_bytes


def test_a_verify_step_reads_the_state_once_for_all_its_tokens():
    single, verify = record_step(K3, rows=1), record_step(K3, rows=8, tokens_per_sequence=8, context=8)
    recurrent = [sum(c.state_bytes for c in calls if c.op == "kda_recurrent") for calls in (single, verify)]
    assert recurrent[0] == recurrent[1]


def test_expected_experts():
    """One row reads its own picks; published figures for uniform routing over K3 at 2, 4 and 8 rows."""
    assert expected_experts(896, 16, 1) == pytest.approx(16)
    assert [round(expected_experts(896, 16, rows), 1) for rows in (2, 4, 8)] == [31.7, 62.3, 120.3]
    assert expected_experts(12, 12, 3) == 12


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_call_is_placed_and_every_layer_counted(config: KimiConfig):
    calls = record_step(config)
    assert {c.part for c in calls} <= set(PARTS)
    assert {c.layer for c in calls} == {None, *range(config.num_layers)}
    for layer in range(config.num_layers):
        parts = {c.part for c in calls if c.layer == layer}
        attention = "mla" if layer in config.mla_layers else "kda"
        assert parts == {"norm", attention, "dense" if layer in config.dense_layers else "moe"}
    kda = [c for c in calls if c.op == "kda_recurrent"]
    assert [c.layer for c in kda] == list(config.kda_layers)
    assert all(c.part == "kda" and c.dims["H"] == config.kda_heads for c in kda)


@pytest.mark.parametrize("config", (K3_MINI, KIMI_LINEAR_MINI), ids=("k3", "kimi-linear"))
def test_every_weight_is_read_once_by_a_dense_step(config: KimiConfig):
    """With all experts picked, the weight bytes of a step are the resident ones but for the embedding rows not read."""
    calls = record_step(config, rows=4096, context=1)
    weights = meta_weights(config)
    unread = weights.embed.nbytes
    if config.attn_res_block_size is not None:
        unread += weights.layers[0].attn_res_weight.nbytes  # the bank is empty there
    read = sum(c.weight_bytes for c in calls if c.op != "embedding")
    assert read == pytest.approx(resident_bytes(weights) - unread, rel=1e-6)


def test_layers_limit_the_step():
    calls = record_step(K3, 8, layers=[3, 4])
    assert {c.layer for c in calls} == {None, 3, 4}


def test_kinds_come_from_the_leading_dim():
    assert argument_kind("*R D act") == argument_kind("B i32") == "input"
    assert argument_kind("SLOTS H V K f32") == "state"
    assert argument_kind("E 2*I Z/2 u8") == argument_kind("D f32") == "weight"
    for op, spec in OPS.items():
        assert all(argument_kind(spec.args[name]) == "state" for name in spec.inplace), op


def test_meta_weights_hold_no_data():
    assert meta_weights(K3).layers[5].mlp.w13.device == torch.device("meta")
    assert meta_weights(K3, tp=8, rank=3).vocab_start == 3 * 20480


def test_floor():
    assert floor_us(8e6, 4.0) == 2.0


@pytest.mark.parametrize(
    "bad", (dict(rows=0), dict(rows=3, tokens_per_sequence=2), dict(context=0), dict(context=1 << 21), dict(tp=3))
)
def test_impossible_steps_are_refused(bad):
    with pytest.raises(ValueError, match="must be"):
        record_step(K3, **bad)
