"""Linear layer for few rows: every projection of the step, and (with a float32 output) the router logits.

    y[r, n] = act(sum_c x[r, c] * weight[n, c])      products exact, summed in fp32, one rounding

Layout   x       [R, C] act, any row stride               read
         weight  [N, C] act, any row stride               read
         y       [R, N] act, or float32 for the router    written
Work     one row: grid (blocks of outputs, rows); a program multiplies BLOCK_C inputs at a time in registers and adds
the
         lanes once, at the end. More rows: grid (blocks of outputs, blocks of 16 or 32 rows); weights are the large
         side of a matrix product, their tiles loaded NUM_STAGES - 1 ahead into shared memory
Bytes    N*C*act + R*(C*act + N*y)
Error    one rounding to the dtype of y; C products summed in fp32
Source   DESIGN.md section 5
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kimi_kernels.checks import validate


@dataclass(frozen=True)
class OneRowConfig:
    block_n: int  # outputs of a program
    block_c: int  # inputs multiplied at once
    num_warps: int
    unroll: int  # steps of BLOCK_C whose loads are in flight together


@dataclass(frozen=True)
class RowsConfig:
    block_n: int
    block_c: int
    num_warps: int
    num_stages: int


# The first match of: inputs up to, outputs up to. Swept on one H200 over the shapes of K3 TP8 (MEASURED.md, linear).
# One row: a load of 16 bytes a lane, one output a program; two warps where the row is long enough to share.
ONE_ROW = (
    (256, 2**31, OneRowConfig(8, 128, 1, 2)),
    (1024, 2**31, OneRowConfig(2, 512, 1, 2)),
    (4096, 2**31, OneRowConfig(1, 512, 1, 2)),
    (2**31, 2**31, OneRowConfig(1, 1024, 2, 2)),
)
# Rows: 64 outputs are a wgmma tile; fewer outputs a program where 64 would leave SMs without one.
ROWS = (
    (256, 2**31, RowsConfig(64, 128, 4, 3)),
    (2**31, 2048, RowsConfig(16, 512, 4, 4)),
    (4096, 6143, RowsConfig(32, 256, 2, 5)),
    (2**31, 6143, RowsConfig(32, 512, 4, 4)),
    (2**31, 2**31, RowsConfig(64, 128, 4, 6)),
)
# the interpreter runs one program after another at a fixed cost: few, large ones
INTERPRETER_ONE_ROW = OneRowConfig(128, 64, 1, 1)
INTERPRETER_ROWS = RowsConfig(512, 256, 1, 1)


def pick_linear_config(rows: int, outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16):
    """float32 is not for speed: each row by itself, without the matrix unit, whose float32 is too coarse or too
    slow."""
    table = ONE_ROW if rows == 1 or dtype == torch.float32 else ROWS
    return next(config for c, n, config in table if inputs <= c and outputs <= n)


@triton.jit
def _load_inputs(ptrs, offs_c, start, C: tl.constexpr, EVEN_C: tl.constexpr, EVICT: tl.constexpr):
    if EVEN_C:
        return tl.load(ptrs + start, eviction_policy=EVICT)
    return tl.load(ptrs + start, mask=offs_c < C - start, other=0.0, eviction_policy=EVICT)


@triton.jit
def _one_row_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    stride_x_r,
    stride_weight_n,
    stride_y_r,
    N: tl.constexpr,
    C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    UNROLL: tl.constexpr,
):
    EVEN_C: tl.constexpr = C % BLOCK_C == 0
    pid_r = tl.program_id(1).to(tl.int64)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_c = tl.arange(0, BLOCK_C)[None, :]
    # outputs past the end are those of the last one: no mask over weights in the loop
    weight_ptrs = weight_ptr + tl.minimum(offs_n, N - 1).to(tl.int64)[:, None] * stride_weight_n + offs_c
    x_ptrs = x_ptr + pid_r * stride_x_r + offs_c
    acc = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    for start in tl.range(0, C, BLOCK_C, loop_unroll_factor=UNROLL):
        weight = _load_inputs(weight_ptrs, offs_c, start, C, EVEN_C, "evict_first")
        x = _load_inputs(x_ptrs, offs_c, start, C, EVEN_C, "")
        acc += weight.to(tl.float32) * x.to(tl.float32)
    y = tl.sum(acc, axis=1)
    tl.store(y_ptr + pid_r * stride_y_r + offs_n, y.to(y_ptr.dtype.element_ty), mask=offs_n < N)


@triton.jit(do_not_specialize=["R"])
def _rows_kernel(
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
    BLOCK_C: tl.constexpr,
    UPCAST: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    EVEN_C: tl.constexpr = C % BLOCK_C == 0
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_c = tl.arange(0, BLOCK_C)
    # outputs and rows past the end are those of the last one: no mask in the loop, no lane reads what is not there
    weight_ptrs = weight_ptr + tl.minimum(offs_n, N - 1).to(tl.int64)[:, None] * stride_weight_n + offs_c[None, :]
    x_ptrs = x_ptr + tl.minimum(offs_r, R - 1).to(tl.int64)[None, :] * stride_x_r + offs_c[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    for start in tl.range(0, C, BLOCK_C, num_stages=NUM_STAGES):
        weight = _load_inputs(weight_ptrs, offs_c[None, :], start, C, EVEN_C, "")
        x = _load_inputs(x_ptrs, offs_c[:, None], start, C, EVEN_C, "")
        if UPCAST:
            weight, x = weight.to(tl.float32), x.to(tl.float32)
        acc = tl.dot(weight, x, acc, input_precision="ieee")
    y_ptrs = y_ptr + offs_r.to(tl.int64)[None, :] * stride_y_r + offs_n[:, None]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=(offs_r[None, :] < R) & (offs_n[:, None] < N))


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns y [R, N] in the dtype of `x`, its rows on 32-byte bounds. Raises ValueError as `checks.validate` does."""
    dims = validate("linear", x=x, weight=weight)
    # rows on 32-byte bounds: slices of a stacked projection stay readable in 16 bytes when N is not a multiple of 16
    y = torch.empty(dims["R"], triton.cdiv(dims["N"], 16) * 16, dtype=x.dtype, device=x.device)[:, : dims["N"]]
    return run_linear(x, weight, y)


