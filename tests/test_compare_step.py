"""Two backends side by side: green for Triton on both families, red for planted bugs, and the report says where."""

import dataclasses

import pytest
import torch

import kimi_kernels.compare_step as module
from kimi_kernels.backends import make_ops
from kimi_kernels.checkpoint import load_weights
from kimi_kernels.compare_step import compare_step
from kimi_kernels.mini import make_mini
from kimi_kernels.op_specs import OPS

FAMILIES = ("k3", "kimi-linear")
TOKENS, STEPS = [5, 17], 3


@pytest.fixture(scope="module")
def models(tmp_path_factory, device) -> dict:
    root = tmp_path_factory.mktemp("compare")
    loaded = {}
    for family in FAMILIES:
        config = make_mini(root / family, family, seed=2)
        loaded[family] = (config, load_weights(root / family, config, device=device, progress=False))
    return loaded


@pytest.mark.parametrize(("family", "layers"), (("k3", (0, 3)), ("kimi-linear", (0, 2))), ids=FAMILIES)
def test_triton_is_within_the_bound_of_every_op(family, layers, models, device):
    """A KDA layer with the dense MLP and an MLA layer with the experts: every op of the family."""
    config, weights = models[family]
    whole = set(compare_step("reference", "reference", config, weights, TOKENS, 1, device).ops)
    some = dataclasses.replace(weights, layers=tuple(weights.layers[i] for i in layers))
    report = compare_step("reference", "triton", config, some, TOKENS, len(TOKENS), device)
    assert report.passed, report.failure
    assert report.steps == len(TOKENS) and report.fed == TOKENS
    assert set(report.ops) == whole
    assert all(0 <= op.left_ratio <= 1 and 0 <= op.right_ratio <= 1 for op in report.ops.values())
    assert report.ops["kda_recurrent"].calls == report.ops["mla_decode"].calls == len(TOKENS)
    assert "layer" in report.ops["linear"].right_where


def test_both_families_together_use_every_op(models, device):
    used = set()
    for config, weights in models.values():
        used |= set(compare_step("reference", "reference", config, weights, TOKENS, 1, device).ops)
    assert used == set(OPS)


def broken(op: str, breakage, device: str):
    """The reference with one op wrong: `breakage(op function, *args)` takes its place."""
    ops = make_ops("reference", device)
    good = getattr(ops, op)
    setattr(ops, op, lambda *args: breakage(good, *args))
    return ops


def changed(**replaced):
    """The op run with some arguments replaced by a function of them."""

    def run(op: str):
        names = list(OPS[op].args)
        return lambda good, *args: good(*(replaced.get(n, lambda a: a)(a) for n, a in zip(names, args, strict=True)))

    return run


def after(change):
    """The op run as it is, then `change(outputs, *args)`."""

    def run(op: str):
        def wrapped(good, *args):
            outputs = good(*args)
            return change(outputs, *args)

        return wrapped

    return run


def zero_tail(y, *_):
    return torch.cat([y[..., :-8], torch.zeros_like(y[..., -8:])], dim=-1)


def state_in_bf16(o, *args):
    args[list(OPS["kda_recurrent"].args).index("state")].copy_(args[5].bfloat16())
    return o


def one_wrong(y, *_):
    y = y.clone()
    y.view(-1)[7] *= 1.05
    return y


def writes_the_next_position(outputs, ckv, norm_weight, eps, latent_cache, page_table, seq_lens):
    latent_cache[0, int(seq_lens[0])] = 0.0
    return outputs


def overwrites_its_input(y, x, *_):
    x.mul_(2)
    return y


def renumbered(outputs, *_):
    ids, weights = outputs
    return (ids + 1) % 12, weights


