"""The plugin where SGLang is absent or too old, and the choice of what runs the step. Needs no SGLang."""

import logging
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from kimi_kernels.backends import BackendError
from kimi_kernels.config import KIMI_LINEAR_MINI
from kimi_kernels.meta_weights import meta_weights
from sglang_integration import compat, plugin, runner

CPU = torch.device("cpu")
ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("version, reason", [
    (None, "sglang is not installed (needs 0.5.23)"),
    ("0.5.22", "sglang 0.5.22 has no contract for whole decode steps (needs 0.5.23)"),
    ("0.5.9.post1", "sglang 0.5.9.post1 has no contract for whole decode steps (needs 0.5.23)"),
])  # fmt: skip
def test_one_line_and_nothing_registered(version, reason, monkeypatch, caplog):
    monkeypatch.setattr(compat, "installed_version", lambda: version)
    monkeypatch.setattr(compat, "register_spec", lambda *_: pytest.fail("registered"))
    monkeypatch.setattr(compat, "hook_around", lambda *_: pytest.fail("hooked"))
    with caplog.at_level(logging.DEBUG):
        plugin.register()
    assert [record.getMessage() for record in caplog.records] == [f"kimi-kernels registers nothing: {reason}"]


@pytest.mark.parametrize("found, reason", [
    (types.SimpleNamespace(MEGAKERNEL_API_VERSION=2), "version 2 of the megakernel contract, this package version 1"),
    (types.SimpleNamespace(), "has no attribute 'MEGAKERNEL_API_VERSION'"),
])  # fmt: skip
def test_a_later_sglang_with_another_contract(found, reason, monkeypatch):
    monkeypatch.setattr(compat, "installed_version", lambda: "0.6.0rc1")
    monkeypatch.setattr(compat, "contract", lambda: found)
    assert reason in compat.unsupported_version()


def test_the_plugin_imports_no_torch():
    """SGLang loads it in processes that need none."""
    code = "import sys, sglang_integration.plugin; assert 'torch' not in sys.modules and 'sglang' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_triton_ops_run_where_no_megakernel_does(monkeypatch):
    monkeypatch.delenv(runner.VARIABLE, raising=False)
    weights = meta_weights(KIMI_LINEAR_MINI, 1)
    chosen, why = runner.pick_runner(KIMI_LINEAR_MINI, weights, 8, CPU)
    assert chosen.name == "triton ops" and why == "no megakernel: device cpu"


def test_a_named_runner_is_never_replaced(monkeypatch):
    weights = meta_weights(KIMI_LINEAR_MINI, 1)
    monkeypatch.setenv(runner.VARIABLE, "reference")
    assert runner.pick_runner(KIMI_LINEAR_MINI, weights, 8, CPU)[0].name == "reference ops"
    monkeypatch.setenv(runner.VARIABLE, "megakernel")
    with pytest.raises(BackendError, match="KIMI_SGLANG_RUNNER=megakernel: device cpu"):
        runner.pick_runner(KIMI_LINEAR_MINI, weights, 8, CPU)
    monkeypatch.setenv(runner.VARIABLE, "fastest")
    with pytest.raises(ValueError, match="must be one of"):
        runner.pick_runner(KIMI_LINEAR_MINI, weights, 8, CPU)


def test_a_megakernel_that_runs_here_is_taken(monkeypatch):
    """The interface that a megakernel has to offer: `unsupported` and `Runner` in one module."""
    made = []

    class Runner:
        name = "megakernel"

        def __init__(self, config, weights, max_rows):
            made.append((config, weights, max_rows))

    module = types.SimpleNamespace(Runner=Runner, unsupported=lambda config, max_rows, device: None)
    monkeypatch.delenv(runner.VARIABLE, raising=False)
    monkeypatch.setattr(runner, "megakernel_module", lambda: module)
    weights = meta_weights(KIMI_LINEAR_MINI, 1)
    chosen, why = runner.pick_runner(KIMI_LINEAR_MINI, weights, 8, torch.device("cuda"))
    assert chosen.name == "megakernel" and made == [(KIMI_LINEAR_MINI, weights, 8)] and why == "it runs on this device"
    module.unsupported = lambda config, max_rows, device: "needs sm_90a"
    monkeypatch.setenv(runner.VARIABLE, "megakernel")
    with pytest.raises(BackendError, match="needs sm_90a"):
        runner.pick_runner(KIMI_LINEAR_MINI, weights, 8, torch.device("cuda"))
