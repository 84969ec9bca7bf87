"""Rows of the embedding table for this step's tokens; the first op of a decode step.

    x[r] = weight[tokens[r]]      bit for bit; a token outside [0, VOCAB) gives a zero row

Layout   tokens  [R] int32 or int64, any stride          read
         weight  [VOCAB, D] act, any row stride          read, rows `tokens`
         x       [R, D] act                              written
Work     grid (R, column blocks); a program copies one block of one row
Bytes    2*R*D*act + R*tokens
Error    none
Source   DESIGN.md section 5: no scaling, the table is replicated on every rank
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kimi_kernels.checks import validate


@dataclass(frozen=True)
class EmbeddingConfig:
    block_d: int
    num_warps: int


def pick_embedding_config(width: int) -> EmbeddingConfig:
    # 16 bytes of bfloat16 a thread: one load each, as many programs as that allows
    return EmbeddingConfig(min(1024, triton.next_power_of_2(width)), 4)


@triton.jit(do_not_specialize=["stride_tokens"], do_not_specialize_on_alignment=["tokens_ptr"])
def _embedding_kernel(
    tokens_ptr,
    weight_ptr,
    x_ptr,
    stride_tokens,
    stride_weight_v,
    VOCAB: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    token = tl.load(tokens_ptr + row * stride_tokens).to(tl.int64)
    inside = (token >= 0) & (token < VOCAB)
    x = tl.load(weight_ptr + token * stride_weight_v + offs_d, mask=mask_d & inside, other=0.0)
    tl.store(x_ptr + row * D + offs_d, x, mask=mask_d)


def embedding(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns x [R, D] in the dtype of `weight`. Raises ValueError as `checks.validate` does."""
    dims = validate("embedding", tokens=tokens, weight=weight)
    return _launch(pick_embedding_config(dims["D"]), tokens, weight)


def _launch(config: EmbeddingConfig, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows, (vocab, width) = tokens.shape[0], weight.shape
    x = torch.empty(rows, width, dtype=weight.dtype, device=weight.device)
    if rows == 0:
        return x
    _embedding_kernel[(rows, triton.cdiv(width, config.block_d))](
        tokens,
        weight,
        x,
        tokens.stride(0),
        weight.stride(0),
        VOCAB=vocab,
        D=width,
        BLOCK_D=config.block_d,
        num_warps=config.num_warps,
    )
    return x
