"""What `--backend megakernel` says where it cannot run: each message names what is missing, before a load."""

import dataclasses
import importlib.util
import json

import pytest
import torch
from fake_megakernel import Fake

from kimi_kernels import backends, cli, decoder
from kimi_kernels.backends import BackendError, check_megakernel, make_ops
from kimi_kernels.commands import common, trace
from kimi_kernels.config import K3_MINI
from kimi_kernels.decoder import Decoder
from kimi_kernels.meta_weights import meta_weights
from kimi_kernels.mini import make_mini


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.parametrize("rows", (0, 9))
def test_batches_beyond_eight_are_refused(rows):
    with pytest.raises(ValueError, match=rf"backend megakernel: batch must be in \[1, 8\], got {rows}"):
        check_megakernel("cuda", torch.bfloat16, rows)


def test_other_dtypes_are_refused():
    config = dataclasses.replace(K3_MINI, dtype=torch.float32)
    with pytest.raises(ValueError, match="backend megakernel: dtype must be bfloat16, got float32"):
        Decoder(config, meta_weights(config), "megakernel", context=8)


def test_a_device_that_is_no_gpu_is_named(monkeypatch, hopper):
    with pytest.raises(BackendError, match="needs an sm_90a or sm_100a GPU .*: the device is cpu"):
        check_megakernel("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendError, match="nvidia-cutlass-dsl: torch sees no GPU here"):
        Decoder(K3_MINI, meta_weights(K3_MINI), "megakernel", context=8, device="cuda")


def test_an_older_gpu_is_named(monkeypatch, hopper):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(BackendError, match="this one is sm_89"):
        check_megakernel("cuda")


def test_the_missing_package_is_named(monkeypatch, hopper):
    find = importlib.util.find_spec
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None if name == "cutlass" else find(name))
    with pytest.raises(BackendError, match=r"needs nvidia-cutlass-dsl: pip install .kimi-kernels\[megakernel\]"):
        check_megakernel("cuda", torch.bfloat16, 8)


@pytest.fixture
def stand_in(monkeypatch):
    """The commands with a stand-in for the kernel, on the CPU."""
    for module in (decoder, trace, common):
        monkeypatch.setattr(module, "check_megakernel", lambda *_: None)

    def make(config, weights, state, rows, taps=False, trace=False):
        return Fake(config, weights, state, rows)

    monkeypatch.setattr(decoder, "make_megakernel", make)


@pytest.mark.parametrize("family", ("k3", "kimi-linear"))
def test_the_commands_around_the_kernel(family, stand_in, tmp_path, capsys):
    directory, file = tmp_path / family, tmp_path / "step.json"
    make_mini(directory, family, seed=1)
    where = (str(directory), "--device", "cpu", "--layers", "0:4", "--json")

    def run(command: str, *options: str) -> dict:
        assert cli.main([command, *where, *options]) == 0
        return json.loads(capsys.readouterr().out)

    results = [
        run("decode", "--tokens", "1,2", "--new", "4", "--backend", backend) for backend in ("reference", "megakernel")
    ]
    assert results[0]["tokens"] == results[1]["tokens"] and results[1]["backend"] == "megakernel"
    for sides in (("--left", "reference", "--right", "megakernel"), ("--left", "megakernel", "--right", "reference")):
        compared = run("compare", *sides, "--steps", "2")
        assert compared["passed"] and compared["steps"] == 2
        assert all(op["left_ratio"] <= 1 and op["right_ratio"] <= 1 for op in compared["ops"])
    traced = run("trace", "--rows", "2", "--context", "70", "--output", str(file))
    assert traced["sms"] == 5 and traced["table"][0]["name"].endswith("mix") and traced["step_us"] > 0
    assert json.loads(file.read_text())["traceEvents"]


def test_it_has_no_ops():
    with pytest.raises(BackendError, match="runs whole steps"):
        make_ops("megakernel")
