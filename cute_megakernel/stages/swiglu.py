"""swiglu on bfloat16 pairs: behind a gate-up projection, in the registers of the thread that made its sums.

    gate * sigmoid(gate) * up

Source   DESIGN.md section 5
"""

import cutlass.cute as cute
from cutlass import Int32

from cute_megakernel import ptx
from cute_megakernel.core import sigmoid


@cute.jit
def swiglu(gate: Int32, up: Int32) -> Int32:
    g0, g1 = ptx.low_bf16(gate), ptx.high_bf16(gate)
    return ptx.pack_bf16(
        g0 * sigmoid(g0) * ptx.low_bf16(up),
        g1 * sigmoid(g1) * ptx.high_bf16(up),
    )
