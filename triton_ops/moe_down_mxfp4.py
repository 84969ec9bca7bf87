"""Down projections of the picked routed experts with MXFP4 weights, weighted and summed per row; after the activation.

    partial[r, a] = sum_c W[e, :, c] * m[r, a, c]                    e = topk_ids[r, a]; zeros where e is not in [0, E)
    y[r]          = act(sum_a topk_weights[r, a] * partial[r, a])    float32, in the order of a
    W[e, n, c]    = E2M1[code[e, n, c]] * 2^(w2_scale[e, n, c // 32] - 127)           low nibble: even column

Layout   m [R, A, I] act, topk_ids [R, A] int32, topk_weights [R, A] float32, any strides but the last     read
         w2_packed [E, Z, I/2] uint8, w2_scale [E, Z, I/32] uint8                   read, experts picked
         partial [R, A, Z] float32                                                  written and read again
         y [R, Z] act                                                               written
Work     `_experts`: a program owns BLOCK_N outputs of up to 8 picks of one expert; a second kernel adds the partials
Bytes    distinct experts * Z * I * 17/32 + R*(A*(I*act + 8 + 2*Z*4) + Z*act)
Error    products exact, float32 sums, one rounding to act
Source   DESIGN.md section 5; OCP Microscaling Formats 1.0
"""

import torch

from kimi_kernels.checks import validate
from triton_ops._experts import ExpertConfig, launch_combine, launch_experts, pick_block_n, pick_block_p
from triton_ops._mxfp4 import as_words, contract_mxfp4


def pick_moe_down_mxfp4_config(rows: int, top_k: int, outputs: int, inputs: int, element_bytes: int) -> ExpertConfig:
    # a shard has 384, 192 or 96 inputs: one warp takes them all. Steps of 64 inputs are wrong on the device: Triton 3.6
    # loses scale bytes when it moves a tile of two a row between layouts (MEASURED.md, experts)
    return ExpertConfig(
        block_n=pick_block_n(rows, top_k, outputs, split=1),
        block_c=128,
        split=1,
        stages=3,
        block_p=pick_block_p(rows, top_k),
    )


def moe_down_mxfp4(
    m: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w2_packed: torch.Tensor,
    w2_scale: torch.Tensor,
) -> torch.Tensor:
    """Returns y [R, Z] in the dtype of m. Raises as `checks.validate` does."""
    dims = validate(
        "moe_down_mxfp4",
        m=m,
        topk_ids=topk_ids,
        topk_weights=topk_weights,
        w2_packed=w2_packed,
        w2_scale=w2_scale,
    )
    config = pick_moe_down_mxfp4_config(dims["R"], dims["A"], dims["Z"], dims["I"], m.element_size())
    return _launch(config, m, topk_ids, topk_weights, w2_packed, w2_scale)


def _launch(config: ExpertConfig, m, topk_ids, topk_weights, w2_packed, w2_scale) -> torch.Tensor:
    y = torch.empty(m.shape[0], w2_packed.shape[1], dtype=m.dtype, device=m.device)
    if y.numel():
        partial = torch.empty(*topk_ids.shape, y.shape[1], dtype=torch.float32, device=m.device)
        weights = (as_words("moe_down_mxfp4", "w2_packed", w2_packed), w2_scale)
        launch_experts(config, contract_mxfp4, m, topk_ids, weights, partial)
        launch_combine(partial, topk_ids, topk_weights, w2_packed.shape[0], y)
    return y
