"""The megakernel's schedule run on the CPU: the reference's bits in every order, a report where it is damaged."""

import dataclasses
import json
import random
from collections import Counter

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from schedule_cases import BASES, MUTATIONS, Case, NotHere, fewest_sms

from cute_megakernel.emulator import ORDERS, EmulationError, Emulator
from cute_megakernel.footprint import Part, decode_units, split
from cute_megakernel.rows import Code
from cute_megakernel.shape import DIRECT_PARTS, SLOT_TOKENS
from cute_megakernel.table_view import TableView
from kimi_kernels.backends import make_ops
from kimi_kernels.checkpoint import load_weights
from kimi_kernels.cli import main
from kimi_kernels.compare import assert_same_bits
from kimi_kernels.config import KimiConfig
from kimi_kernels.decode_step import StepOutput, decode_step
from kimi_kernels.hf_config import load_config
from kimi_kernels.mini import make_mini
from kimi_kernels.state import Batch, State
from kimi_kernels.weights import ModelWeights

FAMILIES = ("k3", "kimi-linear")
PAGE, PAGES = 16, 12  # tokens of a page, pages of a sequence
Model = tuple[KimiConfig, ModelWeights]


class Models(dict[str, Model]):
    """By family; short where Hypothesis shows the arguments of a failure."""

    def __repr__(self) -> str:
        return f"models of {', '.join(self)}"


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> dict:
    root = tmp_path_factory.mktemp("emulated")
    for family in FAMILIES:
        make_mini(root / family, family, seed=2)
    return {family: root / family for family in FAMILIES}


@pytest.fixture(scope="session")
def models(checkpoints) -> Models:
    configs = {family: load_config(directory) for family, directory in checkpoints.items()}
    return Models({f: (config, load_weights(checkpoints[f], config, progress=False)) for f, config in configs.items()})


def filled_state(config: KimiConfig, weights: ModelWeights, rows: int, seed: int, pages: int = PAGES) -> State:
    """Random pools, one slot a row and one that nobody owns, which is NaN."""
    state = State.zeros(config, rows + 1, rows * pages, PAGE, layers=[layer.index for layer in weights.layers])
    generator = torch.Generator().manual_seed(seed)
    for layer in state.layers:
        for name, pool in vars(layer).items():
            pool.copy_(0.2 * torch.randn(pool.shape, generator=generator))
            if name != "latent_cache":
                pool[rows] = float("nan")
    return state


def batch_of(lengths: list[int], new: list[bool] | None = None, pages_each: int = PAGES) -> Batch:
    """Row r in slot rows - 1 - r; length 0 is padding."""
    rows = len(lengths)
    slots = [rows - 1 - r if length else -1 for r, length in enumerate(lengths)]
    pages = torch.randperm(rows * pages_each, generator=torch.Generator().manual_seed(rows)).int().reshape(rows, -1)
    flags = torch.tensor(new or [False] * rows)
    return Batch(torch.tensor(slots).int(), flags, torch.tensor(lengths).int(), pages)


def assert_equal_steps(model: Model, emulator: Emulator, states: tuple[State, State], batch: Batch, tokens) -> None:
    """One step of the reference and of the emulator: tokens, logits and every pool, bit for bit."""
    config, weights = model
    reference, emulated = states
    want = decode_step(make_ops("reference"), config, weights, reference, batch, tokens)
    got = emulator.step(tokens, batch)
    assert got.tokens.tolist() == want.tokens.tolist()
    assert_same_bits(got.logits, want.logits, "logits")
    for index, (a, b) in enumerate(zip(emulated.layers, reference.layers, strict=True)):
        for name in vars(a):
            assert_same_bits(getattr(a, name), getattr(b, name), f"layer {index} {name}")


