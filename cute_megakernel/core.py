"""What every stage uses: the SM at hand, fields of the row, activation words, the ring and reductions over the SM.

Activations pass between SMs as words of 8 bytes: 4 bytes of payload (two bfloat16 or one float32) and the tag of this
launch. A reader asks for the word until the tag is right; the data is its own flag, so a hand-over takes one trip to
memory each way, needs no fence and no counter, and nothing has to be cleared between launches.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_megakernel import ptx
from cute_megakernel.shape import CONSUMER_WARPS, CONSUMERS, FIELD_WORDS, PAIRS, SLOT_BYTES, KernelShape, SharedLayout
from cute_megakernel.table import FIELD

POLLS_BETWEEN_LOOKS = 256  # polls of a word before the clock and the error word are read; a power of two
BARRIER_ROW = 0x3FFFF  # reported in place of a row by a wait inside one SM
NONE_OWN = 1 << 28  # first own filling of a warp without a slot
LOG2E = 1.4426950408889634


class Sm:
    """One SM while it walks the table: addresses and ids of the kernel by name. Nothing here is assigned again.

    shape, layout                   build parameters, shared memory
    smem, words, control            base addresses
    tag, deadline                   of this launch: what its words carry, when waits end
    block, thread, warp, lane       who we are; group = lane // 4 is the batch row of an activation fragment and the
                                    output of a weight fragment, quad = lane % 4 its place along the inputs
    batch                           addresses of the step's inputs and outputs by name
    """

    shape: KernelShape
    layout: SharedLayout
    smem: Int32
    words: Int64
    control: Int64
    tag: Int32
    deadline: Int64
    block: Int32
    thread: Int32
    warp: Int32
    lane: Int32
    group: Int32
    quad: Int32
    batch: dict

    def __init__(self, shape: KernelShape, layout: SharedLayout, **values):
        self.shape, self.layout = shape, layout
        for name, value in values.items():
            setattr(self, name, value)


class Fields:
    """The row being done, in shared memory; `number` is its place in the table."""

    def __init__(self, base: Int32, number: Int32):
        self.base, self.number = base, number

    def __getitem__(self, name: str) -> Int32:
        return ptx.ld_shared_b32(self.base + 4 * FIELD[name])


def fetch_row(sm: Sm, fields: Int64, work: Int64, row: Int32):
    """Two words of a row for each lane, and this SM's first and end unit and cap; on their way when it returns."""
    low, high = ptx.ld_row(fields + Int64(row) * (4 * FIELD_WORDS) + Int64(sm.lane) * 8)
    first, end, cap, _ = ptx.ld_share(work + Int64(row) * 16)
    return low, high, first, end, cap


def region(sm: Sm, name: str) -> Int32:
    """Address of a region of shared memory."""
    return sm.smem + getattr(sm.layout, name)


def word_at(f: Fields, index: Int32) -> Int32:
    """The word at a place that is known at run time only."""
    return ptx.ld_shared_b32(f.base + 4 * index)


def address_of(f: Fields, name: str) -> Int64:
    """A 64-bit field."""
    return ptx.ld_shared_b64(f.base + 4 * FIELD[name])


def float_of(f: Fields, name: str) -> Float32:
    return ptx.bits_float(f[name])


def sync(sm: Sm):
    """All consumer warps."""
    ptx.bar_sync(1, CONSUMERS)


def word_address(sm: Sm, index: Int32) -> Int64:
    return sm.words + Int64(index) * 8


@cute.jit
def give_up(sm: Sm, row: Int32) -> Int32:
    """1 when another SM reported an error or this launch has taken too long; the first to find out says where."""
    failed = ptx.ld_fresh_b32(sm.control + 8)
    if failed == 0:
        if ptx.now_ns() > sm.deadline:
            ptx.atomic_claim(sm.control + 8, ((row << 12) | sm.block) + 1)
            failed = Int32(1)
    return failed


@cute.jit
def poll_word(sm: Sm, row: Int32, index: Int32, tag: Int32) -> Int32:
    """Payload of one word, once it is there."""
    address = word_address(sm, index)
    payload, seen = ptx.ld_word(address)
    polls = Int32(0)
    while seen != tag:
        payload, seen = ptx.ld_word(address)
        polls += 1
        if (polls & (POLLS_BETWEEN_LOOKS - 1)) == 0:
            if give_up(sm, row) != 0:
                seen = tag
    return payload


