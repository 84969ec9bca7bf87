"""Greedy token of each row and its logit, over this rank's part of the vocabulary; the last op of a decode step.

    index[r]  = the lowest v with logits[r, v] = max_v logits[r]     NaN counts as -inf; a row of NaN gives index 0
    tokens[r] = vocab_start + index[r]
    values[r] = logits[r, index[r]]                                  -inf for a row of NaN

Layout   logits  [R, VOCAB] act, any row stride     read
         tokens  [R] int64                          written
         values  [R] float32                        written
Work     grid (R, blocks), then (R): a program finds the winner of one block, a second launch of the same kernel the
         winner of the blocks; rows of at most one block need one launch
Bytes    R*VOCAB*act + R*12, and R*blocks*24 between the launches
Error    none
Source   DESIGN.md section 5
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kimi_kernels.checks import validate


@dataclass(frozen=True)
class ArgmaxConfig:
    block: int
    num_warps: int


def pick_argmax_config(rows: int, vocab: int) -> ArgmaxConfig:
    # one block of up to 32768 logits is one launch; longer rows spread over the SMs, which pays for the second launch
    block = triton.next_power_of_2(vocab) if vocab <= 32768 else 8192
    # 32 logits a thread
    return ArgmaxConfig(block, num_warps=min(32, max(1, block // 1024)))


@triton.jit(do_not_specialize=["vocab_start"])
def _argmax_kernel(
    logits_ptr,
    block_tokens_ptr,
    tokens_ptr,
    values_ptr,
    vocab_start,
    stride_logits_r,
    VOCAB: tl.constexpr,
    MERGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    pid_b, blocks = tl.program_id(1), tl.num_programs(1)
    offs_v = pid_b * BLOCK + tl.arange(0, BLOCK)
    mask_v = offs_v < VOCAB
    logits = tl.load(logits_ptr + row * stride_logits_r + offs_v, mask=mask_v, other=float("-inf")).to(tl.float32)
    logits = tl.where(logits == logits, logits, float("-inf"))
    value = tl.max(logits, axis=0)
    index = tl.min(tl.where((logits == value) & mask_v, offs_v, VOCAB), axis=0)
    # blocks are in order of their tokens, so the lowest block on ties is the lowest token
    token = tl.load(block_tokens_ptr + row * VOCAB + index) if MERGE else vocab_start + index.to(tl.int64)
    tl.store(tokens_ptr + row * blocks + pid_b, token)
    tl.store(values_ptr + row * blocks + pid_b, value)


def argmax(logits: torch.Tensor, vocab_start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens [R] int64 (global ids) and values [R] float32. Raises ValueError as `checks.validate` does."""
    dims = validate("argmax", logits=logits, vocab_start=vocab_start)
    return _launch(pick_argmax_config(dims["R"], dims["VOCAB"]), logits, vocab_start)


def _launch(config: ArgmaxConfig, logits: torch.Tensor, vocab_start: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, config.block)
    tokens = torch.empty(rows, blocks, dtype=torch.int64, device=logits.device)
    values = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    if rows == 0:
        return tokens[:, 0], values[:, 0]
    _launch_blocks(config, logits, None, tokens, values, vocab_start)
    if blocks > 1:
        merge = ArgmaxConfig(triton.next_power_of_2(blocks), num_warps=1)
        block_values, block_tokens = values, tokens
        tokens, values = block_tokens.new_empty(rows, 1), block_values.new_empty(rows, 1)
        _launch_blocks(merge, block_values, block_tokens, tokens, values, vocab_start)
    return tokens[:, 0], values[:, 0]


def _launch_blocks(config: ArgmaxConfig, logits, block_tokens, tokens, values, vocab_start: int) -> None:
    rows, vocab = logits.shape
    _argmax_kernel[(rows, triton.cdiv(vocab, config.block))](
        logits,
        block_tokens,
        tokens,
        values,
        vocab_start,
        logits.stride(0),
        VOCAB=vocab,
        MERGE=block_tokens is not None,
        BLOCK=config.block,
        num_warps=config.num_warps,
    )
