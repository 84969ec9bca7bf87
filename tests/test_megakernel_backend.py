"""What `--backend megakernel` says where it cannot run: each message names what is missing, before a load."""

import dataclasses
import importlib.util

import pytest
import torch

from kimi_kernels import backends
from kimi_kernels.backends import BackendError, check_megakernel, make_ops
from kimi_kernels.config import K3_MINI
from kimi_kernels.decoder import Decoder
from kimi_kernels.meta_weights import meta_weights


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
    with pytest.raises(BackendError, match="nvidia-cutlass-dsl: torch sees none here"):
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


def test_it_has_no_ops():
    with pytest.raises(BackendError, match="runs whole steps"):
        make_ops("megakernel")
