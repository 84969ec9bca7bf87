"""Tests that need SGLang; `make test-sglang` runs them in an environment of their own."""

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from engine_jobs import ENVIRONMENT, Engines  # noqa: E402

for name in ("TRITON_INTERPRET", "SGLANG_MAMBA_CONV_DTYPE", "TORCHDYNAMO_DISABLE"):
    os.environ[name] = ENVIRONMENT[name]


def pytest_addoption(parser):
    parser.addoption("--layers", type=int, default=4, help="layers of Kimi-Linear-48B on a GPU, 4 to 27")


@pytest.fixture(scope="session")
def plugins():
    """SGLang's own loader runs the entry points, ours and the shim's, in this process too."""
    from sglang.srt.plugins import load_plugins

    load_plugins()


@pytest.fixture(autouse=True)
def plugins_on_a_cpu(request):
    """Tests on a GPU leave SGLang to the engines' processes."""
    if request.node.get_closest_marker("gpu") is None:
        request.getfixturevalue("plugins")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """Folder with a checkpoint of each family."""
    from tiny_models import TINY, write_tiny

    folder = tmp_path_factory.mktemp("tiny")
    for family in TINY:
        write_tiny(folder / family, family)
    return folder


@pytest.fixture(scope="session")
def engines(tmp_path_factory):
    started = Engines(tmp_path_factory.mktemp("engines"))
    yield started
    started.close()
