"""residual_add, once or twice, behind the projection that makes an operand: y = bf16(bf16(out + add1) + add2).

The other operands are asked for before the products, so that their way from memory is over when the sums are there.

Source   DESIGN.md section 5
"""

import cutlass.cute as cute
from cutlass import Int32

from cute_megakernel import ptx
from cute_megakernel.core import Fields, Sm, poll_pair, word_address


@cute.jit
def ask_addends(sm: Sm, f: Fields, mine, at: Int32):
    """Words of four columns, `at` words behind the first, of either operand: (payload, tag, payload, tag) twice."""
    one = (Int32(0), Int32(0), Int32(0), Int32(0))
    two = (Int32(0), Int32(0), Int32(0), Int32(0))
    if mine & (f["add1"] >= 0):
        one = ptx.ld_word_pair(word_address(sm, f["add1"] + at))
        if f["add2"] >= 0:
            two = ptx.ld_word_pair(word_address(sm, f["add2"] + at))
    return one, two


@cute.jit
def residual_add(sm: Sm, f: Fields, low: Int32, high: Int32, asked: tuple, at: Int32):
    """The sums of four outputs; `asked` as `ask_addends` found them, asked for again where they were not there yet."""
    if f["add1"] >= 0:
        low, high = _add(sm, f, low, high, asked[0], f["add1"] + at)
        if f["add2"] >= 0:
            if f["inner"] >= 0:
                ptx.st_word_pair(word_address(sm, f["inner"] + at), low, high, sm.tag)
            low, high = _add(sm, f, low, high, asked[1], f["add2"] + at)
    return low, high


@cute.jit
def _add(sm: Sm, f: Fields, low: Int32, high: Int32, words: tuple, index: Int32):
    first, tag1, second, tag2 = words
    if (tag1 != sm.tag) | (tag2 != sm.tag):
        first, second = poll_pair(sm, f.number, index, sm.tag)
    return ptx.add_bf16x2(low, first), ptx.add_bf16x2(high, second)