@settings(max_examples=max(1, 2 * settings().max_examples // 3))
@given(
    family=st.sampled_from(FAMILIES),
    rows=st.integers(1, 3),
    sms=st.sampled_from((6, 4, 5, 7, 44)),
    order=st.sampled_from(ORDERS),
    seed=st.integers(0, 2**16),
    data=st.data(),
)
def test_every_order_gives_the_bits_of_the_reference(models, family, rows, sms, order, seed, data):
    """Words that are not there yet are NaN, and so is the state that no row owns: neither reaches a result."""
    config, weights = models[family]
    lengths = data.draw(st.lists(st.sampled_from((1, 2, 17, 63, 64, 65, 130, 0)), min_size=rows, max_size=rows))
    new = data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    states = filled_state(config, weights, rows, seed), filled_state(config, weights, rows, seed)
    emulator = Emulator(config, weights, states[1], rows, max(sms, fewest_sms(config, rows)), seed, order)
    tokens = torch.randint(config.vocab_size, (rows,), generator=torch.Generator().manual_seed(seed))
    assert_equal_steps(models[family], emulator, states, batch_of(lengths, new), tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_lengths_and_rows_change_between_launches(family, models):
    """C15, C14: consecutive launches with growing and shrinking lengths, padding, new sequences, and idle SMs."""
    config, weights = models[family]
    states = filled_state(config, weights, 2, 7), filled_state(config, weights, 2, 7)
    emulator = Emulator(config, weights, states[1], rows=2, sms=20, seed=7)
    for step, lengths in enumerate(([1, 66], [65, 0], [0, 3], [129, 2], [0, 0])):
        tokens = torch.tensor([3 + step, 100 + step])
        assert_equal_steps(models[family], emulator, states, batch_of(lengths, [step == 2, step == 3]), tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_sequence_beside_a_short_one(family, models):
    """More parts than an SM puts together by itself, and one."""
    config, weights = models[family]
    part = dataclasses.replace(weights, layers=tuple(weights.layers[l] for l in config.mla_layers))
    states = filled_state(config, part, 2, 3, 132), filled_state(config, part, 2, 3, 132)
    emulator = Emulator(config, part, states[1], rows=2, sms=9)
    assert split(emulator.schedule.shape, 2100)[1] > DIRECT_PARTS
    batch = batch_of([2100, 3], pages_each=132)
    assert_equal_steps((config, part), emulator, states, batch, torch.tensor([9, 4]))


@pytest.mark.parametrize("layers", ((0,), (0, 1), (1, 2, 3)))
def test_slices_of_a_model(layers, models):
    """C15: an odd and an even number of layers, with and without the start of a residual block."""
    config, weights = models["k3"]
    part = dataclasses.replace(weights, layers=tuple(weights.layers[l] for l in layers))
    states = filled_state(config, part, 1, 3), filled_state(config, part, 1, 3)
    assert_equal_steps(
        (config, part), Emulator(config, part, states[1], sms=6), states, batch_of([5]), torch.tensor([9])
    )


def test_two_launches_in_two_orders_leave_the_same_bits(models):
    config, weights = models["kimi-linear"]
    outputs: list[StepOutput] = []
    for order in ("first", "last"):
        state = filled_state(config, weights, 2, 5)
        outputs.append(Emulator(config, weights, state, 2, 5, order=order).step(torch.tensor([1, 2]), batch_of([4, 9])))
    assert_same_bits(outputs[0].logits, outputs[1].logits, "logits")


# damage shows

NOTICED = (
    "lost_unit", "shifted_units", "lost_item", "item_done_twice", "lost_share_of_a_mix", "lost_row", "swapped_rows",
    "row_before_its_input", "wrong_x", "lost_bank_score", "score_of_another_mix",
)  # fmt: skip


@pytest.mark.parametrize("name", NOTICED)
@settings(max_examples=max(1, settings().max_examples // 5))
@given(seed=st.integers(0, 999), order=st.sampled_from(ORDERS))
def test_a_damaged_schedule_is_noticed(models, name, seed, order):
    """The launch cannot go on, or a row finds the wrong thing: never tokens."""
    for family in FAMILIES:
        case: Case = BASES[family]
        schedule = case.schedule()
        try:
            next(m for m in MUTATIONS if m.__name__ == name)(schedule, random.Random(seed))
        except NotHere:
            continue
        config, weights = models[family]
        state = filled_state(config, weights, case.rows, 1)
        try:
            emulator = Emulator(config, weights, state, seed=seed, order=order, schedule=schedule)
        except StopIteration:  # a row names one that is lost: there is no table
            continue
        with pytest.raises(EmulationError):
            emulator.step(torch.arange(case.rows), batch_of([5] * case.rows))


def test_a_launch_that_cannot_go_on_says_where(models):
    config, weights = models["k3"]
    schedule = BASES["k3"].schedule()
    schedule.work[2][1] = (24, 35)  # of tiles 24 to 35
    emulator = Emulator(config, weights, filled_state(config, weights, 2, 1), schedule=schedule)
    with pytest.raises(
        EmulationError, match=r"no SM can go on: .*SM \d at row \d+ \(layer 0 kda .*waits for \d+ words"
    ):
        emulator.step(torch.tensor([1, 2]), batch_of([1, 1]))


def test_wrong_arguments_are_refused(models):
    config, weights = models["k3"]
    with pytest.raises(ValueError, match="order must be one of"):
        Emulator(config, weights, filled_state(config, weights, 1, 1), order="backwards")


SHAPE = BASES["k3"].schedule().shape


def test_parts_of_the_lengths_above_are_several():
    assert [split(SHAPE, length)[1] for length in (0, 1, 64, 65, 130)] == [0, 1, 1, 2, 3]


# parts of a sequence (C15: counts that are right at one length only; C14: nothing to do)


@given(st.integers(0, 200_000), st.sampled_from((1, 16, 17, 96)))
@example(0, 12)
@example(1, 12)
@example(63, 12)
@example(64, 12)
@example(65, 12)
@example(1025, 12)
@example(2049, 32)
@example(131072, 12)
def test_parts_cover_a_sequence_of_any_length(length, heads):
    shape = dataclasses.replace(SHAPE, mla_heads=heads)
    tokens, parts = split(shape, length)
    assert parts <= shape.splits and tokens % SLOT_TOKENS == 0
    assert parts <= DIRECT_PARTS or length > 2048
    assert (parts - 1) * tokens < length <= parts * tokens if length else parts == 0


@pytest.mark.parametrize("sms", (1, 6, 132))
def test_every_part_has_one_sm(sms):
    schedule = Case("k3-mini", 3, 1, 6).schedule()
    schedule.shape = dataclasses.replace(schedule.shape, sms=sms)
    view = TableView(schedule)
    f = next(f for f, row in zip(view.rows, schedule.rows, strict=True) if row.code == Code.MLA_DECODE)
    lengths = (0, 1, 700)
    parts = tuple(split(schedule.shape, length)[1] for length in lengths)
    units = Counter(
        (which, r, head)
        for sm in range(sms)
        for which, r, heads in decode_units(schedule.shape, f, Part(sm, 0, 1, parts))
        for head in heads
    )
    want = {(which, r, head) for r in range(3) for which in range(parts[r]) for head in range(2)}
    assert set(units) == want and set(units.values()) == {1}


# the command


@pytest.fixture
def run(capsys):
    def call(*argv) -> tuple[int, str, str]:
        capsys.readouterr()
        return main([str(arg) for arg in argv]), *capsys.readouterr()

    return call


@pytest.mark.parametrize("family", FAMILIES)
def test_emulate_prints_what_decode_prints(family, checkpoints, run):
    argv = (checkpoints[family], "--tokens", "5,17", "--new", "3", "--device", "cpu", "--json")
    results = []
    for command in (("decode", *argv, "--backend", "reference"), ("emulate", *argv, "--seed", "4")):
        code, out, err = run(*command)
        assert code == 0, err
        results.append(json.loads(out))
    decoded, emulated = results
    assert list(emulated) == list(decoded) and emulated["tokens"] == decoded["tokens"]
    assert (emulated["backend"], emulated["device"]) == ("emulator", "cpu") and emulated["seconds_per_token"] > 0


def test_emulate_runs_a_slice_of_a_rank_and_shows_it(checkpoints, run):
    argv = (checkpoints["k3"], "--tokens", "5", "--new", "2", "--tp", "2", "--tp-rank", "1", "--layers", "1:4")
    code, out, err = run("emulate", *argv)
    assert code == 0, err
    assert "emulator on cpu, rank 1 of 2, layers 1:4" in out and "ms per token" in out
    want = json.loads(run("decode", *argv, "--backend", "reference", "--json")[1])["tokens"]
    assert ", ".join(map(str, want)) in out


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (("--sms", "0"), "expected a positive integer"),
        (("--sms", "9999"), "--sms must be at most 256"),
        (("--tokens", "99999"), "token ids must be in"),
        (("--device", "cuda"), "the emulator runs on the CPU"),
    ],
)
def test_emulate_refuses_in_one_line(extra, message, checkpoints, run):
    argv = {"--tokens": "5", "--new": "1"} | dict([extra])
    code, out, err = run("emulate", checkpoints["kimi-linear"], *(word for pair in argv.items() for word in pair))
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1
