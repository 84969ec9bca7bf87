"""The walk over a fused step's taps, with a stand-in for the kernel that runs the reference and keeps what rows hand
on: green as it is, red and at the right op for planted errors. The kernel itself: `test_megakernel_gpu.py`."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from cute_megakernel.megakernel import Megakernel
from cute_megakernel.recording import record_local_step
from cute_megakernel.schedule import make_schedule
from kimi_kernels.backends import make_ops, single_rank
from kimi_kernels.checkpoint import load_weights
from kimi_kernels.compare_fused import Walk, compare_fused
from kimi_kernels.compare_step import OverBound, StepReport
from kimi_kernels.decode_step import decode_step
from kimi_kernels.mini import make_mini
from kimi_kernels.op_specs import OPS
from kimi_kernels.state import Batch, State

ROWS = 2


@pytest.fixture(scope="module", params=("k3", "kimi-linear"))
def model(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("fused") / request.param
    config = make_mini(directory, request.param, seed=2)
    return config, load_weights(directory, config, progress=False)


class Fake(Megakernel):
    """A Megakernel on the CPU: the reference runs in place of the launch and leaves its outputs in the same words;
    `breakages` change the output of op calls by their number."""

    def __init__(self, config, weights, breakages=None):
        self.config, self.weights, self.breakages = config, weights, breakages or {}
        self.state = State.zeros(config, ROWS, 2 * ROWS, 8)
        generator = torch.Generator().manual_seed(0)
        for pool in (pool for layer in self.state.layers for pool in vars(layer).values()):
            pool.copy_(torch.randn(pool.shape, generator=generator) * 0.2)
        self.schedule = make_schedule(record_local_step(config, weights, ROWS), config, 5)
        self.written = {buffer.index for row in self.schedule.rows for buffer in row.writes}
        self.words = torch.zeros(self.schedule.words, dtype=torch.int64)
        self.checked = False

    def check(self):
        self.checked = True

    def put(self, buffer, output):
        """As the kernel stores it: two bfloat16 or one wider number a word, each row at its place, under a tag."""
        place = self.schedule.places[buffer.index]
        payload = output.view(torch.int32) if output.element_size() == 4 else output.contiguous().view(torch.int32)
        words = self.words[place.start : place.start + buffer.rows * place.pitch].view(torch.int32)
        words = words.reshape(buffer.rows, place.pitch, 2)
        words[:, : payload.shape[1], 0] = payload
        words[:, : payload.shape[1], 1] = 32

    def step(self, tokens, batch):
        assert bool(self.words.view(torch.float32)[::2].isnan().all()), "poisoned"
        self.calls, reference = iter(self.schedule.recording.calls), make_ops("reference")

        def run(op, *args):
            call = next(self.calls)
            outputs = getattr(reference, op)(*args)
            if call.index in self.breakages:
                outputs = self.breakages[call.index](outputs)
            kept = outputs if isinstance(outputs, tuple) else () if outputs is None else (outputs,)
            for buffer, output in zip(call.outputs, kept, strict=True):
                packed = output[..., : self.config.kv_lora_rank] if op == "mla_absorb_query" else output
                if buffer.index in self.written and op != "argmax" and buffer is not self.head:
                    self.put(buffer, packed.reshape(buffer.rows, -1))
            return outputs

        ops = SimpleNamespace(**{op: partial(run, op) for op in OPS}, **single_rank())
        self.head = self.schedule.recording.calls[-1].args["logits"].buffer
        output = decode_step(ops, self.config, self.weights, self.state, batch, tokens)
        self.logits, self.next_tokens = output.logits, output.tokens
        self.next_values = output.logits.amax(-1).float()
        return output


def run(model, breakages=None, others=None) -> StepReport:
    report = StepReport()
    walk = Walk(*model, Fake(*model, breakages), report, others)
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


def test_a_tap_that_nothing_wrote_is_red(model):
    with pytest.raises(OverBound, match="gated_rms_norm"):
        run(model, {call_of(model, "gated_rms_norm"): lambda out: torch.full_like(out, torch.nan)})


def test_exactly_one_side_is_the_megakernel(model):
    for sides in (("triton", "reference"), ("megakernel", "megakernel")):
        with pytest.raises(ValueError, match="exactly one side"):
            compare_fused(*sides, *model, [1], 1)
