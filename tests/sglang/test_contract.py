"""What this package relies on in SGLang exists, and what SGLang asks of a plugin is there."""

import inspect
from importlib import import_module
from importlib.metadata import entry_points

import engine_jobs
import gpu_engines
import pytest

from sglang_integration import compat, per_op, plugin

CONTRACT = "sglang.kernels.plugin_kernels.nvidia.spec"


def test_the_version_is_the_one_written_against():
    assert compat.unsupported_version() is None
    assert compat.missing() == []
    assert import_module(CONTRACT).MEGAKERNEL_API_VERSION == compat.API_VERSION


def test_entry_points_lead_to_one_function_under_the_name_that_sglang_wants():
    found = {point.name: point.load() for point in entry_points(group="sglang.srt.plugins")}
    assert import_module(CONTRACT).ENTRY_POINT == "nvidia_megakernel"
    assert found["nvidia_megakernel"] is found["kimi_k3_megakernel"] is plugin.register


def test_registering_again_changes_nothing():
    hooks = import_module("sglang.srt.plugins.hook_registry").HookRegistry._hooks
    choices = import_module("sglang.srt.arg_groups.choices").LINEAR_ATTN_KERNEL_BACKEND_CHOICES
    before = {target: len(entries) for target, entries in hooks.items()}
    plugin.register()
    assert {target: len(entries) for target, entries in hooks.items()} == before
    assert choices.count(per_op.NAME) == 1
    assert set(plugin.SPECS) <= set(import_module(CONTRACT).registered_architectures())


@pytest.mark.parametrize("architecture", plugin.SPECS)
def test_sglang_finds_a_spec_on_hopper_only(architecture):
    find = import_module(CONTRACT).find_spec
    spec, why = find(architectures=[architecture], isa="sm_90")
    assert why == "" and spec.max_rows == 8 and spec.features == frozenset()
    spec, why = find(architectures=[architecture], isa="sm_100")
    assert spec is None and "supports ['sm_90'], not sm_100" in why


def test_another_package_with_the_same_architecture_is_one_line(monkeypatch, caplog):
    """SGLang runs on; the log says who has the flag."""
    registry = import_module(CONTRACT)._REGISTRY
    monkeypatch.setitem(registry, "KimiLinearForCausalLM", "another.package:SPEC")
    plugin.register()
    assert [record.getMessage() for record in caplog.records] == [
        "kimi-kernels registers no whole step: a megakernel spec for KimiLinearForCausalLM is already registered: "
        "another.package:SPEC"
    ]


@pytest.mark.parametrize("target, first", [
    (f"{compat.KDA_DISPATCHER}.__init__", ["self", "decode_backend", "prefill_backend", "verify_backend"]),
    (f"{compat.KDA_BACKEND}.forward_decode", ["self", "layer", "forward_batch", "mixed_qkv", "a", "b"]),
    (f"{compat.MXFP4_METHOD}.process_weights_after_loading", ["self", "layer"]),
    (f"{compat.RESULTS}.process_batch_result_decode", ["self", "batch", "result"]),
    ("sglang.srt.layers.attention.hybrid_linear_attn_backend.MambaAttnBackendBase._track_mamba_state_decode",
     ["self", "forward_batch", "conv_states", "ssm_states", "cache_indices", "layer_id"]),
])  # fmt: skip
def test_wrapped_functions_take_what_the_wrappers_pass_on(target, first):
    module, owner, name = target.rsplit(".", 2)
    function = inspect.unwrap(getattr(getattr(import_module(module), owner), name))
    assert list(inspect.signature(function).parameters)[: len(first)] == first


def test_settings_that_the_spec_constrains_exist():
    """A setting that was renamed would be checked no more."""
    from sglang.srt.server_args import ServerArgs

    from sglang_integration.spec import SERVER_ARGS

    fields = set(ServerArgs.__struct_fields__ if hasattr(ServerArgs, "__struct_fields__") else dir(ServerArgs))
    assert set(SERVER_ARGS) | {"moe_runner_backend", "quantization"} <= fields
    for engine, jobs in ((engine_jobs.ENGINE, engine_jobs.JOBS), (gpu_engines.ENGINE, gpu_engines.JOBS)):
        assert set(engine) | {name for job in jobs.values() for name, _ in job.arguments} <= fields
