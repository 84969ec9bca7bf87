"""Linear layer for few rows: every projection of the step, and (with a float32 output) the router logits.

    y[r, n] = act(sum_c x[r, c] * weight[n, c])      products exact, summed in fp32, one rounding

Layout   x       [R, C] act, any row stride               read
         weight  [N, C] act, any row stride               read
         y       [R, N] act, or float32 for the router    written
Work     grid (blocks of BLOCK_N outputs, blocks of up to 32 rows). The warps of a program split C: in each step of 32 * WARPS inputs a
         warp multiplies its own 32, and one sum over the warps ends the program. A step is 16 bytes a thread, laid out as the matrix
         unit reads them, so bfloat16 goes from the load to the product without shared memory. The order of the sum depends on
         (N, C) only: a row has the same bits alone and among others
Bytes    N*C*act + R*(C*act + N*y)
Error    one rounding to the dtype of y; C products summed in fp32
Source   k3-decode-spec 2.1
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kimi_kernels.checks import validate

STEP = 32  # inputs that one warp multiplies at once: 4 lanes of 8, two products of 16
MAX_BLOCK_R = 32
MANY = 2**31


@dataclass(frozen=True)
class LinearConfig:
    block_n: int  # outputs of a program: 8, 16, 32 or 64
    num_warps: int  # warps that split C
    unroll: int  # steps of one load: 1, 2, 4 or 8
    num_stages: int  # 1: loads go to registers; s > 1: to shared memory, s - 1 loads ahead


# rows up to, outputs up to -> config, the first match; num_warps depends on the outputs alone (it sets the order of the sum)
CONFIGS = (
    # at most one program an SM: what is in flight must come from loads ahead
    (8, 1024, LinearConfig(8, 16, 1, num_stages=8)),
    # 8 outputs a program fill the SMs several times; with more outputs 16 do, and halve the loads of x
    (8, 4096, LinearConfig(8, 8, 4, num_stages=1)),
    (8, MANY, LinearConfig(16, 8, 4, num_stages=1)),
    (16, 1024, LinearConfig(8, 16, 1, num_stages=5)),
    (16, MANY, LinearConfig(16, 8, 1, num_stages=4)),
    # every program reads all rows: with 17 to 32 of them programs are fewer and wider
    (MANY, 1024, LinearConfig(8, 16, 1, num_stages=4)),
    (MANY, 6143, LinearConfig(32, 8, 1, num_stages=4)),
    (MANY, MANY, LinearConfig(64, 8, 1, num_stages=4)),
)
# the interpreter runs one program after another at a fixed cost: few, large ones
INTERPRETER_CONFIG = LinearConfig(256, 1, 8, num_stages=1)


def pick_linear_config(rows: int, outputs: int, inputs: int, element_bytes: int = 2) -> LinearConfig:
    if triton.knobs.runtime.interpret:
        return INTERPRETER_CONFIG
    config = next(config for r, n, config in CONFIGS if rows <= r and outputs <= n)
    # a short contraction has no more than one step for each of four warps
    warps = 4 if inputs <= 512 else config.num_warps
    unroll = config.unroll
    while unroll > 1 and inputs % (STEP * warps * unroll):
        unroll //= 2  # a mask in the loop costs more than a second turn
    # float32 tiles are twice as large and not for speed: no buffers
    stages = config.num_stages if element_bytes == 2 else 1
    return LinearConfig(config.block_n, warps, unroll, stages)


@triton.jit
def _load_steps(ptrs, offs_c, start, C: tl.constexpr, EVEN_C: tl.constexpr):
    if EVEN_C:
        return tl.load(ptrs + start)
    return tl.load(ptrs + start, mask=offs_c < C - start, other=0.0)


@triton.jit(do_not_specialize=["R"])
def _linear_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    R,
    stride_x_r,
    stride_weight_n,
    stride_y_r,
    N: tl.constexpr,
    C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    UNROLL: tl.constexpr,
    STEP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    BLOCK_C: tl.constexpr = STEP * WARPS * UNROLL
    ROWS_8: tl.constexpr = BLOCK_R // 8
    BLOCK_M: tl.constexpr = min(BLOCK_N, 16)
    TILES: tl.constexpr = BLOCK_N // BLOCK_M
    first_r, first_n = tl.program_id(1).to(tl.int64) * BLOCK_R, tl.program_id(0).to(tl.int64) * BLOCK_N
    # loaded tiles are [8, WARPS, eights of rows or outputs, UNROLL, STEP]: 8 x 4 lanes of a warp, then warps, then registers
    eight = tl.arange(0, 8)[:, None, None, None, None]
    offs_c = (
        tl.arange(0, UNROLL)[None, None, None, :, None] * (STEP * WARPS)
        + tl.arange(0, WARPS)[None, :, None, None, None] * STEP
        + tl.arange(0, STEP)[None, None, None, None, :]
    )
    # rows and outputs past the end are those of the last one: no mask in the loop, and no lane reads what is not there
    offs_r = tl.minimum(first_r + eight + 8 * tl.arange(0, ROWS_8)[None, None, :, None, None], R - 1)
    offs_n = tl.minimum(first_n + eight + 8 * tl.arange(0, BLOCK_N // 8)[None, None, :, None, None], N - 1)
    x_ptrs = x_ptr + offs_r * stride_x_r + offs_c
    weight_ptrs = weight_ptr + offs_n * stride_weight_n + offs_c

    acc = tl.zeros((TILES * WARPS, BLOCK_M, BLOCK_R), tl.float32)
    for start in tl.range(0, C, BLOCK_C):
        weight = _load_steps(weight_ptrs, offs_c, start, C, C % BLOCK_C == 0)
        x = _load_steps(x_ptrs, offs_c, start, C, C % BLOCK_C == 0)
        if UPCAST:
            weight, x = weight.to(tl.float32), x.to(tl.float32)
        # a lane holds 8 neighbours of C where the matrix unit wants 4 pairs 8 apart: the order of a sum is free, so the dims of
        # STEP = 4 lanes x 2 products x 2 halves x 2 are only renamed, alike for weight and x
        weight = weight.reshape(8, WARPS, TILES, BLOCK_M // 8, UNROLL, 4, 2, 2, 2).permute(2, 1, 3, 0, 4, 6, 7, 5, 8)
        weight = weight.reshape(TILES * WARPS, BLOCK_M, UNROLL * STEP)
        x = x.reshape(8, WARPS, ROWS_8, UNROLL, 4, 2, 2, 2).permute(1, 3, 5, 6, 4, 7, 2, 0)
        x = x.reshape(1, WARPS, UNROLL * STEP, BLOCK_R)
        x = tl.broadcast_to(x, (TILES, WARPS, UNROLL * STEP, BLOCK_R)).reshape(TILES * WARPS, UNROLL * STEP, BLOCK_R)
        acc = tl.dot(weight, x, acc, input_precision="ieee")

    y = tl.sum(acc.reshape(TILES, WARPS, BLOCK_M, BLOCK_R), axis=1)
    offs_n = first_n + tl.arange(0, TILES)[:, None, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :, None]
    offs_r = first_r + tl.arange(0, BLOCK_R)[None, None, :]
    tl.store(y_ptr + offs_r * stride_y_r + offs_n, y, mask=(offs_r < R) & (offs_n < N))


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns y [R, N] in the dtype of `x`. Raises ValueError as `checks.validate` does."""
    dims = validate("linear", x=x, weight=weight)
    y = torch.empty(dims["R"], dims["N"], dtype=x.dtype, device=x.device)
    return launch_linear(x, weight, y, pick_linear_config(dims["R"], dims["N"], dims["C"], x.element_size()))


def launch_linear(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, config: LinearConfig) -> torch.Tensor:
    """Writes weight . x into `y` [R, N] (its dtype decides the rounding) and returns it."""
    rows, (outputs, inputs) = x.shape[0], weight.shape
    if rows == 0:
        return y
    block_r = max(8, min(MAX_BLOCK_R, triton.next_power_of_2(rows)))
    _linear_kernel[(triton.cdiv(outputs, config.block_n), triton.cdiv(rows, block_r))](
        x,
        weight,
        y,
        rows,
        x.stride(0),
        weight.stride(0),
        y.stride(0),
        N=outputs,
        C=inputs,
        BLOCK_R=block_r,
        BLOCK_N=config.block_n,
        WARPS=config.num_warps,
        UNROLL=config.unroll,
        STEP=STEP,
        # the interpreter multiplies bfloat16 bit patterns; products of bfloat16 are exact in float32, so nothing else changes
        UPCAST=triton.knobs.runtime.interpret,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return y
