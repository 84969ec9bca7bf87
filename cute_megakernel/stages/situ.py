"""situ on bfloat16 pairs: behind a gate-up projection, in the registers of the thread that made its sums.

    beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta)

Source   DESIGN.md section 5; `triton_ops/situ.py` explains the tanh
"""

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_megakernel import ptx
from cute_megakernel.core import exp, sigmoid


@cute.jit
def tanh(x: Float32) -> Float32:
    """A minimax polynomial near zero, 1 - 2 / (exp(2|x|) + 1) elsewhere; neither cancels nor overflows."""
    square = x * x
    series = Float32(-0.33333143592) + square * (
        Float32(0.13325878978) + square * (Float32(-0.05304548517) + square * Float32(0.01724146865))
    )
    near = x + x * square * series
    size = ptx.abs_f32(x)
    tail = Float32(1.0) - ptx.div_full(Float32(2.0), exp(size * Float32(2.0)) + Float32(1.0))
    far = ptx.copysign(tail, x)
    return ptx.select_f32(size < Float32(0.5), near, far)


@cute.jit
def situ(gate: Int32, up: Int32, beta: Float32, linear_beta: Float32) -> Int32:
    """Two outputs of two gates and two ups."""
    return ptx.pack_bf16(
        _situ(ptx.low_bf16(gate), ptx.low_bf16(up), beta, linear_beta),
        _situ(ptx.high_bf16(gate), ptx.high_bf16(up), beta, linear_beta),
    )


@cute.jit
def _situ(gate: Float32, up: Float32, beta: Float32, linear_beta: Float32) -> Float32:
    gated = beta * tanh(ptx.div_full(gate, beta)) * sigmoid(gate)
    return gated * (linear_beta * tanh(ptx.div_full(up, linear_beta)))
