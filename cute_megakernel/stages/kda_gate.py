"""kda_gate_bounded and kda_gate_softplus of one head, from and to shared memory.

    log_decay = bound * sigmoid(rate * (raw + dt))      rate = exp(A_log), at most the largest float32
    log_decay = -rate * softplus(raw + dt)              where bound is 0
    beta      = sigmoid(raw_beta)

Source   DESIGN.md section 5
"""

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_megakernel import ptx
from cute_megakernel.core import Fields, Sm, exp, float_of, sigmoid
from cute_megakernel.stages.kda_head import local, number, put


@cute.jit
def kda_gate(sm: Sm, f: Fields, item: Int32):
    """log_decay = bound * sigmoid(rate * (raw + dt)), or -rate * softplus(raw + dt) where bound is 0; beta."""
    K, H = sm.shape.kda_head_dim, sm.shape.kda_heads
    r, h = item // H, item % H
    bound = float_of(f, "p0")
    if sm.thread < K:
        rate = ptx.fmin(exp(ptx.ld_shared_f32(number(sm, 1))), Float32(3.4028234663852886e38))
        dt = ptx.ld_shared_f32(local(sm, "dt_bias") + sm.thread * 4)
        raw = ptx.ld_shared_f32(local(sm, "decay") + sm.thread * 4) + dt
        decay = bound * sigmoid(rate * raw)
        if bound == Float32(0.0):
            decay = Float32(0.0) - rate * softplus(raw)
        ptx.st_shared_f32(local(sm, "log_decay") + sm.thread * 4, decay)
        put(sm, f, "dst", "dst_pitch", r, h * K + sm.thread, decay)
    if sm.thread == K:
        beta = sigmoid(ptx.ld_shared_f32(number(sm, 0)))
        ptx.st_shared_f32(number(sm, 0), beta)
        put(sm, f, "tap", "tap_pitch", r, h, beta)


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
