"""The benchmark without a GPU: its cases, inputs and bytes, its statistics, and that a wrong op gets no number."""

import argparse
import contextlib
import importlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kimi_kernels import bench, bench_cases, bench_layers, bench_rows, bench_timing, cli
from kimi_kernels.backends import BackendError, make_ops
from kimi_kernels.bench_cases import COLD_BYTES, MAX_SETS, Case, step_cases, tensors_of
from kimi_kernels.bench_inputs import input_sets, random_args
from kimi_kernels.bench_layers import Chain, ChainSpec, chain_specs, layer_bytes
from kimi_kernels.bench_peers import PEERS, Peer, PeerMissing, relative_error
from kimi_kernels.bench_rows import Bench, Row
from kimi_kernels.bench_timing import Timing, percentile, summarise
from kimi_kernels.checks import validate
from kimi_kernels.config import CONFIGS, K3, K3_MINI, KIMI_LINEAR_48B, KIMI_LINEAR_MINI
from kimi_kernels.op_specs import OPS
from kimi_kernels.traffic import record_step

CONTEXT = 70  # more than one page, the last one partly filled
MINIS = {"k3": (K3_MINI, 2), "kimi-linear": (KIMI_LINEAR_MINI, 1)}  # config, tp


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fake_timer(work, calls: int) -> Timing:
    """Runs the work as the real timer would before it captures a graph, and makes up a time."""
    work()
    return Timing(2.0, 1.0, 3.0, calls, 15)


def make_bench(family: str = "k3", rows: int = 1, timer=fake_timer, ops=None) -> Bench:
    config, tp = MINIS[family]
    return Bench(config, tp, rows, CONTEXT, ops or make_ops("reference"), generator(), timer, ceiling=1e9)


def broken_ops(**replaced) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(make_ops("reference")), **replaced})


