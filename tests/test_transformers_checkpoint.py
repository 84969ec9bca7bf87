"""What transformers saves of its own Kimi-Linear loads as it stands: config form, names, dtypes, every value."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from weight_pieces import assert_whole, pieces

from kimi_kernels.checkpoint import CheckpointError, load_weights
from kimi_kernels.config import KIMI_LINEAR_MINI as MINI
from kimi_kernels.hf_config import load_config, write_config
from kimi_kernels.mini import random_tensors, write_checkpoint

transformers = pytest.importorskip("transformers", minversion="5.24")
Tensor = torch.Tensor


def native_config() -> "transformers.KimiLinearConfig":
    """KIMI_LINEAR_MINI in transformers' own fields, without linear_attn_config."""
    kinds = ["full_attention" if layer in MINI.mla_layers else "linear_attention" for layer in range(MINI.num_layers)]
    return transformers.KimiLinearConfig(
        vocab_size=MINI.vocab_size,
        hidden_size=MINI.hidden_size,
        intermediate_size=MINI.dense_size,
        moe_intermediate_size=MINI.expert_size,
        num_hidden_layers=MINI.num_layers,
        num_attention_heads=MINI.mla_heads,
        num_key_value_heads=MINI.mla_heads,
        kv_lora_rank=MINI.kv_lora_rank,
        qk_nope_head_dim=MINI.qk_nope_dim,
        qk_rope_head_dim=MINI.qk_rope_dim,
        v_head_dim=MINI.v_dim,
        num_local_experts=MINI.num_experts,
        num_experts_per_tok=MINI.top_k,
        max_position_embeddings=MINI.max_positions,
        layer_types=kinds,
        linear_head_dim=MINI.kda_head_dim,
        linear_num_heads=MINI.kda_heads,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=MINI.eos_token_ids[0],
    )


def released_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """The state of a transformers model under the released names; written out by hand, no code of the loader."""
    out: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("mlp.experts.gate_up_proj") + "block_sparse_moe.experts."
            for expert, (w1, w3) in enumerate(matrix.chunk(2) for matrix in tensor):
                out |= {f"{prefix}{expert}.w1.weight": w1, f"{prefix}{expert}.w3.weight": w3}
        elif name.endswith("experts.down_proj"):
            prefix = name.removesuffix("mlp.experts.down_proj") + "block_sparse_moe.experts."
            out |= {f"{prefix}{expert}.w2.weight": w2 for expert, w2 in enumerate(tensor)}
        elif name.endswith("conv1d.weight"):
            prefix = name.removesuffix("conv1d.weight")
            out |= {f"{prefix}{x}_conv1d.weight": part for x, part in zip("qkv", tensor.chunk(3), strict=True)}
        else:
            dense = ".layers.0." in name
            name = name.replace(".forget_gate.", ".")
            out[name if dense else name.replace(".mlp.", ".block_sparse_moe.")] = tensor
    return out


def random_model(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(5)
    model = transformers.KimiLinearForCausalLM(native_config())
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.normal_()
    return model.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tp", [1, 2])
def test_saved_model_loads_with_every_value_in_its_place(tmp_path: Path, dtype: torch.dtype, tp: int):
    model = random_model(dtype)
    model.save_pretrained(tmp_path)
    config = load_config(tmp_path)
    assert config == load_config(write_config(config))
    assert (config.dtype, config.num_layers, config.mla_layers) == (dtype, MINI.num_layers, MINI.mla_layers)
    ranks = [pieces(load_weights(tmp_path, config, tp, rank), config.shard(tp)) for rank in range(tp)]
    whole = {
        name: (tensor if dim is None else torch.cat([rank[name][0] for rank in ranks], dim), dim)
        for name, (tensor, dim) in ranks[0].items()
    }
    assert_whole(whole, config, released_tensors(model))


def test_model_loaded_in_bfloat16_and_saved_again_loads(tmp_path: Path):
    """transformers keeps router, bias and dt_bias in float32 then, and stores them so."""
    random_model(torch.bfloat16).save_pretrained(tmp_path / "first")
    model = transformers.KimiLinearForCausalLM.from_pretrained(tmp_path / "first", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "second")
    with safe_open(tmp_path / "second" / "model.safetensors", "pt") as file:
        assert file.get_slice("model.layers.1.block_sparse_moe.gate.weight").get_dtype() == "F32"
    config = load_config(tmp_path / "second")
    assert config.dtype == torch.bfloat16
    assert_whole(pieces(load_weights(tmp_path / "second", config), config), config, released_tensors(model))


def test_runtime_names_are_refused_with_the_remedy(tmp_path: Path):
    random_model(torch.bfloat16).save_pretrained(tmp_path, save_original_format=False)
    with pytest.raises(CheckpointError, match="save with save_original_format=True"):
        load_weights(tmp_path, load_config(tmp_path))


def test_transformers_reads_what_the_writer_writes(tmp_path: Path):
    """The mini checkpoint is in the released form: transformers loads it with no name missing or left over."""
    tensors = random_tensors(MINI)
    write_checkpoint(tmp_path / "mini", MINI, tensors)
    model, report = transformers.KimiLinearForCausalLM.from_pretrained(
        tmp_path / "mini", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(report.values()), report
    stored = released_tensors(model)
    assert stored.keys() == tensors.keys()
    assert all(
        torch.equal(stored[name].float(), tensor.float()) for name, tensor in tensors.items() if "A_log" not in name
    )
    assert json.loads((tmp_path / "mini" / "config.json").read_text())["linear_attn_config"]["num_heads"] == 2


def test_lora_eps_and_l2norm_eps_are_those_of_transformers():
    attention = random_model(torch.float32).model.layers[MINI.mla_layers[0]].self_attn
    assert attention.kv_a_layernorm.variance_epsilon == MINI.lora_eps == 1e-6
    assert attention.config.rms_norm_eps == MINI.rms_eps == 1e-5