@cute.jit
def poll_pair(sm: Sm, row: Int32, index: Int32, tag: Int32):
    """Payloads of two neighbouring words, the first at an even index."""
    address = word_address(sm, index)
    first, tag1, second, tag2 = ptx.ld_word_pair(address)
    polls = Int32(0)
    while (tag1 != tag) | (tag2 != tag):
        first, tag1, second, tag2 = ptx.ld_word_pair(address)
        polls += 1
        if (polls & (POLLS_BETWEEN_LOOKS - 1)) == 0:
            if give_up(sm, row) != 0:
                tag1 = tag
                tag2 = tag
    return first, second


@cute.jit
def poll_quads(sm: Sm, row: Int32, start: Int32, count: Int32, quads: cutlass.Constexpr, into: cute.Tensor):
    """Columns 4q ... 4q+3 of one activation row for q = thread, thread + 512, ... below `count`, as bfloat16 pairs.

    All loads are on their way before the first is looked at. Quads past the end repeat quad 0.
    """
    ready = Int32(0)
    polls = Int32(0)
    while ready == 0:
        ready = Int32(1)
        tags = cute.make_rmem_tensor(2 * quads, Int32)
        for j in cutlass.range_constexpr(quads):
            q = sm.thread + j * CONSUMERS
            q = ptx.select(q < count, q, Int32(0))
            address = word_address(sm, start + 2 * q)
            into[2 * j], tags[2 * j], into[2 * j + 1], tags[2 * j + 1] = ptx.ld_word_pair(address)
        for j in cutlass.range_constexpr(2 * quads):
            if tags[j] != sm.tag:
                ready = Int32(0)
        if ready == 0:
            ptx.sleep_ns(sm.batch["poll_ns"])
        polls += 1
        if (polls & (POLLS_BETWEEN_LOOKS - 1)) == 0:
            if give_up(sm, row) != 0:
                ready = Int32(1)


@cute.jit
def poll_columns(sm: Sm, row: Int32, start: Int32, span: Int32, quads: cutlass.Constexpr, into: cute.Tensor):
    """Columns 4(t + j * span) ... of one activation row for each j below `quads`, as bfloat16 pairs, for thread t."""
    ready, polls = Int32(0), Int32(0)
    address = word_address(sm, start + 2 * sm.thread)
    step = Int64(span) * 16
    while ready == 0:
        wrong = Int32(0)
        tags = cute.make_rmem_tensor(2 * quads, Int32)
        for j in cutlass.range_constexpr(quads):
            into[2 * j], tags[2 * j], into[2 * j + 1], tags[2 * j + 1] = ptx.ld_word_pair(address + j * step)
        for j in cutlass.range_constexpr(2 * quads):
            wrong = wrong | (tags[j] ^ sm.tag)
        ready = ptx.select(wrong == 0, Int32(1), Int32(0))
        if ready == 0:
            ptx.sleep_ns(sm.batch["poll_ns"])
        polls += 1
        if (polls & (POLLS_BETWEEN_LOOKS - 1)) == 0:
            if give_up(sm, row) != 0:
                ready = Int32(1)


# The ring: slots of weights in the order of the table. `pos` counts fillings since the start of the launch; filling
# `pos` is in slot `pos % slots`. A slot always belongs to the same two warps, one for each of its two pieces: they see
# each of its fillings in turn, so the parity of its barriers is enough, although copies may land out of order


def slot_index(sm: Sm, pos: Int32) -> Int32:
    return pos & (PAIRS - 1) if sm.shape.slots == PAIRS else pos % sm.shape.slots


def round_of(sm: Sm, pos: Int32) -> Int32:
    """How often the ring went round before."""
    return pos >> PAIRS.bit_length() - 1 if sm.shape.slots == PAIRS else pos // sm.shape.slots


def ring_slot(sm: Sm, pos: Int32) -> Int32:
    return region(sm, "ring") + slot_index(sm, pos) * SLOT_BYTES


def wait_full(sm: Sm, pos: Int32):
    wait_barrier(sm, region(sm, "full") + slot_index(sm, pos) * 8, round_of(sm, pos) & 1)


def wait_empty(sm: Sm, pos: Int32):
    wait_barrier(sm, region(sm, "empty") + slot_index(sm, pos) * 8, (round_of(sm, pos) & 1) ^ 1)


def warp_slot(sm: Sm) -> Int32:
    return sm.warp >> 1


def own_slot(sm: Sm) -> Int32:
    """Address of the slot that belongs to this warp and its neighbour."""
    return region(sm, "ring") + warp_slot(sm) * SLOT_BYTES


