"""The schedule of the megakernel: every one that is made is proved, every one that is damaged is refused."""

import dataclasses
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from schedule_cases import BASES, MUTATIONS, Case, NotHere, depends, fewest_sms, is_load, ranks_of

from cute_megakernel import validate
from cute_megakernel.recording import record_local_step
from cute_megakernel.rows import Code
from cute_megakernel.schedule import Schedule, make_schedule
from cute_megakernel.schedule_error import ScheduleError
from cute_megakernel.shape import KernelShape
from cute_megakernel.validate import check_balance
from kimi_kernels.config import CONFIGS
from kimi_kernels.meta_weights import meta_weights

ROOT = Path(__file__).parent.parent
FEW = settings(max_examples=max(1, settings().max_examples // 3))
MINI = ("k3-mini", "kimi-linear-mini")
REAL_SMS = (132, 114, 78, 148)


@st.composite
def mini_cases(draw) -> Case:
    """Whole MINI models or some of their layers, on few and many SMs."""
    name = draw(st.sampled_from(MINI))
    config, rows = CONFIGS[name], draw(st.integers(1, 8))
    sms = draw(st.sampled_from((*range(fewest_sms(config, rows), 9), *REAL_SMS)))
    layers = draw(
        st.none() | st.sets(st.integers(0, config.num_layers - 1), min_size=1).map(lambda s: tuple(sorted(s)))
    )
    return Case(name, rows, draw(st.sampled_from(ranks_of(config))), sms, layers)


@st.composite
def real_cases(draw) -> Case:
    """A few layers of a real model on a real GPU."""
    name = draw(st.sampled_from(("kimi-linear-48b", "k3")))
    config = CONFIGS[name]
    layers = draw(st.sets(st.integers(0, config.num_layers - 1), min_size=1, max_size=3))
    sms = draw(st.sampled_from(REAL_SMS))
    fitting = [
        (tp, rows) for tp in ranks_of(config) for rows in range(1, 9) if fewest_sms(config.shard(tp), rows) <= sms
    ]
    tp, rows = draw(st.sampled_from(fitting))
    return Case(name, rows, tp, sms, tuple(sorted(layers)))


@given(mini_cases(), st.integers(1, 8), st.integers(0, 99))
def test_schedules_of_mini_models_are_proved(case, slots, seed):
    schedule = case.schedule()
    schedule.shape = dataclasses.replace(schedule.shape, slots=slots)
    validate.validate(schedule, outcomes=3, seed=seed)


@FEW
@given(real_cases())
@example(Case("k3", 1, 16, 132, (0, 1, 3, 12)))
@example(Case("k3", 8, 4, 78, (0, 91, 92)))
@example(Case("kimi-linear-48b", 8, 1, 132, (0, 3, 26)))
def test_schedules_of_real_sizes_are_proved(case):
    validate.validate(case.schedule(), outcomes=1)


def test_the_whole_of_k3_is_proved():
    """One rank of sixteen, 93 layers."""
    validate.validate(Case("k3", 1, 16, 132).schedule(), outcomes=0)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
@FEW
@given(base=st.sampled_from(list(BASES)), seed=st.integers(0, 999))
def test_a_damaged_schedule_is_refused(mutation, base, seed):
    with pytest.raises(ScheduleError):
        validate.validate(damaged(mutation, random.Random(seed), base), outcomes=0)


ALONE = {
    "lost_unit": lambda s, view: validate.check_units(s),
    "short_place": lambda s, view: validate.check_places(s),
    "score_of_another_mix": lambda s, view: validate.check_calls(s),
    "small_x": validate.check_plan,
    "lost_bank_score": validate.check_words,
    "wrong_source": validate.check_words,
    "lost_item": lambda s, view: validate.check_units(s),
    "item_done_twice": lambda s, view: validate.check_units(s),
    "wrong_x": validate.check_local,
    "list_not_given_back": lambda s, view: validate.check_ring(s, view, list(validate.router_outcomes(s, 0, 0))),
}


@pytest.mark.parametrize("name", ALONE)
def test_each_proof_finds_damage_by_itself(name):
    """Damage is often found by several proofs; none of them may rely on the others."""
    mutation = next(mutation for mutation in MUTATIONS if mutation.__name__ == name)
    schedule = damaged(mutation, random.Random(0), "k3")
    with pytest.raises(ScheduleError):
        ALONE[name](schedule, validate.TableView(schedule))


def damaged(mutation, rng: random.Random, base: str) -> Schedule:
    """The first schedule from `base` on in which there is something to damage."""
    for name in (base, *BASES):
        schedule = BASES[name].schedule()
        try:
            mutation(schedule, rng)
        except NotHere:
            continue
        return schedule
    raise AssertionError(f"{mutation.__name__} damages nothing")


def test_parts_may_be_overwritten_only_behind_their_last_reader():
    """Without a row that all SMs do between two MLA layers, an SM could be late with the parts of the first."""
    schedule = BASES["k3"].schedule()
    one, two = (n for n, row in enumerate(schedule.rows) if row.code == Code.MLA_DECODE)
    for number in range(one, two):
        if schedule.rows[number].code == Code.MIX:
            schedule.rows[number] = dataclasses.replace(schedule.rows[number], units=1)
    with pytest.raises(ScheduleError, match="may overwrite parts that row"):
        validate.check_words(schedule, validate.TableView(schedule))


SMALL = Case("k3-mini", 2, 1, 3, (0, 1, 2, 3))


def test_no_row_can_be_left_out():
    count = len(SMALL.schedule().rows)
    for number in range(count):
        schedule = SMALL.schedule()
        for shares in (schedule.rows, *schedule.work):
            del shares[number]
        with pytest.raises(ScheduleError):
            validate.validate(schedule, outcomes=0)


def test_no_row_can_change_places_with_the_one_it_needs():
    rows = SMALL.schedule().rows
    pairs = [n for n in range(len(rows) - 1) if depends(rows[n + 1], rows[n])]
    assert len(pairs) > len(rows) // 2
    for number in pairs:
        schedule = SMALL.schedule()
        for shares in (schedule.rows, *schedule.work):
            shares[number], shares[number + 1] = shares[number + 1], shares[number]
        with pytest.raises(ScheduleError):
            validate.validate(schedule, outcomes=0)


def test_independent_rows_may_change_places():
    """The validator refuses what is wrong, not what is different: two projections of the same input commute."""
    schedule = BASES["k3"].schedule()
    number = next(
        n
        for n, row in enumerate(schedule.rows)
        if row.code == schedule.rows[n + 1].code == Code.LINEAR and row.place.part == "moe"
    )
    for shares in (schedule.rows, *schedule.work):
        shares[number], shares[number + 1] = shares[number + 1], shares[number]
    validate.validate(schedule)


def test_a_load_may_be_done_twice():
    schedule = BASES["k3"].schedule()
    number = next(n for n, row in enumerate(schedule.rows) if is_load(row) and row.units == 0)
    for shares in (schedule.rows, *schedule.work):
        shares.insert(number, shares[number])
    validate.validate(schedule)


def test_errors_name_the_row_and_the_activation():
    schedule = BASES["k3"].schedule()
    number = next(n for n, row in enumerate(schedule.rows) if row.code == Code.MLA_KV_APPEND)
    for shares in (schedule.rows, *schedule.work):
        del shares[number]
    with pytest.raises(ScheduleError, match=r"call \d+ \(mla_kv_append\): no row does it"):
        validate.validate(schedule)
    schedule = BASES["k3"].schedule()
    schedule.work[2][1] = (schedule.work[2][1][0] + 1, schedule.work[2][1][1])
    with pytest.raises(ScheduleError, match=r"row 1 \(layer 0 kda in_proj, LINEAR\): unit 24 is lost"):
        validate.validate(schedule)


def test_an_sm_with_more_tiles_than_sums_is_refused():
    """moe_down adds up all experts of a tile in shared memory: too few SMs would write past the end of that."""
    schedule = Case("kimi-linear-mini", 3, 1, 1).schedule()
    with pytest.raises(ScheduleError, match=r"18 tiles .*too many for one SM"):
        validate.validate(schedule)


def test_no_launch_begins_between_batch_rows_that_share_a_list_of_experts():
    """moe_down of a few batch rows at a time: the list of experts is in use until the last of them."""
    schedule = Case("kimi-linear-48b", 8, 1, 132, (1,)).schedule()
    downs = [n for n, row in enumerate(schedule.rows) if row.code == Code.MOE_DOWN]
    assert len(downs) > 1
    assert not set(range(downs[0], downs[-1] + 1)) & set(schedule.part_starts())
    validate.validate(schedule)


@pytest.mark.parametrize("rows", (1, 3, 4, 8))
def test_k3_uncut_has_a_schedule_for_every_batch(rows):
    """Its dense layer's tiles have the most pieces of all."""
    validate.validate(Case("k3", rows, 1, 132, (0, 3)).schedule())


def test_tiles_of_more_pieces_than_sums_are_refused(monkeypatch):
    """A group of no tiles would never end: 66 pieces of a K3 tile, 64 sums."""
    monkeypatch.setattr(KernelShape, "sums", 64)
    with pytest.raises(ScheduleError, match=r"dense down, LINEAR\): 66 pieces a tile: no tile fits the sums"):
        validate.validate(Case("k3", 4, 1, 132, (0,)).schedule())


def gathered_schedule(name: str, ranks: int, layers: tuple[int, ...]) -> Schedule:
    """Router and latent projections cut over the ranks, each writing what all of them would."""
    config, names = CONFIGS[name], ("router", "latent_down", "latent_up")
    weights = meta_weights(config, ranks, layers=layers)
    cut = []
    for layer in weights.layers:
        parts = {n: getattr(layer.mlp, n).chunk(ranks)[0].clone() for n in names if hasattr(layer.mlp, n)}
        cut.append(dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, **parts)))
    weights = dataclasses.replace(weights, layers=tuple(cut))
    local = config.shard(ranks)
    return make_schedule(record_local_step(local, weights, 1, gathered=dict.fromkeys(names, ranks)), local, 132)


def test_copies_for_other_ranks_do_not_overlap():
    """Outputs of a rank that are no whole tiles would be overwritten by the zeros behind the rank before."""
    validate.validate(gathered_schedule("k3", 16, (0, 1)), outcomes=0)
    with pytest.raises(ScheduleError, match="router, LINEAR.: writes words a second time"):
        validate.validate(gathered_schedule("k3", 32, (1,)), outcomes=0)


@given(mini_cases())
def test_bytes_are_balanced(case):
    """Checked apart from the proof: within one unit."""
    schedule = case.schedule()
    check_balance(schedule)
    loads = [schedule.streamed_bytes(sm) for sm in range(case.sms)]
    assert max(loads) - min(loads) <= max(row.unit_bytes for row in schedule.rows)


def test_proof_and_emulator_need_no_gpu_package():
    """X03: importable on a machine that has neither a driver nor the DSL."""
    code = "import cute_megakernel.validate, cute_megakernel.emulator"
    blocked = "import sys; [sys.modules.__setitem__(m, None) for m in ('cutlass', 'cuda', 'triton')]; "
    done = subprocess.run([sys.executable, "-c", blocked + code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
