"""Down projections of the picked routed experts with weights in the activation dtype, weighted and summed per row.

    partial[r, a] = sum_c w2[e, :, c] * m[r, a, c]                   e = topk_ids[r, a]; zeros where e is not in [0, E)
    y[r]          = act(sum_a topk_weights[r, a] * partial[r, a])    float32, in the order of a

Layout   m [R, A, I] act, topk_ids [R, A] int32, topk_weights [R, A] float32, any strides but the last     read
         w2 [E, Z, I] act                                            read, experts picked
         partial [R, A, Z] float32                                   written and read again
         y [R, Z] act                                                written
Work     `_experts`: a program owns BLOCK_N outputs of up to 8 picks of one expert; a second kernel adds the partials
Bytes    distinct experts * Z * I*act + R*(A*(I*act + 8 + 2*Z*4) + Z*act)
Error    products of bf16 exact, float32 sums, one rounding to act
Source   DESIGN.md section 5
"""

import torch

from kimi_kernels.checks import validate
from triton_ops._experts import ExpertConfig, contract_act, launch_combine, launch_experts, pick_block_n, pick_block_p


def pick_moe_down_config(rows: int, top_k: int, outputs: int, inputs: int, element_bytes: int) -> ExpertConfig:
    # a warp reads a 128-byte line of each row and step; two share a row: 14.2 us, 17.6 with four
    block_c = 128 // element_bytes
    split = 2
    return ExpertConfig(
        block_n=pick_block_n(rows, top_k, outputs, split),
        block_c=block_c,
        split=split,
        stages=3,
        block_p=pick_block_p(rows, top_k),
    )


def moe_down(m: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """Returns y [R, Z] in the dtype of m. Raises as `checks.validate` does."""
    dims = validate("moe_down", m=m, topk_ids=topk_ids, topk_weights=topk_weights, w2=w2)
    config = pick_moe_down_config(dims["R"], dims["A"], dims["Z"], dims["I"], m.element_size())
    return _launch(config, m, topk_ids, topk_weights, w2)


def _launch(config: ExpertConfig, m, topk_ids, topk_weights, w2) -> torch.Tensor:
    y = torch.empty(m.shape[0], w2.shape[1], dtype=m.dtype, device=m.device)
    if y.numel():
        partial = torch.empty(*topk_ids.shape, y.shape[1], dtype=torch.float32, device=m.device)
        launch_experts(config, contract_act, m, topk_ids, (w2,), partial)
        launch_combine(partial, topk_ids, topk_weights, w2.shape[0], y)
    return y
