"""The comparator is under test itself: correct float32 evaluations pass on hostile data, planted bugs are caught."""

import pytest
import torch
from cases import FILLS, make
from hypothesis import given
from hypothesis import strategies as st

from kimi_kernels import compare, reference
from kimi_kernels.backends import rounded
from kimi_kernels.compare import check_op
from kimi_kernels.error_bound import Bounded, U, depth

R, H, K = 4, 12, 64
FP32 = torch.float32


def kda_args(seed: int = 0, fill: str = "normal") -> tuple:
    q, k, v = (make(R, H, K, fill=fill, seed=seed + i) for i in range(3))
    log_decay = -5 * torch.sigmoid(make(R, H, K, seed=seed + 3, dtype=FP32))
    beta = torch.sigmoid(make(R, H, seed=seed + 4, dtype=FP32))
    state = make(6, H, K, K, fill=fill, seed=seed + 5, dtype=FP32, scale=0.1)
    slots = torch.tensor([4, 0, 5, 2], dtype=torch.int32)
    return q, k, v, log_decay, beta, state, slots, torch.zeros(R, dtype=torch.bool), 0


def kda_fp32(
    q, k, v, log_decay, beta, state, slots, is_new, first_valid_slot, eps=1e-6, scale=K**-0.5, keep=FP32, flip=False
):
    """A float32 evaluation with knobs for planted bugs; `flip` sums in another order."""
    total = (lambda t: t.flip(-1).unflatten(-1, (4, -1)).sum(-1).sum(-1)) if flip else (lambda t: t.sum(-1))
    q, k, v = q.float(), k.float(), v.float()
    q = q * torch.rsqrt(total(q * q) + eps)[..., None] * scale
    k = k * torch.rsqrt(total(k * k) + eps)[..., None]
    s = state[slots.long()] * log_decay.exp()[:, :, None]
    correction = beta[..., None] * (v - total(s * k[:, :, None]))
    s = s + correction[..., None] * k[:, :, None]
    state[slots.long()] = s.to(keep).float()
    return total(s * q[:, :, None])


@given(st.sampled_from(FILLS), st.integers(0, 1000), st.booleans())
def test_correct_float32_is_never_rejected(fill, seed, flip):
    check_op("kda_recurrent", lambda *a: kda_fp32(*a, flip=flip), *kda_args(seed, fill))


def broken(change):
    """kda_fp32 with `change(o)` applied to its output."""

    def run(*args):
        o = kda_fp32(*args).clone()
        change(o)
        return o

    return run


def swap_heads(o):
    o[2, 11] = o[2, 10]


def drop_tail(o):
    o[-1, -1, -8:] = 0


def one_element(factor):
    def change(o):
        o[1, 7, 33] *= factor

    return change


PLANTED = {
    "one element 5 % off": broken(one_element(1.05)),
    "one element sign flipped": broken(one_element(-1)),
    "one head swapped": broken(swap_heads),
    "last 8 columns zero": broken(drop_tail),
    "one NaN": broken(one_element(float("nan"))),
    "state kept in bfloat16": lambda *a: kda_fp32(*a, keep=torch.bfloat16),
    "state kept in float16": lambda *a: kda_fp32(*a, keep=torch.float16),
    "beta 1 % high": lambda *a: kda_fp32(*a[:4], a[4] * 1.01, *a[5:]),
    "beta rounded to bfloat16": lambda *a: kda_fp32(*a[:4], a[4].bfloat16().float(), *a[5:]),
    "log-decay 2 % off": lambda *a: kda_fp32(*a[:3], a[3] * 1.02, *a[4:]),
    "l2norm eps 1e-2": lambda *a: kda_fp32(*a, eps=1e-2),
    "scale 1/sqrt(K+1)": lambda *a: kda_fp32(*a, scale=(K + 1) ** -0.5),
}


@pytest.mark.parametrize("bug", PLANTED)
@pytest.mark.parametrize("seed", range(3))
def test_planted_bug_is_caught(bug, seed):
    with pytest.raises(AssertionError, match="kda_recurrent"):
        check_op("kda_recurrent", PLANTED[bug], *kda_args(seed))


def test_write_outside_the_slots_is_caught():
    def run(*args):
        o = kda_fp32(*args)
        args[5][3, 0, 0, 0] += 1
        return o

    with pytest.raises(AssertionError, match="outside the slots"):
        check_op("kda_recurrent", run, *kda_args())


