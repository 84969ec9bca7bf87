"""What the KDA rows of one head of one batch row share: its vectors in shared memory, its slot, its item.

causal_conv1d, the gates, kda_recurrent and gated_rms_norm of a head run one after the other on one SM; between them
everything stays in its shared memory (`LOCAL`), in float32. A unit is an item = batch row * heads + head.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_megakernel import ptx
from cute_megakernel.core import Fields, Sm, region, word_address

LOCAL = ("decay", "gate", "q", "k", "v", "log_decay", "o", "dt_bias", "norm")  # head_dim floats each, then two numbers


def local(sm: Sm, name: str) -> Int32:
    return region(sm, "local") + LOCAL.index(name) * sm.shape.kda_head_dim * 4


def number(sm: Sm, index: int) -> Int32:
    """0: beta, raw before kda_gate; 1: A_log."""
    return region(sm, "local") + (len(LOCAL) * sm.shape.kda_head_dim + index) * 4


@cute.jit
def slot_of_row(sm: Sm, f: Fields, r: Int32) -> Int32:
    """Slot of the batch row, -1 where it is padding or points outside the pool."""
    slot = ptx.ld_shared_b32(region(sm, "slots") + r * 8)
    return ptx.select(slot < f["pool_count"], slot, Int32(-1))


def is_new(sm: Sm, r: Int32) -> Int32:
    return ptx.ld_shared_b32(region(sm, "slots") + r * 8 + 4)


def half_of(word: Int32, index: Int32) -> Float32:
    """Column `index` of the pair that holds it."""
    return ptx.select_f32(index % 2 == 0, ptx.low_bf16(word), ptx.high_bf16(word))


@cute.jit
def put(sm: Sm, f: Fields, name: cutlass.Constexpr, pitch: cutlass.Constexpr, r: Int32, column: Int32, value: Float32):
    """Hands a float32 on, where the row asks for it."""
    if f[name] >= 0:
        ptx.st_word(word_address(sm, f[name] + r * f[pitch] + column), ptx.float_bits(value), sm.tag)