def first_piece(sm: Sm, pos: Int32) -> Int32:
    """The first piece of a row that is in this warp's slot, two pieces a slot; so is every `2 * slots`-th behind it."""
    return 2 * first_own(sm, pos) + (sm.warp & 1)


def first_phase(sm: Sm, pos: Int32) -> Int32:
    """Parity of the slot's filling that holds the first piece; the next one has the other."""
    return round_of(sm, pos + first_own(sm, pos)) & 1


def wait_own(sm: Sm, phase: Int32):
    wait_barrier(sm, region(sm, "full") + warp_slot(sm) * 8, phase)


def release_own(sm: Sm):
    """This warp has read all it wants of its slot."""
    ptx.mbarrier_arrive_lane0(region(sm, "empty") + warp_slot(sm) * 8, sm.lane)


@cute.jit
def pass_by(sm: Sm, phase: Int32, piece: Int32, slots: Int32):
    """Gives back what is left of the row's slots: the last one may have no piece for this warp."""
    while piece < 2 * slots:
        wait_own(sm, phase)
        release_own(sm)
        piece, phase = piece + 2 * sm.shape.slots, phase ^ 1


def first_own(sm: Sm, pos: Int32) -> Int32:
    """The first filling from `pos` on that belongs to this warp, counted from there; every `slots`-th after it does."""
    own = warp_slot(sm) - slot_index(sm, pos)
    own = ptx.select(own < 0, own + sm.shape.slots, own)
    return own if sm.shape.slots == PAIRS else ptx.select(warp_slot(sm) < sm.shape.slots, own, Int32(NONE_OWN))


@cute.jit
def wait_barrier(sm: Sm, address: Int32, parity: Int32):
    """Until the phase of `parity` is complete, or the launch gives up: barriers depend on words of other SMs too."""
    done, polls = ptx.mbarrier_try_wait(address, parity), Int32(0)
    while done == 0:
        done = ptx.mbarrier_try_wait(address, parity)
        polls += 1
        if (polls & (POLLS_BETWEEN_LOOKS - 1)) == 0:
            if give_up(sm, Int32(BARRIER_ROW)) != 0:
                done = Int32(1)


def release(sm: Sm, pos: Int32):
    """This warp has read all it wants of the slot."""
    ptx.mbarrier_arrive_lane0(region(sm, "empty") + slot_index(sm, pos) * 8, sm.lane)


# Reductions


@cute.jit
def warp_sum(value: Float32) -> Float32:
    for step in cutlass.range_constexpr(5):
        value = value + ptx.shfl_xor(value, 16 >> step)
    return value


@cute.jit
def warp_sums(values: cute.Tensor, count: cutlass.Constexpr):
    """`warp_sum` of each of `count` numbers, side by side."""
    for step in cutlass.range_constexpr(5):
        for i in cutlass.range_constexpr(count):
            values[i] = values[i] + ptx.shfl_xor(values[i], 16 >> step)


@cute.jit
def warp_max(value: Float32) -> Float32:
    for step in cutlass.range_constexpr(5):
        value = ptx.fmax(value, ptx.shfl_xor(value, 16 >> step))
    return value


@cute.jit
def sum_two(sm: Sm, a: Float32, b: Float32, turn: cutlass.Constexpr):
    """Sums of two numbers over all consumer threads, always in the same order. `turn` alternates two scratch areas."""
    a, b = warp_sum(a), warp_sum(b)
    base = region(sm, "scratch") + turn * 256
    if sm.lane == 0:
        ptx.st_shared_v2_f32(base + sm.warp * 8, a, b)
    sync(sm)
    total_a, total_b = Float32(0.0), Float32(0.0)
    for w in cutlass.range_constexpr(CONSUMER_WARPS // 2):
        a0, b0, a1, b1 = ptx.ld_shared_v4_f32(base + w * 16)
        total_a = total_a + a0 + a1
        total_b = total_b + b0 + b1
    return total_a, total_b


# Functions


def exp(x: Float32) -> Float32:
    return ptx.exp2_approx(x * LOG2E)


def sigmoid(x: Float32) -> Float32:
    return ptx.div_full(Float32(1.0), Float32(1.0) + exp(-x))


def rms_scale(sum_of_squares: Float32, count, eps: Float32) -> Float32:
    return ptx.rsqrt_approx(ptx.div_full(sum_of_squares, Float32(count)) + eps)
