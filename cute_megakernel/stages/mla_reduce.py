"""The parts of long sequences put together, each SM some columns of some heads, for MLA_COMBINE to read: were every SM
to read all parts of its heads, that would take longer than one more hand-over. A batch row of few parts is skipped.
"""

import cutlass.cute as cute
from cutlass import Int32

from cute_megakernel import ptx
from cute_megakernel.core import Fields, Sm, region, sync, word_address
from cute_megakernel.shape import SUM_COLUMNS, KernelShape
from cute_megakernel.stages.mla_cache import Parts, few, sum_parts, summed


def blocks(shape: KernelShape) -> int:
    """Blocks of slices of a head, one for an SM at a time."""
    return -(-shape.kv_lora_rank // (SUM_COLUMNS * shape.sum_slices))


@cute.jit
def mla_reduce(sm: Sm, f: Fields):
    """This SM's tasks: (batch row, head, block of its columns), every `sms`-th."""
    heads, task = sm.shape.mla_heads, sm.block
    while task < sm.shape.rows * heads * blocks(sm.shape):
        item = task // blocks(sm.shape)
        r = item // heads
        parts = Parts(sm, r)
        if few(parts) == 0:
            _reduce(sm, f, r, item - r * heads, task - item * blocks(sm.shape), parts)
        task += sm.shape.sms


@cute.jit
def _reduce(sm: Sm, f: Fields, r: Int32, head: Int32, block: Int32, parts: Parts):
    L, slices = sm.shape.kv_lora_rank, sm.shape.sum_slices
    sum_parts(sm, f, r, head, 1, block * slices, slices, parts, region(sm, "sums"))
    sync(sm)
    pair = block * (slices * SUM_COLUMNS // 2) + sm.thread
    if (sm.thread < slices * SUM_COLUMNS // 2) & (pair < L // 2):
        word = ptx.pack_bf16(*summed(sm, region(sm, "sums"), slices))
        ptx.st_word(word_address(sm, f["o"] + r * f["o_pitch"] + head * (L // 2) + pair), word, sm.tag)
    sync(sm)
