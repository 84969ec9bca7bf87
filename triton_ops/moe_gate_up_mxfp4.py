"""Gate and up projections of the picked routed experts with MXFP4 weights, from the latent; before the activation.

    gate_up[r, a] = act(sum_c W[e, :, c] * x[r, c])                  e = topk_ids[r, a]; zeros where e is not in [0, E)
    W[e, n, c]    = E2M1[code[e, n, c]] * 2^(w13_scale[e, n, c // 32] - 127)          low nibble: even column

Layout   x [R, Z] act, topk_ids [R, A] int32, any row stride                        read
         w13_packed [E, 2*I, Z/2] uint8, w13_scale [E, 2*I, Z/32] uint8             read, experts picked
         gate_up [R, A, 2*I] act                                                    written
Work     `_experts`: a program owns BLOCK_N outputs of up to 8 picks of one expert; `_mxfp4` decodes in registers
Bytes    distinct experts * 2*I * Z * 17/32 + R*(Z*act + A*(4 + 2*I*act))
Error    products exact, float32 sums, one rounding to act
Source   DESIGN.md section 5; OCP Microscaling Formats 1.0
"""

import torch

from kimi_kernels.checks import validate
from triton_ops._experts import ExpertConfig, launch_experts, pick_block_n, pick_block_p
from triton_ops._mxfp4 import as_words, contract_mxfp4


def pick_moe_gate_up_mxfp4_config(rows: int, top_k: int, outputs: int, inputs: int, element_bytes: int) -> ExpertConfig:
    # 64 bytes of a row are 128 inputs of a warp; two share a row: four lose a fifth from 8 rows up
    split = 2
    return ExpertConfig(
        block_n=pick_block_n(rows, top_k, outputs, split, warps_per_sm=4),
        block_c=256 // element_bytes,
        split=split,
        stages=3,
        block_p=pick_block_p(rows, top_k),
    )


def moe_gate_up_mxfp4(
    x: torch.Tensor, topk_ids: torch.Tensor, w13_packed: torch.Tensor, w13_scale: torch.Tensor
) -> torch.Tensor:
    """Returns gate_up [R, A, 2*I], gate outputs first, in the dtype of x. Raises as `checks.validate` does."""
    dims = validate("moe_gate_up_mxfp4", x=x, topk_ids=topk_ids, w13_packed=w13_packed, w13_scale=w13_scale)
    config = pick_moe_gate_up_mxfp4_config(dims["R"], dims["A"], 2 * dims["I"], dims["Z"], x.element_size())
    return _launch(config, x, topk_ids, w13_packed, w13_scale)


def _launch(config: ExpertConfig, x, topk_ids, w13_packed, w13_scale) -> torch.Tensor:
    gate_up = torch.empty(*topk_ids.shape, w13_packed.shape[1], dtype=x.dtype, device=x.device)
    if gate_up.numel():
        weights = (as_words("moe_gate_up_mxfp4", "w13_packed", w13_packed), w13_scale)
        launch_experts(config, contract_mxfp4, x, topk_ids, weights, gate_up)
    return gate_up
