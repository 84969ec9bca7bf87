"""Short causal convolution with SiLU over q | k | v and the shift of its window; first op after a KDA projection.

    y[c] = sum_i weight[c, i] * input[i, c]      input = the W-1 cached rows, oldest first, then the new row; fp32
    z[c] = y[c] * sigmoid(y[c])                  fp32, not rounded
    conv_window <- the last W-1 raw inputs, bit for bit

Layout   x            [R, CH] act, any row stride              read
         weight       [CH, W] float32, tap W-1 is the newest   read
         conv_window  [SLOTS, W-1, CH] act, index 0 oldest     read and written, rows `slots`
         slots, is_new [B] int32, bool                         read
         z            [R, CH] float32                          written
Work     grid (channel blocks, B); a program owns its channels of one sequence and keeps taps and window in registers
         over the T rows, so no other program reads what it shifts
Bytes    R*CH*(act + 4) + 2*B*(W-1)*CH*act + CH*W*4
Error    exp of the sigmoid and its division, float32 sums; no output rounding
Source   DESIGN.md section 5; layout as in sgl-project/sglang srt/configs/mamba_utils.py
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kimi_kernels.checks import validate


@dataclass(frozen=True)
class CausalConv1dConfig:
    block_ch: int
    num_warps: int


def pick_causal_conv1d_config() -> CausalConv1dConfig:
    # one channel a lane: its W taps are neighbours, so a warp reads each line of the weights W times and no more
    # 128 channels of 32 ... 512: fastest or within 1 % in `bench` at 1, 8, 32 sequences (MEASURED.md, causal_conv1d)
    return CausalConv1dConfig(128, 4)


@triton.jit(
    do_not_specialize=["SLOTS", "first_valid_slot", "stride_slots", "stride_new"],
    do_not_specialize_on_alignment=["slots_ptr", "is_new_ptr"],
)
def _causal_conv1d_kernel(
    x_ptr,
    weight_ptr,
    window_ptr,
    slots_ptr,
    is_new_ptr,
    z_ptr,
    T,
    SLOTS,
    first_valid_slot,
    stride_x_r,
    stride_weight_c,
    stride_window_s,
    stride_window_w,
    stride_slots,
    stride_new,
    CH: tl.constexpr,
    W: tl.constexpr,
    BLOCK_CH: tl.constexpr,
):
    pid_b = tl.program_id(1)
    offs_c = tl.program_id(0) * BLOCK_CH + tl.arange(0, BLOCK_CH)
    mask_c = offs_c < CH
    slot = tl.load(slots_ptr + pid_b * stride_slots)
    is_new = tl.load(is_new_ptr + pid_b * stride_new)
    live = (slot >= first_valid_slot) & (slot < SLOTS)  # an id past the pool must not write behind it
    taps = ()
    for i in tl.static_range(W):
        taps += (tl.load(weight_ptr + offs_c * stride_weight_c + i, mask=mask_c, other=0.0),)
    window_ptrs = window_ptr + slot.to(tl.int64) * stride_window_s + offs_c
    old = mask_c & live & (is_new == 0)
    history = ()  # W-1 raw rows, oldest first
    for i in tl.static_range(W - 1):
        history += (tl.load(window_ptrs + i * stride_window_w, mask=old, other=0.0),)
    for t in range(T):
        row = pid_b * T + t
        x = tl.load(x_ptr + row * stride_x_r + offs_c, mask=mask_c, other=0.0)
        y = taps[W - 1] * x.to(tl.float32)
        for i in tl.static_range(W - 1):
            y += taps[i] * history[i].to(tl.float32)
        z = tl.where(live, y * tl.sigmoid(y), 0.0)
        tl.store(z_ptr + row * CH + offs_c, z, mask=mask_c)
        history = history[1:] + (x,)
    for i in tl.static_range(W - 1):
        tl.store(window_ptrs + i * stride_window_w, history[i], mask=mask_c & live)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_window: torch.Tensor,
    slots: torch.Tensor,
    is_new: torch.Tensor,
    first_valid_slot: int,
) -> torch.Tensor:
    """Returns z [R, CH] float32 and shifts `conv_window[slots]` in place.

    Rows of slots below `first_valid_slot` are zero. `is_new[b]` starts from a zero window, whatever the slot holds.
    Raises ValueError as `checks.validate` does.
    """
    validate(
        "causal_conv1d",
        x=x,
        weight=weight,
        conv_window=conv_window,
        slots=slots,
        is_new=is_new,
        first_valid_slot=first_valid_slot,
    )
    config = pick_causal_conv1d_config()
    return _launch(config, x, weight, conv_window, slots, is_new, first_valid_slot)


def _launch(config, x, weight, conv_window, slots, is_new, first_valid_slot) -> torch.Tensor:
    (rows, channels), batch = x.shape, slots.shape[0]
    z = torch.empty(rows, channels, dtype=torch.float32, device=x.device)
    if rows == 0:
        return z
    _causal_conv1d_kernel[(triton.cdiv(channels, config.block_ch), batch)](
        x,
        weight,
        conv_window,
        slots,
        is_new,
        z,
        rows // batch,
        conv_window.shape[0],
        first_valid_slot,
        x.stride(0),
        weight.stride(0),
        conv_window.stride(0),
        conv_window.stride(1),
        slots.stride(0),
        is_new.stride(0),
        CH=channels,
        W=weight.shape[1],
        BLOCK_CH=config.block_ch,
        num_warps=config.num_warps,
    )
    return z