def test_failure_names_coordinates_values_and_bound():
    with pytest.raises(AssertionError, match=r"o\[1, 7, 33\] = .* reference .* times its bound"):
        check_op("kda_recurrent", PLANTED["one element 5 % off"], *kda_args())


ROUNDED_OPS = {
    "rms_norm": lambda seed: (make(R, 96, seed=seed), make(96, seed=seed + 1), 1e-5),
    "linear": lambda seed: (make(R, 96, seed=seed), make(40, 96, seed=seed + 1)),
    "residual_add": lambda seed: (make(R, 96, seed=seed), make(R, 96, seed=seed + 1)),
    "situ": lambda seed: (make(R, 96, seed=seed), 4.0, 25.0),
    "mla_expand_value": lambda seed: (make(R, 2, 64, seed=seed), make(2, 16, 64, seed=seed + 1)),
}


@pytest.mark.parametrize("op", ROUNDED_OPS)
def test_rounded_reference_passes_and_a_wrong_last_bit_does_not(op, monkeypatch):
    """One rounding to bfloat16 is inside the bound; every element one ulp further is not."""
    monkeypatch.setattr(compare, "interpreted", lambda: False)
    args = ROUNDED_OPS[op](seed=3)
    assert check_op(op, rounded(op), *args).ratio <= 1

    def next_up(*call):
        y = rounded(op)(*call)
        return (y.view(torch.int16) + 1).view(torch.bfloat16)

    with pytest.raises(AssertionError, match="times its bound"):
        check_op(op, next_up, *args)


def test_router_accepts_only_near_ties():
    logits = torch.tensor([[2.0, 1.0, 0.0, 1.0 + 2**-20]])
    bias = torch.zeros(4)
    check_op("moe_router", rounded("moe_router"), logits, bias, 2, 1.0)

    def second_choice(*args):
        ids = torch.tensor([[0, 2]], dtype=torch.int32)
        return ids, rounded("moe_router")(*args)[1]

    with pytest.raises(AssertionError, match=r"picks \[0, 2\]"):
        check_op("moe_router", second_choice, logits, bias, 2, 1.0)

    def duplicate(*args):
        return torch.tensor([[0, 0]], dtype=torch.int32), rounded("moe_router")(*args)[1]

    with pytest.raises(AssertionError, match="distinct"):
        check_op("moe_router", duplicate, logits, bias, 2, 1.0)


@given(st.integers(0, 1000), st.sampled_from(("sum", "product", "exp", "sigmoid", "tanh", "rsqrt", "divide")))
def test_bound_covers_float32_arithmetic(seed, kind):
    """A float32 evaluation of each rule lies inside the bound that `Bounded` computes for it."""
    x = make(64, 33, seed=seed, dtype=FP32, fill=FILLS[seed % len(FILLS)], scale=0.1)
    y = make(64, 33, seed=seed + 1, dtype=FP32)
    evaluate = {
        "sum": lambda a, b: a.sum(-1),
        "product": lambda a, b: a * b + a,
        "exp": lambda a, b: torch.exp(-a.square() * 0.01),
        "sigmoid": lambda a, b: torch.sigmoid(a + b),
        "tanh": lambda a, b: torch.tanh(a * b),
        "rsqrt": lambda a, b: torch.rsqrt(a.square() + 1e-6),
        "divide": lambda a, b: a / (b.square() + 1e-3),
    }[kind]
    want = evaluate(Bounded(x.double()), Bounded(y.double()))
    error = (evaluate(x, y).double() - want.value).abs()
    assert bool((error <= want.err + 2**-149).all())


def test_bound_is_not_idle():
    """The error of a sum is a few float32 roundings of its terms, far below a bfloat16 ulp."""
    x = Bounded(make(1, 128, dtype=FP32).double())
    total = x.sum(-1)
    assert float(total.err) == pytest.approx(depth(128) * U * float(x.value.abs().sum()))


def test_reference_signatures_need_no_rounding():
    """The reference keeps the dtype of its first argument: float32 in, float32 out, unrounded."""
    y = reference.rms_norm(make(2, 8, dtype=FP32), make(8, seed=1), 1e-5)
    assert y.dtype == FP32 and bool((y != y.bfloat16().float()).any())
