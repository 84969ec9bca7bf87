"""Public faults of decode kernels that concern a whole step, or have no natural place in the file of one op; each
docstring names the fault and the right value."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_attn_res_norm
import test_kda_gate_bounded
import test_kda_recurrent
import torch
from cases import make
from torch.utils._python_dispatch import TorchDispatchMode

import triton_ops
from kimi_kernels import reference
from kimi_kernels.backends import make_ops
from kimi_kernels.checkpoint import load_weights
from kimi_kernels.compare import assert_same_bits, check_op
from kimi_kernels.config import K3, K3_MINI, KIMI_LINEAR_48B, ConfigError
from kimi_kernels.decode_step import decode_step
from kimi_kernels.mini import make_mini
from kimi_kernels.state import Batch, State

FP32, FP64, BF16 = torch.float32, torch.float64, torch.bfloat16
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(scope="module")
def weights(tmp_path_factory, device):
    directory = tmp_path_factory.mktemp("mini") / "k3"
    make_mini(directory, "k3", seed=1)
    return load_weights(directory, K3_MINI, device=device, progress=False)


def batch_of(slot: int, seq_len: int, device: str) -> Batch:
    """One sequence, on the two pages of its slot."""
    like = dict(dtype=torch.int32, device=device)
    pages = torch.tensor([[2 * slot, 2 * slot + 1]], **like)
    is_new = torch.zeros(1, dtype=torch.bool, device=device)
    return Batch(torch.tensor([slot], **like), is_new, torch.tensor([seq_len], **like), pages)


def watched_step(weights, backend: str, device: str, before=lambda name, args: None) -> list[tuple[str, tuple, object]]:
    """(op, arguments, result) of every call of a step of six layers; `before` sees each call first."""
    calls = []

    def watch(name, function):
        def run(*args):
            before(name, args)
            calls.append((name, args, function(*args)))
            return calls[-1][2]

        return run

    ops = SimpleNamespace(**{name: watch(name, f) for name, f in vars(make_ops(backend, device)).items()})
    part, state = replace(weights, layers=weights.layers[:6]), State.zeros(K3_MINI, 1, 2, 8, device, range(6))
    decode_step(ops, K3_MINI, part, state, batch_of(0, 1, device), torch.tensor([7], device=device))
    return calls


def test_router_and_shared_expert_read_the_hidden_size_and_experts_the_latent(weights, device):
    """Fault I24: hidden 160, latent 96; the norm sits between the routed sum and the up-projection."""
    calls = watched_step(weights, "reference", device)
    first = next(i for i, call in enumerate(calls) if call[0] == "router_logits")
    names, args, results = zip(*calls[first : first + 14], strict=True)
    assert names == (
        *("router_logits", "moe_router", "linear", "moe_gate_up_mxfp4", "situ", "moe_down_mxfp4"),
        *("linear", "situ", "linear", "all_reduce", "all_reduce", "rms_norm", "linear", "residual_add"),
    )
    h = args[0][0]
    assert h.shape == (1, 160)
    assert args[2][0] is h and results[2].shape == (1, 96), "the down-projection to the latent reads the hidden state"
    assert args[3][0] is results[2], "the routed experts read the latent"
    assert args[6][0] is h, "the shared expert reads the hidden state"
    assert args[11][0].shape == (1, 96) and results[12].shape == (1, 160)


def test_no_op_of_a_step_overwrites_the_residual_bank(weights, device):
    """Faults S07 and S08: every candidate keeps its bits to the end of the step, and a prefix is one after the add."""
    kept = {}

    def keep(name, args):
        if name == "attn_res_norm":
            for tensor in (args[0], *args[1]):
                kept.setdefault(id(tensor), (tensor, tensor.clone()))

    calls = watched_step(weights, "triton", device, keep)
    assert len(kept) > 4
    for tensor, before in kept.values():
        assert_same_bits(tensor, before)
    sums = {id(result) for name, _, result in calls if name in ("residual_add", "embedding", "all_reduce")}
    assert all(id(args[0]) in sums for name, args, _ in calls if name == "attn_res_norm")


@pytest.mark.parametrize("accepted", (1, 2, 4))
def test_a_verify_step_on_scratch_slots_is_rolled_back_by_replay(weights, accepted, device):
    """Fault S09: T = 4 on copies of slot and pages leaves the originals alone; replaying what was accepted equals
    decoding it token by token."""
    weights, ops, tokens = replace(weights, layers=weights.layers[:4]), make_ops("reference"), [7, 20, 31, 2]

    def fresh() -> State:
        """Slot 1 and its pages are a copy of slot 0 and its pages."""
        state = State.zeros(K3_MINI, 2, 4, 8, device, range(4))
        generator = torch.Generator().manual_seed(0)
        for pool in (pool for layer in state.layers for pool in vars(layer).values()):
            original, scratch = pool.chunk(2)
            original.copy_(torch.randn(original.shape, generator=generator) * 0.2)
            scratch.copy_(original)
        return state

    def originals(state: State) -> list[torch.Tensor]:
        return [pool.chunk(2)[0].clone() for layer in state.layers for pool in vars(layer).values()]

    def run(state: State, batch: Batch, tokens: list[int]) -> torch.Tensor:
        return decode_step(ops, K3_MINI, weights, state, batch, torch.tensor(tokens, device=device)).logits

    state, single = fresh(), fresh()
    before = originals(state)
    verified = run(state, batch_of(1, 9, device), tokens)
    for pool, old in zip(originals(state), before, strict=True):
        assert_same_bits(pool, old, "pool after the verify step")
    run(state, batch_of(0, 5 + accepted, device), tokens[:accepted])
    rows = [run(single, batch_of(0, 6 + t, device), [tokens[t]]) for t in range(accepted)]
    for a, b in zip(originals(state), originals(single), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(verified[:accepted], torch.cat(rows), rtol=2e-2, atol=3e-2)


class Allocations(TorchDispatchMode):
    """Shape and dtype of every tensor that an op returns, but for the NaN fill of conftest."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and func.overloadpacket != torch.ops.aten.fill_:
            self.seen.append((tuple(out.shape), out.dtype))
        return out


