"""output_gate on a bfloat16 pair: o * sigmoid(gate), behind mla_expand_value.

Source   DESIGN.md section 5
"""

import cutlass.cute as cute
from cutlass import Int32

from cute_megakernel import ptx
from cute_megakernel.core import sigmoid


@cute.jit
def output_gate(o: Int32, gate: Int32) -> Int32:
    return ptx.pack_bf16(ptx.low_bf16(o) * sigmoid(ptx.low_bf16(gate)), ptx.high_bf16(o) * sigmoid(ptx.high_bf16(gate)))
