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

from cute_megakernel import megakernel
from cute_megakernel.schedule_error import ScheduleError
from kimi_kernels.backends import BackendError
from kimi_kernels.config import K3_MINI, KIMI_LINEAR_MINI
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
        self.most_rows = 8

    def Images(self, weights):
        return ("images", weights)

    def Megakernel(self, config, images, state, rows):
        if rows > self.most_rows:
            raise ScheduleError("row 41: no tile fits the sums")
        kernel = object.__new__(megakernel.Megakernel)  # its own `check`
        kernel.control, kernel.words = torch.zeros(16, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
        kernel._limit_ns, kernel.schedule = 2e9, types.SimpleNamespace(rows=[])
        kernel.step = lambda tokens, batch: types.SimpleNamespace(logits=(rows, tokens.dtype))
        self.made.append((images, state, rows, kernel))
        return kernel


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
    assert [(images, rows) for images, _, rows, _ in hopper.made] == [(("images", weights), 8)]
    for rows in (2, 2, 1):
        assert chosen.step(pools, None, torch.zeros(rows, dtype=torch.int32)) == (rows, torch.int64)
    assert [(state, rows) for _, state, rows, _ in hopper.made[1:]] == [(pools, 2), (pools, 1)]


def test_a_launch_that_gave_up_is_raised_once_its_results_are_there(hopper):
    """Under a replayed graph no Python of the step runs: the copy of the word is read where SGLang reads the tokens."""
    chosen = megakernel_runner.MegakernelRunner(KIMI_LINEAR_MINI, meta_weights(KIMI_LINEAR_MINI, 1), 8)
    chosen.step(None, None, torch.zeros(2, dtype=torch.int64))
    hopper.made[-1][-1].control[megakernel_runner.ERROR] = 5
    chosen.check()  # the host has not seen this launch yet
    chosen.step(None, None, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(megakernel.MegakernelError, match="a wait inside SM 4 took more than 2 s"):
        chosen.check()


@pytest.mark.parametrize("overlap", (True, False))
def test_the_step_is_asked_after_the_wait_and_before_tokens_go_out(overlap, monkeypatch):
    order = []
    built = types.SimpleNamespace(check_launches=lambda: order.append("check"))
    binding = types.SimpleNamespace(built_megakernel=lambda model: model)
    monkeypatch.setattr(compat.importlib, "import_module", lambda name: binding)
    done = types.SimpleNamespace(synchronize=lambda: order.append("wait")) if overlap else None
    tokens = types.SimpleNamespace(tolist=lambda: order.append("wait"))
    result = types.SimpleNamespace(copy_done=done, next_token_ids=tokens)
    for model in (built, None):
        worker = types.SimpleNamespace(model_runner=types.SimpleNamespace(model=model))
        processor = types.SimpleNamespace(model_worker=worker)
        compat.around_results(lambda *_: order.append("process"), processor, None, result)
    assert order == ["wait", "check", "process", "process"]


def test_rows_without_a_schedule_are_left_to_sglang(hopper):
    """Where more rows do not fit, the log says so."""
    weights, device = meta_weights(KIMI_LINEAR_MINI, 1), torch.device("cuda")
    hopper.most_rows = 2
    chosen, why = runner.pick_runner(KIMI_LINEAR_MINI, weights, 8, device)
    assert chosen.max_rows == 2 and why == "up to 2 rows: row 41: no tile fits the sums"
    hopper.most_rows = 0
    with pytest.raises(BackendError, match="KIMI_SGLANG_RUNNER=megakernel: row 41: no tile fits the sums"):
        runner.pick_runner(KIMI_LINEAR_MINI, weights, 8, device, "megakernel")


@pytest.mark.parametrize("name, replacement, reason", [
    ("_installed", lambda name: name != "cutlass", "the package cutlass is not installed"),
    ("CAPABILITY", (10, 0), r"compute capability \(9, 0\), not \(10, 0\)"),
    ("RESERVE", 2.0, "its copies of weights need 0.0 GiB beside SGLang's own, 128.0 are free"),
])  # fmt: skip
def test_what_the_megakernel_lacks_is_said(name, replacement, reason, hopper, monkeypatch):
    """The Triton ops run instead and the log line says why; asked for by name, the server stops."""
    monkeypatch.setattr(megakernel_runner, name, replacement)
    weights, device = meta_weights(KIMI_LINEAR_MINI, 1), torch.device("cuda")
    assert re.search(reason, megakernel_runner.unsupported(KIMI_LINEAR_MINI, weights, device))
    monkeypatch.setenv(runner.VARIABLE, "megakernel")
    with pytest.raises(BackendError, match=reason):
        runner.pick_runner(KIMI_LINEAR_MINI, weights, 8, device)


def test_only_what_lies_in_another_layout_is_counted():
    """bfloat16 matrices are read where SGLang has them."""
    linear, k3 = (meta_weights(config, 1) for config in (KIMI_LINEAR_MINI, K3_MINI))
    kv_b = [layer.attn.kv_b.nbytes for layer in linear.layers if layer.index in KIMI_LINEAR_MINI.mla_layers]
    assert megakernel_runner.copied_bytes(linear) == sum(kv_b)
    experts = sum(layer.mlp.w13.nbytes + layer.mlp.w2.nbytes for layer in k3.layers[1:])
    assert experts < megakernel_runner.copied_bytes(k3) < 1.2 * experts


def test_the_megakernel_has_the_names_that_the_runner_uses():
    assert list(inspect.signature(megakernel.Images).parameters)[:1] == ["weights"]
    assert list(inspect.signature(megakernel.Megakernel).parameters)[:4] == ["config", "images", "state", "rows"]
    assert list(inspect.signature(megakernel.Megakernel.step).parameters) == ["self", "tokens", "batch"]
