"""The megakernel's rows of the benchmark, without a GPU: random images are shaped like real ones, a red check gets no
number, and a step that would not fit says so."""

import dataclasses
import importlib.util
import itertools
import json
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_megakernel import Fake

from cute_megakernel import build, megakernel
from cute_megakernel.lowering import lower
from cute_megakernel.megakernel import Images
from cute_megakernel.random_images import RandomImages
from cute_megakernel.recording import record_local_step
from kimi_kernels import bench, bench_layers, bench_megakernel, cli
from kimi_kernels.backends import make_ops
from kimi_kernels.bench_layers import ChainSpec
from kimi_kernels.bench_megakernel import FusedBench, layer_walks, random_model, walk_layers
from kimi_kernels.bench_rows import Bench
from kimi_kernels.bench_timing import Timing
from kimi_kernels.config import K3, K3_MINI, KIMI_LINEAR_48B, KIMI_LINEAR_MINI
from kimi_kernels.meta_weights import meta_weights

CONTEXT = 70
WRONG = "layer 1 kda: linear: wrong"
SCRIPT = Path(__file__).parent.parent / "benchmarks/megakernel.py"


def load_script():
    spec = importlib.util.spec_from_file_location("benchmark_cases", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmark_cases"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


benchmark = load_script()


def fake_timer(work, calls: int) -> Timing:
    return Timing(2.0, 1.0, 3.0, calls, 15)


def fused(config=K3_MINI, tp: int = 2) -> FusedBench:
    generator = torch.Generator().manual_seed(0)
    return FusedBench(Bench(config, tp, 1, CONTEXT, make_ops("reference"), generator, fake_timer, ceiling=1e9))


@pytest.mark.parametrize("config", (K3_MINI, KIMI_LINEAR_MINI), ids=("k3", "kimi-linear"))
def test_random_images_are_shaped_like_those_of_weights(config):
    meta = meta_weights(config)
    random = RandomImages(meta, torch.Generator().manual_seed(1))
    images = Images(random_model(meta, torch.Generator().manual_seed(2)))
    rows = [row for row in lower(record_local_step(config, meta, 1), 1 << 20, 132) if "image" in row.args]
    for row in rows:
        asked = row.args["image"], row.args["weight"], row.args.get("scale")
        made, want = random.image(*asked), images.image(*asked)
        assert made.shape == want.shape and made.dtype == want.dtype, row.name
        assert made is random.image(*asked)
        if made.dtype == torch.uint8:
            assert 100 < int(made[..., 256:].min()) <= int(made[..., 256:].max()) <= 128
        else:
            assert bool(torch.isfinite(made).all())
    for path, tensor in images.tensors.items():
        plain = random.plain(SimpleNamespace(path=path))
        assert plain.shape == tensor.shape and plain.dtype == tensor.dtype


def test_two_walks_differ_by_eight_layers_behind_the_same_bank():
    """As many bank rows as the chain of Triton ops has; none where the model has no bank."""
    short, long = layer_walks(K3)
    assert short == [12, 24, 36, 48, 1, 2, 4, 5, 6, 8, 9, 10] and long[:12] == short and len(long) == 20
    assert [K3.starts_block(layer) for layer in long] == [True] * 4 + [False] * 16
    assert not set(long) & {*K3.mla_layers, *K3.dense_layers} and len(set(long)) == len(long)
    short, long = layer_walks(KIMI_LINEAR_48B)
    assert long[:8] == short and len(set(long)) == 16
    assert layer_walks(K3_MINI) == ([2, 1], [2, 1, 4])


@pytest.mark.parametrize(("config", "layers"), ((K3, [0, 1, 3]), (KIMI_LINEAR_48B, [0, 1, 3])), ids=("k3", "linear"))
def test_the_checked_layers_are_of_every_kind(config, layers):
    assert walk_layers(config) == layers


def test_what_fails_its_check_gets_no_number(monkeypatch):
    fused_bench = fused()
    monkeypatch.setattr(fused_bench, "_walk", lambda sharded: WRONG if sharded else {"megakernel": 0.5, "triton": 0.4})
    monkeypatch.setattr(
        fused_bench, "time_step", lambda layers, sharded: Timing(8.0 * len(layers or [0]), 1.0, 9.0, 4, 15)
    )
    monkeypatch.setattr(fused_bench.bench, "measure_layer", lambda spec: None)
    fused_bench.measure()
    rows = {(row.name, row.by): row for row in fused_bench.bench.rows}
    assert rows["layer/kda+moe", "megakernel"].us == 8.0, "one more layer"
    assert rows["layer/kda+moe", "megakernel"].worst_over_bound == 0.5
    for row in (("layer/kda+moe sharded", "megakernel"), ("model sharded", "megakernel"), ("model sharded", "triton")):
        assert rows[row].us is None and rows[row].failure == f"not timed: {WRONG}"
    assert rows["model", "megakernel"].bytes > 0 and rows["model", "triton"].us == 2.0
    assert rows["model", "triton"].worst_over_bound == 0.4
    assert rows["model", "triton"].floor_us == pytest.approx(rows["model", "triton"].share_of_ceiling * 2.0)


def test_a_check_runs_once_and_its_failure_stays(monkeypatch):
    fused_bench, calls = fused(), []
    monkeypatch.setattr(fused_bench, "_walk", lambda sharded: calls.append(sharded) or "red")
    for _ in range(2):
        with pytest.raises(AssertionError, match="not timed: red"):
            fused_bench.check(True)
    assert calls == [True]


def test_sharded_bytes_leave_out_what_other_ranks_read():
    fused_bench = fused()
    full, cut = fused_bench._model_bytes(False), fused_bench._model_bytes(True)
    moe = meta_weights(K3_MINI, 2).layers[1].mlp
    gone = sum(getattr(moe, name).nbytes for name in ("router", "latent_down", "latent_up")) // 2
    count = K3_MINI.num_layers - len(K3_MINI.dense_layers)
    assert full - cut == count * gone
    assert ChainSpec("kda", True, True).name == "layer/kda+moe sharded"


def test_a_model_that_does_not_fit_says_so(monkeypatch):
    fused_bench = fused()
    fused_bench.generator = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(bench_megakernel.torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(bench_megakernel.torch.cuda, "mem_get_info", lambda: (10**6, 10**6))
    row = SimpleNamespace(missing="")
    assert not fused_bench._fits(row, meta_weights(K3, 8))
    assert "GB of weights" in row.missing


@pytest.fixture
def stand_in(monkeypatch):
    """All but the launch, on the CPU: inputs, images, schedules, the check, and the rows that come out."""

    def make(local, images, state, rows, schedule, taps=False):
        kernel = Fake(local, images.weights, state, rows, schedule=schedule)
        kernel.logits = torch.zeros(1)
        if not taps:  # weights without data
            kernel.step = lambda tokens, batch: None
        return kernel

    properties = SimpleNamespace(name="fake", multi_processor_count=5, L2_cache_size=1)
    real_generator, times = torch.Generator, itertools.count(2)  # a longer walk takes longer
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": real_generator("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    for module in (bench, benchmark):
        monkeypatch.setattr(module, "make_ops", lambda *_: make_ops("reference"))
        monkeypatch.setattr(module, "read_ceiling", lambda: (4e12, []))
        monkeypatch.setattr(module, "time_graph", lambda work, calls: Timing(next(times), 1.0, 3.0, calls, 15))
        monkeypatch.setattr(module, "check_megakernel", lambda *_: None)
    monkeypatch.setattr(bench_layers, "COLD_BYTES", 1)
    monkeypatch.setattr(megakernel, "Megakernel", make)


@pytest.mark.parametrize("config", ("k3-mini", "kimi-linear-mini"))
def test_the_command_with_a_stand_in(config, stand_in, capsys):
    tp = "2" if config == "k3-mini" else "1"
    argv = ["bench", "--config", config, "--tp", tp, "--context", "70", "--backend", "megakernel", "--json"]
    assert cli.main(argv) == 0
    result = json.loads(capsys.readouterr().out)
    rows = [(row["name"], row["by"]) for row in result["results"]]
    plain = [("layer/kda+moe", "triton"), ("layer/kda+moe", "megakernel")]
    if config == "k3-mini":
        cut = [(f"{name} sharded", by) for name, by in plain]
        models = [("model", "triton"), ("model", "megakernel")]
        assert rows == [*plain, *cut, *models, *((f"{name} sharded", by) for name, by in models)]
    else:
        assert rows == [*plain, ("model", "triton"), ("model", "megakernel")]
    assert all(0 < row["worst_over_bound"] <= 1 for row in result["results"] if row["by"] == "megakernel")


def test_the_cases_with_a_stand_in(stand_in, monkeypatch, tmp_path, capsys):
    """Every case by both, at two contexts, as JSON and as a table of one line each; built ahead what runs."""
    small = {"kimi-linear-48b": "kimi-linear-mini", "k3": "k3-mini"}
    cases = {
        name: dataclasses.replace(case, config=small[case.config], tp=min(case.tp, 2))
        for name, case in benchmark.CASES.items()
    }
    built, proved = [], []
    monkeypatch.setattr(benchmark, "CASES", cases)
    monkeypatch.setattr(benchmark, "ProcessPoolExecutor", InThisProcess)
    monkeypatch.setattr(build, "machine_code", lambda shape, arch: built.append((shape, arch)))
    monkeypatch.setattr(build, "prove", proved.append)
    file = tmp_path / "result.json"
    assert benchmark.main(["--contexts", "70,130", "--output", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["passed"] and len(result["results"]) == 3 * 2 * 2
    assert [(row["case"], row["context"], row["by"]) for row in result["results"]] == [
        (case, context, by) for case in cases for context in (70, 130) for by in ("triton", "megakernel")
    ]
    assert all(row["us"] and row["floor_us"] and row["share_of_ceiling"] for row in result["results"])
    assert {row["note"] for row in result["results"]} == {"", "3 layers minus 2"}
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    lines = [line for line in lines if line and line[0] in cases]
    assert len(lines) == 6 and all(len(line) == 8 for line in lines)
    assert {arch for _, arch in built} == {"sm_90a"} and len(proved) == len(built) == 2 + 3 + 2


def test_a_case_that_fails_says_so_and_ends_with_an_error(stand_in, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "build_ahead", lambda _: None)
    monkeypatch.setattr(benchmark, "CASES", {"small": benchmark.Case("k3-mini", 2, "model", True)})
    monkeypatch.setattr(FusedBench, "_walk", lambda self, sharded: WRONG)
    assert benchmark.main(["--cases", "small"]) == 1
    captured = capsys.readouterr()
    assert f"small by megakernel: not timed: {WRONG}" in captured.err and "-" in captured.out
    with pytest.raises(SystemExit):
        benchmark.main(["--cases", "nothing"])
    assert "nothing is not among small" in capsys.readouterr().err


class InThisProcess:
    """A pool whose work is done when it is handed in."""

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, function, *args) -> Future:
        future: Future = Future()
        future.set_result(function(*args))
        return future
