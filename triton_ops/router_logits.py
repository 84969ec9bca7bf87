"""Router logits of the experts, from the full hidden state: `linear` with a float32 output.

    logits[r, e] = sum_d x[r, d] * weight[e, d]      products exact, summed in fp32, not rounded

Layout   x       [R, D] act, any row stride     read
         weight  [E, D] act, any row stride     read
         logits  [R, E] float32                 written
Work     the kernel of `linear`; the dtype of the output is that of its pointer
Bytes    E*D*act + R*(D*act + E*4)
Error    D products summed in fp32
Source   DESIGN.md section 5: bfloat16 logits flip picks, the sum must stay in float32
"""

import torch

from kimi_kernels.checks import validate
from triton_ops.linear import run_linear


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns logits [R, E] float32. Raises ValueError as `checks.validate` does."""
    dims = validate("router_logits", x=x, weight=weight)
    logits = torch.empty(dims["R"], dims["E"], dtype=torch.float32, device=x.device)
    return run_linear(x, weight, logits)
