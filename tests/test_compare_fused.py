"""The walk over a fused step's taps, with a stand-in for the kernel that runs the reference and keeps what rows hand
on: green as it is, red and at the right op for planted errors. The kernel itself: `test_megakernel_gpu.py`."""

import pytest
import torch
from fake_megakernel import Fake

from cute_megakernel.recording import record_local_step
from kimi_kernels.backends import make_ops
from kimi_kernels.checkpoint import load_weights
from kimi_kernels.compare_fused import Walk, compare_fused
from kimi_kernels.compare_step import OverBound, StepReport
from kimi_kernels.mini import make_mini
from kimi_kernels.state import Batch, State

ROWS = 2


@pytest.fixture(scope="module", params=("k3", "kimi-linear"))
def model(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("fused") / request.param
    config = make_mini(directory, request.param, seed=2)
    return config, load_weights(directory, config, progress=False)


def run(model, breakages=None, others=None) -> StepReport:
    report = StepReport()
    state = State.zeros(model[0], ROWS, 2 * ROWS, 8)
    generator = torch.Generator().manual_seed(0)
    for pool in (pool for layer in state.layers for pool in vars(layer).values()):
        pool.copy_(torch.randn(pool.shape, generator=generator) * 0.2)
    walk = Walk(*model, Fake(*model, state, ROWS, breakages), report, others)
    batch = Batch(
        slots=torch.tensor([1, 0], dtype=torch.int32),
        is_new=torch.tensor([False, True]),
        seq_lens=torch.tensor([5, 9], dtype=torch.int32),
        page_table=torch.arange(4, dtype=torch.int32).reshape(2, 2),
    )
    walk.step(torch.tensor([3, 4]), batch)
    return report


def call_of(model, op: str) -> int:
    config, weights = model
    return next(c.index for c in record_local_step(config, weights, ROWS).calls if c.op == op)


def test_a_right_kernel_passes_with_every_op_judged(model):
    report = run(model, others={"reference": make_ops("reference")})
    assert report.passed and {"embedding", "linear", "kda_recurrent", "mla_decode", "argmax"} <= set(report.ops)
    assert all(op.right_ratio <= 1 and op.left_ratio <= 1 for op in report.ops.values())
    assert report.ops["kda_recurrent"].right_ratio > 0


@pytest.mark.parametrize("op", ("linear", "kda_recurrent", "mla_absorb_query", "mla_decode", "router_logits"))
def test_the_first_wrong_op_is_named(op, model):
    with pytest.raises(OverBound, match=rf"layer \d+ \w+, right side \(megakernel\): {op}: "):
        run(model, {call_of(model, op): lambda out: out * 1.05})


def test_a_tap_that_nothing_wrote_is_red(model, monkeypatch):
    """The words hold what an earlier launch left there, were they not poisoned."""
    put = Fake.put
    monkeypatch.setattr(Fake, "put", lambda self, b, out: None if "gated_rms_norm" in b.name else put(self, b, out))
    with pytest.raises(OverBound, match=r"gated_rms_norm: y\[.*\] = nan"):
        run(model)


def test_exactly_one_side_is_the_megakernel(model):
    for sides in (("triton", "reference"), ("megakernel", "megakernel")):
        with pytest.raises(ValueError, match="exactly one side"):
            compare_fused(*sides, *model, [1], 1)
