"""Arguments that the kernel would read as if they were right: one error each, naming what was expected."""

import dataclasses
import math

import pytest
import torch
from schedule_cases import BASES

from cute_megakernel.images import Images
from cute_megakernel.instance_checks import check_limits, check_schedule, check_state
from cute_megakernel.recording import Weight
from kimi_kernels.config import KIMI_LINEAR_MINI
from kimi_kernels.meta_weights import meta_weights
from kimi_kernels.state import KdaState, State

CONFIG = KIMI_LINEAR_MINI
WEIGHTS, META = meta_weights(CONFIG, 1), torch.device("meta")


def pools(**changes) -> State:
    """Right ones but for one pool of the layer that has it."""
    layers = list(State.zeros(CONFIG, 4, 4, 16, "meta").layers)
    for name, change in changes.items():
        at = next(i for i, layer in enumerate(layers) if hasattr(layer, name))
        layers[at] = dataclasses.replace(layers[at], **{name: change(getattr(layers[at], name))})
    return State(tuple(layers))


def test_right_pools_pass():
    check_state(CONFIG, WEIGHTS, pools(), META)
    check_state(CONFIG, WEIGHTS, pools(recurrent=lambda pool: torch.cat([pool, pool], dim=1)[:, : pool.shape[1]]), META)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recurrent": lambda pool: pool[:, :1]}, r"recurrent must be \[any, \d+, 32, 32\] torch.float32 on meta"),
        ({"conv_window": lambda pool: pool.float()}, r"conv_window must be .* torch.bfloat16 on meta, got .*float32"),
        ({"recurrent": lambda pool: pool.transpose(2, 3)}, "recurrent must be contiguous within a slot"),
        ({"recurrent": lambda pool: torch.zeros(pool.shape)}, "recurrent must be .* on meta, got .* on cpu"),
        ({"latent_cache": lambda pool: torch.cat([pool, pool], dim=1)[:, :16]}, "latent_cache must be contiguous"),
        ({"latent_cache": lambda pool: pool[..., :-1]}, r"latent_cache must be \[any, any, \d+\]"),
    ],
)
def test_wrong_pools_are_named(change, message):
    with pytest.raises(ValueError, match=rf"Megakernel: state of layer \d+: {message}"):
        check_state(CONFIG, WEIGHTS, pools(**change), META)


def test_a_slot_that_begins_between_two_copies_is_named():
    def pitch_of_odd_floats(pool):
        inner = math.prod(pool.shape[1:])
        return torch.empty(4 * (inner + 1), device="meta").as_strided(pool.shape, (inner + 1, *pool.stride()[1:]))

    with pytest.raises(ValueError, match="recurrent must begin, slot by slot, at multiples of 16 bytes"):
        check_state(CONFIG, WEIGHTS, pools(recurrent=pitch_of_odd_floats), META)


def test_layers_of_another_model_are_named():
    layers = pools().layers
    with pytest.raises(ValueError, match=rf"state must have {len(layers)} layers, got {len(layers) - 1}"):
        check_state(CONFIG, WEIGHTS, State(layers[1:]), META)
    kda = next(layer for layer in layers if isinstance(layer, KdaState))
    with pytest.raises(ValueError, match="must be MlaState, got KdaState"):
        check_state(CONFIG, WEIGHTS, State((kda,) * len(layers)), META)


def test_schedules_of_other_rows_or_sms_are_named():
    schedule = BASES["k3"].schedule()
    check_schedule(schedule, schedule.shape.rows, schedule.shape.sms)
    with pytest.raises(ValueError, match=rf"schedule must be for 7 rows, it is for {schedule.shape.rows}"):
        check_schedule(schedule, 7, schedule.shape.sms)
    with pytest.raises(ValueError, match=rf"schedule must be for 1 sms, it is for {schedule.shape.sms}"):
        check_schedule(schedule, schedule.shape.rows, 1)


@pytest.mark.parametrize(("in_flight", "limit_s"), [(-3, 1.0), (1.5, 1.0), (65, 1.0), (0, 0), (0, math.nan), (0, 1e12)])
def test_limits_that_mean_nothing_are_named(in_flight, limit_s):
    with pytest.raises(ValueError, match="Megakernel: (in_flight|limit_s) must be .*, got"):
        check_limits(in_flight, limit_s)


def test_weights_that_do_not_lie_together_are_copied():
    """What the kernel reads as one run: plain weights, and the projections of KDA heads."""
    images = Images(dataclasses.replace(WEIGHTS, embed=torch.zeros(4, 8)))
    for wrong in (torch.arange(64.0).reshape(4, 16)[:, :8], torch.arange(33.0)[1:].reshape(4, 8)):
        images.tensors["embed"], images._made = wrong, {}
        made = images.plain(Weight("embed", (4, 8)))
        assert made.is_contiguous() and made.data_ptr() % 16 == 0 and torch.equal(made, wrong)
        assert made is images.plain(Weight("embed", (4, 8)))
    right = torch.zeros(4, 8)
    images.tensors["embed"] = right
    assert images.plain(Weight("embed", (4, 8))) is right
    images.tensors["f_b"] = torch.zeros(32, 64).bfloat16()[:, :32]
    assert images.image("heads", Weight("f_b", (32, 32))).is_contiguous()