@pytest.fixture
def few_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small shapes would ask for 64 input sets each, and for 64 layers."""
    monkeypatch.setattr(bench_cases, "MAX_SETS", 2)
    monkeypatch.setattr(bench_layers, "MAX_SETS", 2)
    monkeypatch.setattr(bench_layers, "MIN_LAYERS", 2)
    monkeypatch.setattr(bench_rows, "MIN_CALLS", 1)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.floats(0, 100))
def test_percentile_is_that_of_torch(values, q):
    want = torch.quantile(torch.tensor(values, dtype=torch.float64), q / 100, interpolation="linear")
    assert percentile(values, q) == pytest.approx(float(want), rel=1e-9, abs=1e-9)


def test_percentile_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="at least one value"):
        percentile([], 50)


def test_summary_is_per_call():
    timing = summarise([30.0, 10.0, 20.0, 1000.0, 15.0], calls=10)
    assert (timing.us, timing.calls, timing.replays) == (2.0, 10, 5)
    assert timing.p20_us == pytest.approx(1.4) and timing.p80_us == pytest.approx(22.4)


@pytest.fixture
def fake_cuda(monkeypatch):
    """CUDA graphs and events of a device whose clock only moves when work runs: 40 us a launch."""
    log = []

    class Graph:
        def replay(self):
            log.append("replay")

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = sum(entry in ("replay", "launch") for entry in log)

        def elapsed_time(self, end):
            return (end.at - self.at) * 0.040

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: log.append("synchronize"))
    return log


def test_a_graph_is_warmed_up_and_replayed(fake_cuda):
    timing = bench_timing.time_graph(lambda: fake_cuda.append("work"), calls=8)
    assert timing == Timing(pytest.approx(5.0), pytest.approx(5.0), pytest.approx(5.0), 8, 15)
    assert fake_cuda == ["work", "synchronize", "work", *["replay"] * 18, "synchronize"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's part")
def test_the_ceiling_kernel_reads_everything(fake_cuda, monkeypatch):
    monkeypatch.setattr(bench_timing, "CEILING_SHAPES", ((1024, 2, 4, 5), (2048, 1, 8, 3)))
    monkeypatch.setattr(bench_timing, "WARMUP", 0)
    monkeypatch.setattr(bench_timing, "REPLAYS", 1)
    reader = bench_timing._reader

    def logged(*args):
        launch = reader(*args)
        return lambda: (fake_cuda.append("launch"), launch())

    monkeypatch.setattr(bench_timing, "_reader", logged)
    best, shapes = bench_timing.read_ceiling(nbytes=2**17, device="cpu")
    assert best == pytest.approx(2**17 / 40e-6) and len(shapes) == 2
    monkeypatch.setattr(bench_timing, "_reader", lambda kernel, data, sums, *_: lambda: sums.zero_())
    with pytest.raises(RuntimeError, match="wrong sum"):
        bench_timing.read_ceiling(nbytes=2**17, device="cpu")


def by_name(cases: list[Case]) -> dict[str, Case]:
    assert len({case.name for case in cases}) == len(cases)
    return {case.name: case for case in cases}


def test_cases_of_k3_are_the_real_shapes():
    cases = by_name(step_cases(K3, 8, 1, 1024))
    shapes = {
        "linear/kda_in_proj": (6284, 7168),
        "linear/kda_o_proj": (7168, 1536),
        "linear/dense_gate_up": (8448, 7168),
        "linear/latent_down": (3584, 7168),
        "linear/latent_up": (7168, 3584),
        "linear/shared_down": (7168, 768),
        "linear/mla_in_proj": (3648, 7168),
        "linear/mla_q_b": (2304, 1536),
        "linear/lm_head": (20480, 7168),
        "router_logits": (896, 7168),
    }
    for name, shape in shapes.items():
        assert tuple(cases[name].args[1].shape) == shape, name
    assert [len(cases[f"attn_res_norm/bank{n}"].args[1]) for n in (4, 8)] == [4, 8]
    assert tuple(cases["moe_gate_up_mxfp4"].args[2].shape) == (896, 768, 1792)
    assert tuple(cases["kda_recurrent"].args[5].shape) == (1, 12, 128, 128)
    # q of the recurrence is a slice of the convolution, out_gate one of the fused projection
    cases = by_name(step_cases(K3, 8, 2, 1024))
    assert cases["kda_recurrent"].args[0].stride(0) == 3 * 1536
    assert (
        cases["gated_rms_norm"].args[1].stride(0) == 6284 and cases["gated_rms_norm"].args[1].storage_offset() == 4608
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_every_op_of_the_step_has_a_case_with_its_bytes(name):
    config, rows = CONFIGS[name], 3
    cases = step_cases(config, 1, rows, CONTEXT)
    calls = record_step(config, 1, rows, CONTEXT)
    assert {case.op for case in cases} == {call.op for call in calls}
    known = {(call.op, call.read_bytes + call.written_bytes) for call in calls}
    assert {(case.op, case.nbytes) for case in cases} <= known


def test_bytes_of_known_cases():
    cases = by_name(step_cases(K3, 8, 1, 1024))
    assert cases["linear/lm_head"].nbytes == 2 * (20480 * 7168 + 7168 + 20480)
    state = 2 * 12 * 128 * 128 * 4
    assert cases["kda_recurrent"].nbytes == state + 4 * (5 * 12 * 128 + 12) + 4 + 1  # q k v decay o, beta, slot, flag
    expert = 768 * (1792 + 112)
    assert cases["moe_gate_up_mxfp4"].nbytes == 16 * expert + 2 * 3584 + 4 * 16 + 2 * 16 * 768


def test_sets_are_enough_for_a_cold_cache_or_marked_warm():
    for config, rows in ((K3, 1), (K3, 32), (KIMI_LINEAR_48B, 1)):
        for case in step_cases(config, 8, rows, 1024):
            assert 1 <= case.sets <= MAX_SETS
            assert case.cold == (case.sets * case.nbytes >= COLD_BYTES)
            allocated = sum(tensor.nbytes for tensor in tensors_of(case.args))
            assert case.sets == 1 or case.sets * allocated <= bench_cases.MEMORY_BYTES
    cases = by_name(step_cases(K3, 8, 1, 1024))
    assert cases["linear/kda_in_proj"].cold and cases["linear/kda_in_proj"].sets == 3
    assert not cases["rms_norm/input_norm"].cold


@pytest.mark.parametrize("family", MINIS)
@pytest.mark.parametrize("rows", (1, 5))
def test_inputs_are_valid_random_and_laid_out_as_in_the_step(family, rows):
    config, tp = MINIS[family]
    for case in step_cases(config, tp, rows, CONTEXT):
        args = random_args(case, CONTEXT, generator(1))
        validate(case.op, **dict(zip(OPS[case.op].args, args, strict=True)))
        for got, like in zip(tensors_of(args), tensors_of(case.args), strict=True):
            assert (got.shape, got.stride(), got.dtype) == (like.shape, like.stride(), like.dtype)
            if got.is_floating_point():
                assert bool(got.isfinite().all()) and not bool((got == 0).all())
                assert got.numel() == 1 or float(got.double().std()) > 0, case.name


def test_inputs_of_two_draws_differ_and_a_seed_repeats():
    case = by_name(step_cases(K3_MINI, 2, 1, CONTEXT))["linear/latent_up"]
    first, second = input_sets(case, CONTEXT, generator(7), count=2)
    again = random_args(case, CONTEXT, generator(7))
    assert torch.equal(first[1], again[1]) and not torch.equal(first[1], second[1])


def test_index_inputs_are_permutations_and_distinct_picks():
    cases = {case.op: case for case in step_cases(K3_MINI, 2, 5, CONTEXT)}
    picks = random_args(cases["moe_gate_up_mxfp4"], CONTEXT, generator(2))[1]
    assert all(len(set(row)) == len(row) for row in picks.tolist())
    assert len({tuple(row) for row in picks.tolist()}) > 1
    *_, slots, is_new, _ = random_args(cases["kda_recurrent"], CONTEXT, generator(2))
    assert sorted(slots.tolist()) == [0, 1, 2, 3, 4] and not bool(is_new.any())
    _, _, page_table, seq_lens, _, _ = random_args(cases["mla_decode"], CONTEXT, generator(2))
    assert sorted(page_table.flatten().tolist()) == list(range(10)) and seq_lens.tolist() == [CONTEXT] * 5


def test_experts_decode_to_weights_of_the_wanted_spread():
    from kimi_kernels.mxfp4 import dequantize

    case = {case.op: case for case in step_cases(K3_MINI, 1, 1, CONTEXT)}["moe_gate_up_mxfp4"]
    _, _, packed, scale = random_args(case, CONTEXT, generator(3))
    spread = float(dequantize(packed, scale, torch.float64).std()) * K3_MINI.expert_in**0.5
    assert 0.4 < spread < 2.5


@pytest.mark.parametrize("family", MINIS)
def test_all_rows_of_a_correct_backend_get_numbers(family, few_sets):
    measured = make_bench(family)
    config, tp = MINIS[family]
    for case in step_cases(config, tp, 1, CONTEXT):
        measured.measure_op(case, tuple(p for p in PEERS.get(case.op, ()) if not p.name.startswith("fla")))
    for spec in chain_specs(config, tp)[::3]:
        measured.measure_layer(spec)
    assert [row.failure for row in measured.rows if row.failure] == []
    for row in measured.rows:
        assert row.us == 2.0 and row.gb_per_s == pytest.approx(row.bytes / 2e-6 / 1e9)
        assert row.share_of_ceiling == pytest.approx(row.gb_per_s)
    assert all(row.worst_over_bound <= 1 for row in measured.rows if row.kind == "op")
    assert all(row.relative_error < 0.02 for row in measured.rows if row.kind == "peer")


def test_a_wrong_op_gets_no_number_and_the_run_goes_on(few_sets):
    """Correctness comes first: the timer never sees an op that the reference refuses."""
    right = make_ops("reference")
    timed = []

    def timer(work, calls):
        timed.append(calls)
        return fake_timer(work, calls)

    wrong = broken_ops(residual_add=lambda x, delta: right.residual_add(x, delta) * 1.01)
    measured = make_bench(ops=wrong, timer=timer)
    cases = by_name(step_cases(K3_MINI, 2, 2, CONTEXT))
    measured.measure_op(cases["residual_add"])
    measured.measure_op(cases["output_gate"])
    bad, good = measured.rows
    assert bad.us is None and "times its bound" in bad.failure
    assert good.us == 2.0 and not good.failure and len(timed) == 1


def test_a_wrong_op_spoils_the_layers_that_use_it(few_sets):
    right = make_ops("reference")
    wrong = broken_ops(situ=lambda *args: right.situ(*args) + 0.1)
    measured = make_bench(ops=wrong)
    measured.measure_layer(ChainSpec("kda", False))
    measured.measure_layer(ChainSpec("kda", True))
    assert measured.rows[0].us == 2.0
    assert measured.rows[1].us is None and "situ" in measured.rows[1].failure


def test_an_op_that_raises_is_a_row_and_the_run_goes_on(few_sets):
    def out_of_memory(*_):
        raise torch.OutOfMemoryError("tried to allocate 1 EB")

    measured = make_bench(ops=broken_ops(output_gate=out_of_memory))
    cases = by_name(step_cases(K3_MINI, 2, 2, CONTEXT))
    for name in ("output_gate", "residual_add"):
        measured.measure_op(cases[name])
    assert measured.rows[0].failure == "OutOfMemoryError: tried to allocate 1 EB"
    assert measured.rows[1].us == 2.0


def test_a_failure_tells_what_it_came_out_of():
    try:
        try:
            raise ValueError("the cause")
        finally:
            raise RuntimeError("capture ended")
    except RuntimeError as error:
        assert bench_rows.explain(error) == "RuntimeError: capture ended (after ValueError: the cause)"


def test_a_missing_peer_is_a_row_with_the_reason_and_no_failure(few_sets, monkeypatch):
    for module in ("fla", "fla.modules", "fla.modules.norm", "fla.modules.norm.layernorm"):
        monkeypatch.setitem(sys.modules, module, None)
    measured = make_bench()
    case = by_name(step_cases(K3_MINI, 2, 2, CONTEXT))["rms_norm/latent_norm"]
    measured.measure_op(case, PEERS["rms_norm"])
    ours, from_torch, from_fla = measured.rows
    assert ours.us == from_torch.us == 2.0
    assert from_fla.us is None and not from_fla.failure and "fla-core is not installed" in from_fla.missing


def test_a_peer_that_gives_nan_fails(few_sets):
    measured = make_bench()
    case = by_name(step_cases(K3_MINI, 2, 2, CONTEXT))["residual_add"]
    measured.measure_op(case, (Peer("nan", lambda x, delta: lambda: x * torch.nan),))
    assert measured.rows[1].us is None and "not finite" in measured.rows[1].failure


def test_relative_error_of_a_peer():
    case = by_name(step_cases(K3_MINI, 2, 2, CONTEXT))["residual_add"]
    x, delta = random_args(case, CONTEXT, generator())
    exact = x.double() + delta.double()
    assert relative_error("residual_add", (x, delta), exact) == 0.0
    assert relative_error("residual_add", (x, delta), 1.25 * exact) == pytest.approx(0.25)


def test_layer_bytes_of_k3_match_the_published_sizes():
    """A TP8 layer with sharded projections takes 43.2 us at 4.56 TB/s, as published, a TP16 layer 21.8 us."""
    sharded = ChainSpec("kda", True, sharded=True)
    assert layer_bytes(sharded, K3, 8, 1, 1024) / 4.56e6 == pytest.approx(43.2, abs=0.05)
    assert layer_bytes(sharded, K3, 16, 1, 1024) / 4.56e6 == pytest.approx(21.8, abs=0.05)
    halves = sum(layer_bytes(ChainSpec(*half), K3, 8, 1, 1024) for half in (("kda", False), (None, True)))
    assert halves == layer_bytes(ChainSpec("kda", True), K3, 8, 1, 1024)


@pytest.mark.parametrize("family", MINIS)
def test_a_chain_runs_the_ops_of_the_layer_loop(family, few_sets):
    """The chain's own loop stands beside that of `decode_step`: they must call the same ops in the same order."""
    config, tp = MINIS[family]
    for spec in chain_specs(config, tp)[:2]:
        chain = Chain(spec, config, tp, 2, CONTEXT, generator())
        called = []
        reference = make_ops("reference")

        def spy(op, function, called=called):
            def run(*args):
                called.append(op)
                return function(*args)

            return run

        ops = SimpleNamespace(**{**vars(reference), **{op: spy(op, getattr(reference, op)) for op in OPS}})
        assert bool(chain.run(ops, slice(0, 1)).isfinite().all())
        layer = chain.layers[0].index
        before = [l for l in (0, layer) if l != layer]
        want = [call.op for call in record_step(config, tp, 2, CONTEXT, layers=[*before, layer]) if call.layer == layer]
        assert called == want
        assert len({layer.input_norm.data_ptr() for layer in chain.layers}) == chain.count == 2