BUGS = {
    "norm eps": ("rms_norm", changed(eps=lambda eps: 100 * eps)),
    "eps of the latent norm": ("mla_kv_append", changed(eps=lambda eps: 1e-2)),
    "heads swapped": ("kda_recurrent", after(lambda o, *_: o.flip(1))),
    "heads of the gate swapped": ("gated_rms_norm", changed(out_gate=lambda gate: gate.flip(1))),
    "tail dropped": ("linear", after(zero_tail)),
    "state in bfloat16": ("kda_recurrent", after(state_in_bf16)),
    "state not reset": ("kda_recurrent", changed(is_new=torch.zeros_like)),
    "window not moved": ("causal_conv1d", changed(conv_window=torch.clone)),
    "beta 1 % high": ("kda_recurrent", changed(beta=lambda beta: 1.01 * beta)),
    "softmax scale": ("mla_decode", changed(scale=lambda scale: 1.1 * scale)),
    "newest token not seen": ("mla_decode", changed(seq_lens=lambda lens: (lens - 1).clamp(min=1))),
    "cache row too many": ("mla_kv_append", after(writes_the_next_position)),
    "gate and up swapped": ("situ", changed(gate_up=lambda gu: gu.roll(gu.shape[-1] // 2, -1))),
    "other experts": ("moe_router", after(renumbered)),
    "bias in the weights": ("moe_router", changed(bias=lambda bias: bias + torch.linspace(0, 1, len(bias)).to(bias))),
    "one element 5 % off": ("residual_add", after(one_wrong)),
    "input overwritten": ("residual_add", after(overwrites_its_input)),
    "token after the best": ("argmax", after(lambda out, *_: (out[0] + 1, out[1]))),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_red(bug, models, device):
    op, breakage = BUGS[bug]
    config, weights = models["k3"]
    right = broken(op, breakage(op), device)
    report = compare_step("reference", "triton", config, weights, TOKENS, STEPS, device, right_ops=right)
    assert not report.passed and report.steps < STEPS
    assert report.ops[op].right_ratio > 1 >= report.ops[op].left_ratio
    assert all(entry.right_ratio <= 1 for name, entry in report.ops.items() if name != op)
    assert "right side (triton)" in report.failure and f": {op}: " in report.failure


def test_the_failure_names_layer_step_coordinates_and_values(models, device):
    """The latent norm runs in MLA layer 3 first; the second position is the first where a wrong row 0 is read back."""
    config, weights = models["k3"]
    right = broken("mla_decode", changed(seq_lens=lambda lens: lens.clamp(max=1))("mla_decode"), device)
    report = compare_step("reference", "triton", config, weights, TOKENS, STEPS, device, right_ops=right)
    assert report.failure.startswith("step 1, layer 3 mla, right side (triton): mla_decode: o_latent[0, ")
    assert "reference" in report.failure and "times its bound" in report.failure
    assert (report.steps, report.fed) == (1, TOKENS)


def test_a_bug_of_one_side_does_not_reach_the_next_op(models, device):
    """The left outputs go on: an op of the right side that is wrong in one step only is named in that step."""
    config, weights = models["kimi-linear"]
    calls = []

    def wrong_once(good, *args):
        calls.append(1)
        return -good(*args) if len(calls) == 30 else good(*args)

    right = broken("linear", wrong_once, device)
    report = compare_step("reference", "triton", config, weights, TOKENS, STEPS, device, right_ops=right)
    assert report.ops["linear"].calls == 30 and ": linear: y[" in report.failure


def test_a_bug_of_the_left_side_is_red_too(models, device, monkeypatch):
    config, weights = models["k3"]
    left = broken("swiglu" if config.activation == "silu" else "situ", after(one_wrong)("situ"), device)
    monkeypatch.setattr(module, "make_ops", lambda backend, device: left)
    right = make_ops("reference", device)
    report = compare_step("reference", "triton", config, weights, TOKENS, STEPS, device, right_ops=right)
    assert "left side (reference): situ: m[0, 7]" in report.failure


@pytest.mark.parametrize("bad", (dict(tokens=[]), dict(steps=0), dict(tokens=[1, 320]), dict(tokens=[-1])))
def test_bad_arguments_are_refused_before_anything_runs(bad, models, device):
    config, weights = models["k3"]
    with pytest.raises(ValueError, match="compare_step"):
        compare_step("reference", "reference", config, weights, **{"tokens": [1], "steps": 1, "device": device} | bad)
