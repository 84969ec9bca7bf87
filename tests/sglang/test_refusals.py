"""What the whole step does not serve is refused by SGLang itself, before weights are loaded, with the reason."""

import json
import os

import pytest
from engine_jobs import ENGINE

HEAD = "--enable-nvidia-megakernel cannot run this setup:"


@pytest.fixture(autouse=True)
def same_environment():
    """SGLang's resolution sets variables of the process, the state dtype among them."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def resolve(path, **arguments):
    """SGLang's own resolution of real ServerArgs with the flag."""
    from sglang.srt.server_args import ServerArgs

    settings = {**ENGINE, "model_path": str(path), "enable_nvidia_megakernel": True, **arguments}
    ServerArgs(**settings).resolve_once()


def reasons(path, **arguments) -> list[str]:
    with pytest.raises(ValueError) as error:
        resolve(path, **arguments)
    head, *lines = str(error.value).splitlines()
    assert head == HEAD
    return [line.removeprefix("  - ") for line in lines]


@pytest.mark.parametrize("family", ("kimi-linear", "k3"))
def test_the_engine_tests_settings_are_served(tiny, family):
    resolve(tiny / family)


@pytest.mark.parametrize("arguments, reason", [
    (dict(tp_size=2), "tp_size 2 is not one of ['1']"),
    (dict(dtype="float16"), "dtype 'float16' is not one of ['bfloat16', 'float32']"),
    (dict(kv_cache_dtype="fp8_e4m3"), "kv_cache_dtype 'fp8_e4m3' is not one of ['auto', 'bf16', 'bfloat16']"),
    (dict(mamba_ssm_dtype="bfloat16"), "mamba_ssm_dtype 'bfloat16' is not one of ['None', 'float32']"),
    (dict(enable_linear_replayssm=True), "enable_linear_replayssm True is not one of ['False']"),
    (dict(enable_return_hidden_states=True), "enable_return_hidden_states True is not one of ['False']"),
    (dict(enable_fp32_lm_head=True), "enable_fp32_lm_head True is not one of ['False']"),
    (dict(moe_runner_backend="flashinfer_cutlass"),
     "moe_runner_backend 'flashinfer_cutlass' is not one of ['auto', 'triton']"),
    (dict(pp_size=2), "pipeline parallelism is in use and kimi-kernels-kimi-linear does not accept it"),
    (dict(enable_memory_saver=True), "memory release is in use and kimi-kernels-kimi-linear does not accept it"),
    (dict(enable_torch_compile=True),
     "torch-compiled decode is in use and kimi-kernels-kimi-linear does not accept it"),
    (dict(enable_lora=True, max_lora_rank=8, lora_target_modules=["q_proj"]),
     "LoRA is in use and kimi-kernels-kimi-linear does not accept it"),
    (dict(speculative_algorithm="EAGLE"),
     "speculative decoding is in use and kimi-kernels-kimi-linear does not accept it"),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")  # fmt: skip
def test_an_unsupported_setting_is_named(tiny, arguments, reason):
    """Faults T12, T14: modes without metadata, compilation that does not see what changes in place: not let in."""
    assert reasons(tiny / "kimi-linear", **arguments) == [reason]


def test_every_reason_is_listed(tiny):
    found = reasons(tiny / "kimi-linear", tp_size=2, kv_cache_dtype="fp8_e4m3", enable_lora=True, max_lora_rank=8,
                    lora_target_modules=["q_proj"])  # fmt: skip
    assert len(found) == 3


def test_a_config_that_the_ops_do_not_support_is_named(tiny, tmp_path):
    """The reasons are those of our config reader."""
    data = json.loads((tiny / "kimi-linear" / "config.json").read_text())
    data["linear_attn_config"]["head_dim"] = 48
    data["moe_router_activation_func"] = "softmax"
    (tmp_path / "config.json").write_text(json.dumps(data))
    found = reasons(tmp_path)
    assert len(found) == 2
    assert any("head_dim" in reason and "48" in reason for reason in found)
    assert any("moe_router_activation_func" in reason and "softmax" in reason for reason in found)


def test_without_a_gpu_the_flag_is_refused(tiny, monkeypatch):
    import sglang.srt.kernel_plugins.nvidia.binding as binding

    monkeypatch.setattr(binding, "device_isa", lambda: None)
    assert reasons(tiny / "kimi-linear") == ["no GPU is visible"]


def test_an_sglang_that_lacks_something_is_refused(tiny, monkeypatch):
    from sglang_integration import compat

    monkeypatch.setattr(compat, "USED", (*compat.USED, "sglang.srt.server_args.NoSuchThing"))
    found = reasons(tiny / "k3")
    assert found == [f"this SGLang ({compat.installed_version()}) lacks sglang.srt.server_args.NoSuchThing"]
