"""kda_gate_bounded and kda_gate_softplus.

    log_decay = bound * sigmoid(rate * (raw + dt))      rate = exp(A_log), at most the largest float32
    log_decay = -rate * softplus(raw + dt)              where bound is 0
    beta      = sigmoid(raw_beta)

Source   DESIGN.md section 5
"""

import cutlass.cute as cute
from cutlass import Float32

from cute_megakernel import ptx
from cute_megakernel.core import exp, sigmoid


def decay_rate(A_log: Float32) -> Float32:
    return ptx.fmin(exp(A_log), Float32(3.4028234663852886e38))


@cute.jit
def log_decays(bound: Float32, rate: Float32, first: Float32, second: Float32):
    """log_decay of two channels from their raw + dt."""
    low, high = Float32(0.0), Float32(0.0)
    if bound == Float32(0.0):
        low, high = Float32(0.0) - rate * softplus(first), Float32(0.0) - rate * softplus(second)
    else:
        low, high = bound * sigmoid(rate * first), bound * sigmoid(rate * second)
    return low, high


@cute.jit
def softplus(x: Float32) -> Float32:
    """log(1 + e^x) as max(x, 0) + log1p(e^-|x|); the logarithm by its series where e^-|x| is small."""
    e = exp(Float32(0.0) - ptx.abs_f32(x))
    u = Float32(1.0) + e
    # log1p(e) = log(u) + (e - (u - 1)) / u: what rounding u lost comes back
    log1p = ptx.log2_approx(u) * Float32(0.6931471805599453) + ptx.div_full(e - (u - Float32(1.0)), u)
    small = e * (Float32(1.0) - e * (Float32(0.5) - e * (Float32(0.33333333) - e * Float32(0.25))))
    log1p = ptx.select_f32(e < Float32(0.03125), small, log1p)
    return ptx.fmax_nan(x, Float32(0.0)) + log1p
