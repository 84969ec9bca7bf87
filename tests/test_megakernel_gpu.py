"""The fused kernel's numbers: every op of a step against its bound, the Triton backend's tokens, and what no result may
depend on. How it is launched, and what ends it: `test_megakernel_launch.py`."""

import contextlib
import fcntl
import json
import tempfile
from pathlib import Path

import pytest
import torch
from megakernel_cases import (
    CUDA,
    FAMILIES,
    SLOTS,
    batch_of,
    compile_ahead,
    copy_state,
    kernel_of,
    mini,
    pools,
    random_state,
    real,
    run,
    some_layers,
    tokens_of,
)

from kimi_kernels import cli
from kimi_kernels.backends import make_ops
from kimi_kernels.compare import assert_same_bits
from kimi_kernels.compare_fused import Walk, compare_fused
from kimi_kernels.compare_step import OverBound, StepReport
from kimi_kernels.decoder import Decoder
from kimi_kernels.mini import make_mini
from kimi_kernels.state import State

pytestmark = pytest.mark.gpu
# around pages of 16, splits of 64 and the end of the cache
LENGTHS = [1, 17, 64, 65, 16, 96, 33, 2]


def walk_steps(model, rows: int, lengths: list[int], steps: int, **state_options) -> StepReport:
    """Steps with slots in no order and every third sequence new; each op judged, Triton's too."""
    report = StepReport()
    kernel = kernel_of(model, rows, random_state(model, **state_options), taps=True)
    walk = Walk(model.config, model.weights, kernel, report, {"triton": make_ops("triton", CUDA)})
    slots = [(7 * row + 3) % SLOTS for row in range(rows)]
    new = tuple(range(0, rows, 3))
    pages = state_options.get("pages", 6)
    for step in range(steps):
        later = [min(length + step, pages * state_options.get("page", 16)) for length in lengths[:rows]]
        walk.step(tokens_of(model, rows, step), batch_of(slots, later, new if step == 0 else (), pages=pages))
    return report


@pytest.mark.parametrize("rows", range(1, 9))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_op_of_a_step_is_within_its_bound_mini(family, rows):
    """Also fault C15: lengths around every border, growing from step to step."""
    model = mini(family)
    report = walk_steps(model, rows, LENGTHS[-rows:], steps=3)
    assert report.passed and report.ops["kda_recurrent"].right_ratio > 0
    assert len(report.ops) >= 18


@pytest.mark.parametrize("count", (1, 2, 3))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_few_layers_alone_mini(family, count):
    """Fault C15: layer counts of 1, 2, 3."""
    assert walk_steps(some_layers(mini(family), count), 2, [5, 70], steps=2).passed


@pytest.mark.parametrize("family", FAMILIES)
def test_long_sequences_mini(family):
    """More parts than an SM puts together by itself, beside one; the last slot of a part full, and with the newest row
    alone in it."""
    model, lengths = mini(family), [2097, 4, 9008, 1025]
    assert walk_steps(model, 4, lengths, steps=2, page=64, pages=144).passed


@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrong_weight_is_named_by_its_op_mini(family):
    """One weight off by a tenth, in the middle of the fused kernel."""
    model = some_layers(mini(family), 3)
    name = "layers.1.attn.o_proj"
    right = model.images.tensors[name]
    model.images.tensors[name] = right * 1.1
    kernel = kernel_of(model, 2, taps=True)
    row = next(row for row in kernel.schedule.rows if row.place.layer == 1 and row.name.endswith("o_proj"))
    assert row.args["weight"].path == name and right.data_ptr() == model.weights.layers[1].attn.o_proj.data_ptr()
    walk = Walk(model.config, model.weights, kernel, StepReport())
    with pytest.raises(OverBound, match=rf"{row.place}, right side \(megakernel\): linear: y"):
        walk.step(tokens_of(model, 2), batch_of([4, 1], [20, 3]))


@contextlib.contextmanager
def turn():
    """One test at a time on this machine: real sizes take much memory."""
    with (Path(tempfile.gettempdir()) / "kimi-kernels-real-size.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tp", "sharded", "rows"),
    (("kimi-linear-48b", 1, False, 1), ("kimi-linear-48b", 1, False, 8), ("k3", 8, False, 8), ("k3", 8, True, 1)),
)
def test_every_op_at_real_size_is_within_its_bound(name, tp, sharded, rows):
    """A KDA layer with the dense MLP, a KDA and an MLA layer with experts."""
    layers, lengths = (0, 1, 3), [700, 1, 64, 65, 1023, 127, 128, 300]
    compile_ahead(name, tp, layers, sharded, rows)
    with turn():
        assert walk_steps(real(name, tp, layers, sharded), rows, lengths, steps=1, page=64, pages=16).passed


@pytest.mark.parametrize("batch", (1, 3))
@pytest.mark.parametrize("family", FAMILIES)
def test_generated_tokens_equal_those_of_triton_mini(family, batch):
    """Through the decoder, a CUDA graph under both."""
    model, prompts = mini(family), [[1, 2, 3], [7, 5, 11], [40, 8, 2]][:batch]
    generated = [
        Decoder(model.config, model.weights, backend, batch, 64, CUDA).generate(prompts, 24)
        for backend in ("triton", "megakernel")
    ]
    assert generated[1].tokens == generated[0].tokens
    assert bool(torch.isfinite(generated[1].logits).all())


