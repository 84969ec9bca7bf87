"""The megakernel's rows of the benchmark, without a GPU: random images are shaped like real ones, a red check gets no
number, and a step that would not fit says so."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from fake_megakernel import Fake

from cute_megakernel import megakernel
from cute_megakernel.lowering import lower
from cute_megakernel.megakernel import Images
from cute_megakernel.random_images import RandomImages
from cute_megakernel.recording import record_local_step
from kimi_kernels import bench, bench_layers, bench_megakernel, cli
from kimi_kernels.backends import make_ops
from kimi_kernels.bench_layers import ChainSpec
from kimi_kernels.bench_megakernel import FusedBench, random_model, walk_layers
from kimi_kernels.bench_rows import Bench
from kimi_kernels.bench_timing import Timing
from kimi_kernels.config import K3, K3_MINI, KIMI_LINEAR_48B, KIMI_LINEAR_MINI
from kimi_kernels.meta_weights import meta_weights

CONTEXT = 70


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


@pytest.mark.parametrize(("config", "layers"), ((K3, [0, 1, 3]), (KIMI_LINEAR_48B, [0, 1, 3])), ids=("k3", "linear"))
def test_the_checked_layers_are_of_every_kind(config, layers):
    assert walk_layers(config) == layers


def test_what_fails_its_check_gets_no_number(monkeypatch):
    fused_bench = fused()
    monkeypatch.setattr(fused_bench, "_walk", lambda sharded: "layer 1 kda: linear: wrong" if sharded else 0.5)
    monkeypatch.setattr(
        fused_bench, "time_step", lambda layers, sharded: Timing(8.0 * len(layers or [0]), 1.0, 9.0, 4, 15)
    )
    monkeypatch.setattr(fused_bench.bench, "measure_layer", lambda spec: None)
    fused_bench.measure()
    rows = {(row.name, row.by): row for row in fused_bench.bench.rows}
    assert rows["layer/kda+moe", "megakernel"].us == 8.0, "one more layer"
    assert rows["layer/kda+moe", "megakernel"].worst_over_bound == 0.5
    for name in ("layer/kda+moe sharded", "model sharded"):
        assert rows[name, "megakernel"].us is None and "not timed" in rows[name, "megakernel"].failure
    assert rows["model", "megakernel"].bytes > 0 and rows["model", "triton"].us == 2.0


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


@pytest.mark.parametrize("config", ("k3-mini", "kimi-linear-mini"))
def test_the_command_with_a_stand_in(config, monkeypatch, capsys):
    """All of it but the launch, on the CPU: inputs, images, schedules, the check, and the rows that come out."""

    def make(local, images, state, rows, schedule, taps=False):
        kernel = Fake(local, images.weights, state, rows, schedule=schedule)
        kernel.logits = torch.zeros(1)
        if not taps:  # weights without data
            kernel.step = lambda tokens, batch: None
        return kernel

    properties = SimpleNamespace(name="fake", multi_processor_count=5, L2_cache_size=1)
    real_generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": real_generator("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(bench, "make_ops", lambda *_: make_ops("reference"))
    monkeypatch.setattr(bench, "read_ceiling", lambda: (4e12, []))
    times = itertools.count(2)  # a longer walk takes longer
    monkeypatch.setattr(bench, "time_graph", lambda work, calls: Timing(next(times), 1.0, 3.0, calls, 15))
    monkeypatch.setattr(bench, "check_megakernel", lambda *_: None)
    monkeypatch.setattr(bench_layers, "COLD_BYTES", 1)
    monkeypatch.setattr(megakernel, "Megakernel", make)
    tp = "2" if config == "k3-mini" else "1"
    argv = ["bench", "--config", config, "--tp", tp, "--context", "70", "--backend", "megakernel", "--json"]
    assert cli.main(argv) == 0
    result = json.loads(capsys.readouterr().out)
    rows = [(row["name"], row["by"]) for row in result["results"]]
    plain = [("layer/kda+moe", "triton"), ("layer/kda+moe", "megakernel")]
    if config == "k3-mini":
        cut = [(f"{name} sharded", by) for name, by in plain]
        assert rows == [*plain, *cut, ("model", "triton"), ("model", "megakernel"), ("model sharded", "megakernel")]
    else:
        assert rows == [*plain, ("model", "triton"), ("model", "megakernel")]
    assert all(0 < row["worst_over_bound"] <= 1 for row in result["results"] if row["by"] == "megakernel")
