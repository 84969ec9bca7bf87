"""Gate and up projections of the picked routed experts with weights in the activation dtype; before the activation.

    gate_up[r, a] = act(sum_c w13[e, :, c] * x[r, c])                e = topk_ids[r, a]; zeros where e is not in [0, E)

Layout   x [R, Z] act, topk_ids [R, A] int32, any row stride         read
         w13 [E, 2*I, Z] act                                         read, experts picked
         gate_up [R, A, 2*I] act                                     written
Work     `_experts`: a program owns BLOCK_N outputs of up to 8 picks of one expert
Bytes    distinct experts * 2*I * Z*act + R*(Z*act + A*(4 + 2*I*act))
Error    products of bf16 exact, float32 sums, one rounding to act
Source   DESIGN.md section 5
"""

import torch

from kimi_kernels.checks import validate
from triton_ops._experts import ExpertConfig, contract_act, launch_experts, pick_block_n, pick_block_p


def pick_moe_gate_up_config(rows: int, top_k: int, outputs: int, inputs: int, element_bytes: int) -> ExpertConfig:
    # a warp reads a 128-byte line of each row and step; two share a row: 20.7 us, 22.4 with four
    block_c = 128 // element_bytes
    split = 2
    return ExpertConfig(
        block_n=pick_block_n(rows, top_k, outputs, split),
        block_c=block_c,
        split=split,
        stages=3,
        block_p=pick_block_p(rows, top_k),
    )


def moe_gate_up(x: torch.Tensor, topk_ids: torch.Tensor, w13: torch.Tensor) -> torch.Tensor:
    """Returns gate_up [R, A, 2*I], gate outputs first, in the dtype of x. Raises as `checks.validate` does."""
    dims = validate("moe_gate_up", x=x, topk_ids=topk_ids, w13=w13)
    config = pick_moe_gate_up_config(dims["R"], dims["A"], 2 * dims["I"], dims["Z"], x.element_size())
    return _launch(config, x, topk_ids, w13)


def _launch(config: ExpertConfig, x, topk_ids, w13) -> torch.Tensor:
    gate_up = torch.empty(*topk_ids.shape, w13.shape[1], dtype=x.dtype, device=x.device)
    if gate_up.numel():
        launch_experts(config, contract_act, x, topk_ids, (w13,), gate_up)
    return gate_up