def test_a_sharded_chain_reads_cut_weights_and_whole_tensors(few_sets):
    chain = Chain(ChainSpec(None, True, sharded=True), K3_MINI, 2, 3, CONTEXT, generator())
    assert chain.layers[0].mlp.router.shape[0] == K3_MINI.num_experts // 2
    assert chain.layers[0].mlp.latent_down.shape[0] == K3_MINI.expert_in // 2
    assert chain.run(make_ops("reference")).shape == (3, K3_MINI.hidden_size)


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(list(argv))


def test_ops_are_picked_by_op_or_by_case():
    cases = step_cases(K3_MINI, 1, 1, CONTEXT)
    picked = [case.name for case in bench.pick_cases(cases, "argmax, linear/latent_up")]
    assert picked == ["linear/latent_up", "argmax"]
    assert len(bench.pick_cases(cases, "linear")) > 5
    with pytest.raises(ValueError, match="swiglu,nonsense: not among the ops"):
        bench.pick_cases(cases, "swiglu,argmax,nonsense")


def test_without_a_gpu_there_is_one_clear_error(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "--config", "k3", "--tp", "8"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "needs a CUDA GPU" in err
    assert bench.main(["--config", "k3-mini", "--json"]) == 2
    with pytest.raises(BackendError):
        bench.run(parse("--config", "k3-mini"))


@pytest.mark.parametrize("argv", (["--tp", "3"], ["--rows", "0"], ["--context", "2000000"], ["--ops", "conv"]))
def test_bad_arguments_are_refused_before_anything_runs(argv, capsys):
    assert cli.main(["bench", *argv]) == 2
    assert capsys.readouterr().err.startswith("kimi-kernels: error: ")


@pytest.fixture
def fake_gpu(monkeypatch, few_sets):
    """The command as on a GPU, on the CPU: reference ops, a made-up timer and ceiling."""
    properties = SimpleNamespace(name="fake", multi_processor_count=1, L2_cache_size=1)
    real_generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": real_generator("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(bench, "make_ops", lambda *_: make_ops("reference"))
    monkeypatch.setattr(bench, "read_ceiling", lambda: (4e12, []))
    monkeypatch.setattr(bench, "PEERS", {"linear": PEERS["linear"], "argmax": (Peer("gone", missing),)})
    monkeypatch.setattr(bench, "time_graph", fake_timer)


def missing(*_):
    raise PeerMissing("not installed")


def test_the_whole_command_with_json(fake_gpu, capsys, tmp_path):
    file = tmp_path / "out.json"
    argv = ["bench", "--config", "k3-mini", "--context", "70", "--seed", "5", "--output", str(file)]
    assert cli.main([*argv, "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["passed"] and json.loads(file.read_text()) == result
    assert {"machine", "torch", "packages", "commit", "command", "seed", "inputs", "read_ceiling"} <= set(result)
    assert result["seed"] == 5 and result["inputs"].startswith("random")
    kinds = [row["kind"] for row in result["results"]]
    assert kinds.count("layer") == 5 and "peer" in kinds and "op" in kinds
    assert "layer/kda+moe" in err
    assert [row["missing"] for row in result["results"] if row["by"] == "gone"] == ["not installed"]


def test_the_whole_command_as_text_and_its_exit_code(fake_gpu, capsys, monkeypatch):
    argv = ["bench", "--config", "k3-mini", "--ops", "argmax,residual_add", "--context", "70"]
    assert cli.main(argv) == 0
    assert "layer/" not in capsys.readouterr().out  # no layers with --ops
    wrong = broken_ops(residual_add=lambda x, delta: x)
    monkeypatch.setattr(bench, "make_ops", lambda *_: wrong)
    assert cli.main(argv) == 1
    out, err = capsys.readouterr()
    assert "failed" in out and "residual_add by triton" in err


def test_a_row_shows_as_text():
    row = Row("op", "linear/lm_head", "triton", 293_656_576, 1, True)
    row.set_timing(Timing(70.0, 69.0, 71.0, 4, 15), 4.5e12)
    row.worst_over_bound = 0.5
    result = {
        "config": "k3", "tp": 8, "rows": 1, "context": 1024, "machine": {"gpu": "GPU", "sms": 132},
        "results": [vars(row)], "read_ceiling": {"gb_per_s": 4500.0},
    }  # fmt: skip
    console = Console(width=120, record=True, file=open("/dev/null", "w"))
    bench.show(result, console)
    text = console.export_text()
    assert "70.00" in text and "4,195" in text and "93.2" in text


# benchmarks/sweep_ops.py, on kernels in the interpreter


def load_sweep():
    path = Path(__file__).parent.parent / "benchmarks" / "sweep_ops.py"
    spec = importlib.util.spec_from_file_location("sweep_ops", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["sweep_ops"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


sweep_ops = load_sweep()


@dataclass(frozen=True)
class SomeConfig:
    block_n: int
    num_warps: int
    split: bool = False


def test_variants_start_with_the_default_and_change_little_first():
    default = SomeConfig(64, 4)
    found = sweep_ops.variants(default, {}, limit=1000)
    assert found[0] == default and len(set(found)) == len(found) == 5 * 5 * 2
    changed = [sum(a != b for a, b in zip(vars(c).values(), vars(default).values(), strict=True)) for c in found]
    assert changed == sorted(changed)
    assert {c.block_n for c in found} == {16, 32, 64, 128, 256} and {c.num_warps for c in found} == {1, 2, 4, 8, 16}
    assert len(sweep_ops.variants(default, {}, limit=7)) == 7
    only = sweep_ops.variants(default, {"block_n": (48,), "num_warps": (4,)}, limit=1000)
    assert {c.block_n for c in only} == {64, 48} and {c.num_warps for c in only} == {4}


def test_relative_difference_sees_nan_and_integers():
    x = torch.tensor([3.0, 4.0])
    assert sweep_ops.relative(x, x) == 0.0 and sweep_ops.relative(x * 1.1, x) == pytest.approx(0.1)
    assert sweep_ops.relative(x * torch.nan, x) == math.inf
    assert sweep_ops.relative(torch.tensor([1]), torch.tensor([2])) == math.inf
    assert sweep_ops.relative(torch.zeros(2), torch.zeros(2)) == 0.0


@pytest.fixture
def picks(monkeypatch):
    """Picks installed for one test: the modules of triton_ops get their own functions back."""
    import pkgutil

    package = importlib.import_module("triton_ops")
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"triton_ops.{info.name}")
        for name, value in list(vars(module).items()):
            if name.startswith("pick_"):
                monkeypatch.setattr(module, name, value)
    return sweep_ops.Picks().install()


def quick_timer(work, calls: int, warmup: int, replays: int) -> Timing:
    work()
    return Timing(1.0, 1.0, 1.0, calls, replays)


def planned(configs, failures=()):
    """The plan of `configs`, the first one the default, compiled with the given failures."""
    for i, config in enumerate(configs):
        future: Future = Future()
        future.set_result(dict(failures).get(i, ""))
        yield config, sweep_ops.Result(dict(vars(config)), type(config).__name__, i == 0), future


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's part; the GPU runs the script itself")
def test_sweep_measures_agreeing_configs_and_records_the_others(picks, few_sets, monkeypatch):
    case = by_name(step_cases(K3_MINI, 2, 2, CONTEXT))["residual_add"]
    (default,) = picks.defaults(case.op, random_args(case, CONTEXT, generator()))
    sweep = sweep_ops.Sweep(case, CONTEXT, generator(), picks, quick_timer)
    configs = sweep_ops.variants(default, {}, limit=4)
    run = sweep_ops.run_op

    def wrong_in_one_config(op, args):
        return run(op, args) * (2 if picks.chosen == configs[3] else 1)

    monkeypatch.setattr(sweep_ops, "run_op", wrong_in_one_config)
    plan = planned(configs, {2: "OutOfResources: shared memory"})
    results = sweep_ops.sweep_case(sweep, plan, time.monotonic() + 60)
    assert [result.us for result in results] == [1.0, 1.0, None, None]
    assert {result.replays for result in results[:2]} == {sweep_ops.FINAL_REPLAYS}
    failures = " ".join(result.failure for result in results)
    assert "OutOfResources" in failures and "differs from the default by 1" in failures
    text = sweep_ops.table(case, results, rows=1)
    assert "2 of 4 configs timed" in text and "default: " in text and "1 failed" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's part; the GPU runs the script itself")
def test_sweep_times_the_default_even_when_out_of_time(picks, few_sets):
    case = by_name(step_cases(K3_MINI, 2, 2, CONTEXT))["residual_add"]
    (default,) = picks.defaults(case.op, random_args(case, CONTEXT, generator()))
    sweep = sweep_ops.Sweep(case, CONTEXT, generator(), picks, quick_timer)
    results = sweep_ops.sweep_case(sweep, planned(sweep_ops.variants(default, {}, limit=3)), time.monotonic() - 1)
    assert [result.us for result in results] == [1.0, None, None]
    assert all(result.failure == "skipped: out of time" for result in results[1:])


COMPILE_AHEAD = """
import sys; sys.path[:0] = ["benchmarks"]
import sweep_ops as s
args = s.parse(["--config", "k3-mini", "--tp", "1", "--ops", "residual_add", "--max-configs", "2"])
s.CASES[:] = s.pick_cases(s.step_cases(s.CONFIGS[args.config], args.tp, args.rows, 64), args.ops)
(plan,) = s.make_plans(args, s.compiler_pool(1))
assert len(plan) == 2 and plan[0][1].is_default, plan
assert [compiled.result() for _, _, compiled in plan] == ["", ""]
assert "exit code 3" in s.in_child(lambda: s.os._exit(3))
"""


def run_python(*argv: str) -> subprocess.CompletedProcess:
    """Python in the repository, with the compiler instead of the interpreter of triton."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parent.parent
    return subprocess.run([sys.executable, *argv], cwd=root, env=env, capture_output=True, text=True, timeout=240)


def test_sweep_compiles_ahead_without_a_gpu():
    done = run_python("-c", COMPILE_AHEAD)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_sweep_without_a_gpu_is_one_clear_error():
    done = run_python("benchmarks/sweep_ops.py", "--ops", "argmax")
    assert (done.returncode, done.stderr) == (2, "sweep_ops: needs a CUDA GPU\n")
