"""The ring of weights: stream and consumers count alike, and neither waits for the other for ever."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from cute_megakernel.footprint import Part
from cute_megakernel.ring import Outcome, Step, consumed, share, streamed, walk
from cute_megakernel.rows import Code
from cute_megakernel.shape import SLOT_BYTES, SLOT_TOKENS, KernelShape, Pieces


class OneRow(dict):
    """Fields of a row that is not in a table."""


@st.composite
def ring_rows(draw):
    """A row of any code with any sizes, and what the router chose."""
    code = draw(st.sampled_from((Code.LINEAR, Code.MOE_GATE_UP, Code.MOE_DOWN, Code.KDA_HEAD, Code.MLA_DECODE)))
    rows, experts = draw(st.integers(1, 8)), draw(st.sampled_from((8, 24, 896)))
    top_k, mxfp4 = draw(st.integers(1, 8)), draw(st.booleans())
    sms, dim = draw(st.sampled_from((1, 3, 132))), draw(st.sampled_from((32, 64, 128)))
    slots, heads = draw(st.integers(1, 8)), draw(st.sampled_from((2, 12, 32, 96)))
    gate = draw(st.booleans())
    shape = KernelShape(rows, 160, 4, dim, heads, 48, 32, 16, experts, top_k, mxfp4, 20480, sms, slots, gate)
    picks = draw(st.lists(st.permutations(range(min(experts, 12))), min_size=rows, max_size=rows))
    live = draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    kb, r0 = draw(st.integers(1, 300)), draw(st.integers(0, rows - 1))
    cut = Pieces.of(kb, mxfp4 and code != Code.LINEAR)
    fields = OneRow(kb=kb, piece=cut.blocks, ppt=cut.per_tile, tpp=cut.tiles, total=draw(st.integers(1, 64)))
    fields |= {"r0": r0, "r1": draw(st.integers(r0 + 1, rows))}
    some = st.sampled_from((0, 1, 2, 17, 64, 65, 129, 1024, 2049, 40000))
    lengths = draw(st.lists(some, min_size=rows, max_size=rows))
    outcome = Outcome(tuple(tuple(p[:top_k]) for p in picks), tuple(live), tuple(lengths))
    first = draw(st.integers(0, 4 * rows - 1))
    return shape, fields, code, Part(draw(st.integers(0, sms - 1)), first, first + draw(st.integers(1, 40))), outcome


@settings(max_examples=20 * settings().max_examples)
@given(ring_rows())
def test_stream_and_consumers_count_the_same_slots(row):
    """The two sides state their arithmetic separately."""
    shape, fields, code, part, outcome = row
    sizes = streamed(shape, fields, code, part, outcome)
    assert len(sizes) == consumed(shape, fields, code, part, outcome)
    assert all(0 < size <= SLOT_BYTES and size % 16 == 0 for size in sizes)
    if code == Code.MOE_DOWN:
        served = len(outcome.served(range(fields["r0"], fields["r1"])))
        assert sum(sizes) == served * (part.end - part.first) * fields["kb"] * shape.block_bytes
    if code == Code.MLA_DECODE:
        own = dataclasses.replace(shape, sms=1)
        of_all = sum(streamed(own, fields, code, Part(0, 0, 1), outcome))
        cached = sum(max(0, length - 1) for length in outcome.lengths)
        assert of_all == cached * shape.head_groups * shape.latent_bytes
        assert all(size <= SLOT_TOKENS * shape.latent_bytes for size in sizes)
    if code == Code.LINEAR:
        assert sum(sizes) == (part.end - part.first) * fields["kb"] * 512


@given(st.integers(1, 200), st.integers(1, 128), st.integers(1, 100))
def test_tiles_of_the_picked_experts_are_dealt_out_once(sms, experts, total):
    shares = [share(sm, sms, experts * total) for sm in range(sms)]
    assert [first for first, _ in shares] == [0, *(end for _, end in shares[:-1])] and shares[-1][1] == experts * total
    assert max(end - first for first, end in shares) - min(end - first for first, end in shares) <= 1


def test_the_stream_must_not_wait_for_a_router_behind_it():
    expert, router = Step(3, router=0, frees=True, name="w13"), Step(0, router=0, makes=True, name="router")
    assert walk([Step(9), router, expert, Step(9)], 1) is None
    assert "waits for list 0" in str(walk([Step(9), expert, router], 2))
    again = Step(0, router=1, makes=True, name="next router")
    assert "never given back" in str(walk([router, dataclasses.replace(expert, frees=False), again], 4))