@pytest.mark.parametrize("left", ("triton", "reference"))
@pytest.mark.parametrize("family", FAMILIES)
def test_compare_passes_from_nan_pools_mini(family, left):
    """Pools start as NaN: what no step wrote is never read."""
    model = mini(family)
    report = compare_fused(left, "megakernel", model.config, model.weights, [5, 17], 4, CUDA)
    assert report.passed and report.steps == 4, report.failure


def test_commands_run_the_megakernel_mini(tmp_path, capsys):
    directory = tmp_path / "k3"
    make_mini(directory, "k3", seed=1)
    texts = []
    for backend in ("triton", "megakernel"):
        argv = ["decode", str(directory), "--tokens", "1,2,3", "--new", "8", "--backend", backend, "--json"]
        assert cli.main(argv) == 0
        texts.append(json.loads(capsys.readouterr().out)["tokens"])
    assert texts[0] == texts[1]
    assert cli.main(["compare", str(directory), "--left", "triton", "--right", "megakernel", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"]
    trace = tmp_path / "step.json"
    assert cli.main(["trace", str(directory), "--rows", "2", "--output", str(trace), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert all(row["start_us"] <= row["end_us"] for row in result["table"])
    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["args"]["row"] for event in spans} == {row["row"] for row in result["table"]}
    assert len({event["tid"] for event in spans}) == result["sms"]


@pytest.mark.parametrize("rows", (2, 4, 8))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_does_not_depend_on_its_neighbours_mini(family, rows):
    """Other tokens, slots, lengths and padding beside it leave row 0 and its pools the same bits."""
    model, first = mini(family), random_state(mini(family))
    kernel = kernel_of(model, rows)
    seen = []
    others = [[5, 60, 17, 30, 1, 64, 65], [96, 1, 2, 3, 40, 50, 60], [0] * 7]
    for turn, lengths in enumerate(others):
        copy_state(kernel.state, first)
        slots = [3, *((4 + turn + row) % SLOTS if lengths[0] else -1 for row in range(rows - 1))]
        tokens = tokens_of(model, rows, turn)
        tokens[0] = 9
        logits = run(kernel, tokens, batch_of(slots, [33, *lengths][:rows]))
        mine = [pool.reshape(SLOTS, -1)[3].clone() for pool in pools(kernel.state)]
        seen.append((logits[0], kernel.next_tokens[0].clone(), *mine))
    for other in seen[1:]:
        for a, b in zip(seen[0], other, strict=True):
            assert_same_bits(a, b, "row 0")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_not_in_use_is_never_read_mini(family):
    """NaN in unused slots, in page tails, in the workspace (fault C10) and in the weights of experts nobody picked."""
    model, rows, slots, lengths = mini(family), 3, [7, 2, 5], [17, 60, 1]
    tokens, batch = tokens_of(model, rows), batch_of(slots, lengths)
    fresh = some_layers(model, len(model.weights.layers))  # images of its own, which are spoilt below
    kernel = kernel_of(fresh, rows, taps=True)
    clean = run(kernel, tokens, batch)
    after = [pool.clone() for pool in pools(kernel.state)]
    spoil_experts(kernel)
    copy_state(kernel.state, random_state(model))
    unused = spoil_pools(kernel.state, slots, lengths)
    kernel.poison()
    assert_same_bits(run(kernel, tokens, batch), clean, "logits")
    for pool, was, mask in zip(pools(kernel.state), after, unused, strict=True):
        assert bool(pool[mask].isnan().all()), "written outside the slots in use"
        assert_same_bits(pool[~mask], was[~mask], "pool")


def spoil_pools(state: State, slots: list[int], lengths: list[int]) -> list[torch.Tensor]:
    """NaN wherever the step has no business; -> masks of that, like the pools."""
    masks = []
    for pool in pools(state):
        mask = torch.ones(pool.shape, dtype=torch.bool, device=CUDA)
        for slot, length in zip(slots, lengths, strict=True):
            if pool.shape[0] == SLOTS:
                mask[slot] = False
            else:  # a latent cache: tokens of the sequence, the one of this step included
                mask.view(SLOTS, -1, pool.shape[-1])[slot, :length] = False
        masks.append(mask)
        pool[mask] = float("nan")
    return masks


def spoil_experts(kernel) -> None:
    """NaN, or codes and scales of all ones, in the images of experts that the last step did not pick."""
    picked: set[int] = set()
    for row in kernel.schedule.rows:
        if "ids" in row.args:
            picked = set(kernel.handed_on(row.args["ids"].index).flatten().tolist())
        elif str(row.args.get("image", "")).endswith("experts"):
            image = kernel.images.image(row.args["image"], row.args["weight"], row.args["scale"])
            rest = [expert for expert in range(image.shape[0]) if expert not in picked]
            assert rest and len(rest) < image.shape[0]
            image[rest] = 255 if image.dtype == torch.uint8 else float("nan")
