"""The plugin where SGLang is absent or too old, and the choice of what runs the step. Needs no SGLang."""

import inspect
import logging
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from kimi_kernels.backends import BackendError
from kimi_kernels.config import KIMI_LINEAR_MINI
from kimi_kernels.meta_weights import meta_weights
from sglang_integration import compat, megakernel_runner, plugin, runner

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


class FakeMegakernel:
    """The names of `cute_megakernel.megakernel` that the runner uses; remembers what was made."""

    def __init__(self):
        self.made: list[tuple] = []

    def Images(self, weights):
        return ("images", weights)

    def Megakernel(self, config, images, state, rows):
        self.made.append((images, state, rows))
        return types.SimpleNamespace(step=lambda tokens, batch: types.SimpleNamespace(logits=(rows, tokens.dtype)))


@pytest.fixture
def hopper(monkeypatch) -> FakeMegakernel:
    """A machine with everything that the megakernel needs, as far as the choice looks at it."""
    fake = FakeMegakernel()
    monkeypatch.setitem(sys.modules, megakernel_runner.MODULE, fake)
    monkeypatch.setattr(megakernel_runner, "_installed", lambda name: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**37, 2**37))
    monkeypatch.delenv(runner.VARIABLE, raising=False)
    return fake


def test_a_megakernel_that_runs_here_is_taken(hopper):
    """One instance for each number of rows, on the engine's pools; images exist before the engine sizes its caches."""
    weights, pools = meta_weights(KIMI_LINEAR_MINI, 1), object()
    chosen, why = runner.pick_runner(KIMI_LINEAR_MINI, weights, 8, torch.device("cuda"))
    assert chosen.name == "megakernel" and why == "it runs on this device"
    assert [(images, rows) for images, _, rows in hopper.made] == [(("images", weights), 8)]
    for rows in (2, 2, 1):
        assert chosen.step(pools, None, torch.zeros(rows, dtype=torch.int32)) == (rows, torch.int64)
    assert [(state, rows) for _, state, rows in hopper.made[1:]] == [(pools, 2), (pools, 1)]


@pytest.mark.parametrize("name, replacement, reason", [
    ("_installed", lambda name: name != "cutlass", "the package cutlass is not installed"),
    ("CAPABILITY", (10, 0), r"compute capability \(9, 0\), not \(10, 0\)"),
    ("RESERVE", 2.0, "its images of the weights need 0.0 GiB beside SGLang's own, 128.0 are free"),
])  # fmt: skip
def test_what_the_megakernel_lacks_is_said(name, replacement, reason, hopper, monkeypatch):
    """The Triton ops run instead and the log line says why; asked for by name, the server stops."""
    monkeypatch.setattr(megakernel_runner, name, replacement)
    weights, device = meta_weights(KIMI_LINEAR_MINI, 1), torch.device("cuda")
    assert re.search(reason, megakernel_runner.unsupported(KIMI_LINEAR_MINI, weights, device))
    monkeypatch.setenv(runner.VARIABLE, "megakernel")
    with pytest.raises(BackendError, match=reason):
        runner.pick_runner(KIMI_LINEAR_MINI, weights, 8, device)


def test_the_megakernel_has_the_names_that_the_runner_uses():
    from cute_megakernel import megakernel

    assert list(inspect.signature(megakernel.Images).parameters)[:1] == ["weights"]
    assert list(inspect.signature(megakernel.Megakernel).parameters)[:4] == ["config", "images", "state", "rows"]
    assert list(inspect.signature(megakernel.Megakernel.step).parameters) == ["self", "tokens", "batch"]
