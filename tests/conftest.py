"""Hypothesis profiles, the device fixture, NaN-filled `torch.empty` and a time limit for every test."""

import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of triton

torch.set_num_threads(1)  # small tensors; the test run itself is parallel

COMMON = dict(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
settings.register_profile("dev", max_examples=10, **COMMON)
settings.register_profile("ci", max_examples=15, derandomize=True, database=None, print_blob=True, **COMMON)
settings.register_profile("nightly", max_examples=500, print_blob=True, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

TEST_SECONDS = 300


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised float memory is NaN: an element that a kernel forgets to write shows."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        out = empty(*args, **kwargs)
        capturing = out.is_cuda and torch.cuda.is_current_stream_capturing()
        return out.fill_(float("nan")) if out.is_floating_point() and not out.is_meta and not capturing else out

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture(autouse=True)
def time_limit():
    """A hang ends the test, not the run."""

    def stop(*_):
        raise TimeoutError(f"test took more than {TEST_SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(TEST_SECONDS)
    yield
    signal.alarm(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