def test_residual_norm_allocates_nothing_but_its_result(device, monkeypatch):
    """Fault P10: no [R, N + 1, D] copy of the bank, neither stacked nor in float32."""
    args = test_attn_res_norm.Case(rows=8, bank=8, width=160).args(device)
    if INTERPRETED:  # it copies every argument of a launch: host code only
        kernel = {(8,): lambda *a, **k: None}
        monkeypatch.setitem(triton_ops.attn_res_norm.__globals__, "_attn_res_norm_kernel", kernel)
    with Allocations() as allocations:
        triton_ops.attn_res_norm(*args)
    assert allocations.seen == [((8, 160), args[0].dtype)]


def test_packages_import_without_a_driver_and_only_a_launch_raises():
    """Fault X03: without CUDA device and interpreter, import and validation work; a launch is one exception."""
    code = (
        "import torch, triton_ops, kimi_kernels\n"
        "try: triton_ops.linear(torch.zeros(1), torch.zeros(1, 1))\n"
        "except ValueError as e: assert str(e).startswith('linear: x'), e\n"
        "else: raise SystemExit('not refused')\n"
        "try: triton_ops.linear(torch.zeros(1, 16), torch.zeros(16, 16))\n"
        "except Exception: pass\n"
        "else: raise SystemExit('launched')\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"CUDA_VISIBLE_DEVICES": ""}
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("heads", (3, 6, 12, 24, 48, 96))
def test_head_counts_of_every_rank_size(device, heads):
    """Fault I14: rows of 3 or 6 float32 heads are no multiple of 16 bytes; 96 heads over every tp of K3."""
    gate = test_kda_gate_bounded.Case(rows=1, heads=heads).args(device)
    check_op("kda_gate_bounded", triton_ops.kda_gate_bounded, *gate, -5.0)
    recurrent = test_kda_recurrent.Case(batch=1, heads=heads, key_dim=16, value_dim=8).args(device)
    check_op("kda_recurrent", triton_ops.kda_recurrent, *recurrent)


@pytest.mark.parametrize("tp", (3, 5, 7))
def test_uneven_tensor_parallel_sizes_are_refused(tp):
    """Fault I15: a ConfigError, not heads that some rank leaves out."""
    with pytest.raises(ConfigError, match="tp must be one of"):
        K3.shard(tp)


def test_512_steps_keep_a_float32_state(device):
    """Faults N09 and N11: drift from float64 is about 4e-7; a bfloat16 state is off by 1e-2, a bfloat16 beta by
    2e-3."""
    steps, like = 512, dict(device=device, dtype=FP32)
    q, k, v = (make(steps, 1, 16, seed=seed, device=device) for seed in range(3))
    log_decay, beta = torch.full((steps, 1, 16), -0.01, **like), torch.sigmoid(make(steps, 1, seed=4, **like))
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    where = slots, torch.ones(1, dtype=torch.bool, device=device), 0
    state, exact = (torch.zeros(1, 1, 16, 16, dtype=dtype, device=device) for dtype in (FP32, FP64))
    triton_ops.kda_recurrent(q, k, v, log_decay, beta, state, *where)
    reference.kda_recurrent(*(t.to(FP64) for t in (q, k, v, log_decay, beta)), exact, *where)
    assert float((state - exact).norm() / exact.norm()) < 1e-5


def test_residual_norm_error_over_candidates_of_very_different_size(device):
    """Fault N31: relative L2 of the bfloat16 output against float64 at most 3e-3, nine candidates, gamma != 1."""
    scales = [1, 1e-2, 1e2, 1, 1e-2, 1e2, 1, 1e-2, 1]
    rows = [make(1, 7168, seed=seed, scale=scale, device=device) for seed, scale in enumerate(scales)]
    score, norm = make(7168, seed=20, dtype=FP32, scale=0.02, device=device), make(7168, seed=21, device=device)
    got = triton_ops.attn_res_norm(rows[-1], rows[:-1], score, norm, 1e-5).to(FP64)
    want = reference.attn_res_norm(rows[-1].to(FP64), rows[:-1], score, norm, 1e-5)
    bound = 6e-3 if INTERPRETED else 3e-3  # it truncates to bfloat16 where the GPU rounds
    assert float((got - want).norm() / want.norm()) <= bound


def test_the_softmax_scale_counts_the_channels_without_rotation():
    """Fault T15: 192^-0.5 = 0.0721688, neither 576^-0.5 nor 128^-0.5."""
    assert abs(K3.softmax_scale - 0.0721688) < 1e-7 and KIMI_LINEAR_48B.softmax_scale == K3.softmax_scale