def run_linear(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Writes weight . x into `y` [R, N], rounded to the dtype of `y`, and returns it."""
    config = pick_linear_config(x.shape[0], *weight.shape, x.dtype)
    if triton.knobs.runtime.interpret:
        config = INTERPRETER_ONE_ROW if isinstance(config, OneRowConfig) else INTERPRETER_ROWS
    return launch_linear(x, weight, y, config)


def launch_linear(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, config) -> torch.Tensor:
    """`run_linear` with an explicit OneRowConfig or RowsConfig: for sweeps and tests."""
    rows, (outputs, inputs) = x.shape[0], weight.shape
    if rows == 0:
        return y
    blocks = triton.cdiv(outputs, config.block_n)
    strides = (x.stride(0), weight.stride(0), y.stride(0))
    dims = dict(N=outputs, C=inputs, BLOCK_N=config.block_n, BLOCK_C=config.block_c, num_warps=config.num_warps)
    if isinstance(config, OneRowConfig):
        _one_row_kernel[(blocks, rows)](x, weight, y, *strides, **dims, UNROLL=config.unroll)
        return y
    block_r = 16 if rows <= 16 else 32
    _rows_kernel[(blocks, triton.cdiv(rows, block_r))](
        x,
        weight,
        y,
        rows,
        *strides,
        **dims,
        BLOCK_R=block_r,
        # the interpreter multiplies bfloat16 bit patterns; in float32 the products are exact, as on the device
        UPCAST=triton.knobs.runtime.interpret,
        NUM_STAGES=config.num_stages,
        num_stages=config.num_stages,
    )
    return y
