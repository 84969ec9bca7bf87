"""One Triton kernel per op of `kimi_kernels.op_specs.OPS`, in the order of the decode step. Importing needs no GPU.

Every op allocates its outputs, changes only the arguments that the table calls `inplace`, and never waits for the
device.
"""

# ruff: noqa: I001
from triton_ops.embedding import embedding
from triton_ops.attn_res_norm import attn_res_norm
from triton_ops.rms_norm import rms_norm
from triton_ops.linear import linear
from triton_ops.causal_conv1d import causal_conv1d
from triton_ops.kda_gate_bounded import kda_gate_bounded
from triton_ops.kda_gate_softplus import kda_gate_softplus
from triton_ops.kda_recurrent import kda_recurrent
from triton_ops.gated_rms_norm import gated_rms_norm
from triton_ops.mla_kv_append import mla_kv_append
from triton_ops.mla_absorb_query import mla_absorb_query
from triton_ops.mla_decode import mla_decode
from triton_ops.mla_expand_value import mla_expand_value
from triton_ops.output_gate import output_gate
from triton_ops.residual_add import residual_add
from triton_ops.situ import situ
from triton_ops.swiglu import swiglu
from triton_ops.router_logits import router_logits
from triton_ops.moe_router import moe_router
from triton_ops.moe_gate_up import moe_gate_up
from triton_ops.moe_gate_up_mxfp4 import moe_gate_up_mxfp4
from triton_ops.moe_down import moe_down
from triton_ops.moe_down_mxfp4 import moe_down_mxfp4
from triton_ops.argmax import argmax

__all__ = [  # noqa: RUF022
    "embedding",
    "attn_res_norm",
    "rms_norm",
    "linear",
    "causal_conv1d",
    "kda_gate_bounded",
    "kda_gate_softplus",
    "kda_recurrent",
    "gated_rms_norm",
    "mla_kv_append",
    "mla_absorb_query",
    "mla_decode",
    "mla_expand_value",
    "output_gate",
    "residual_add",
    "situ",
    "swiglu",
    "router_logits",
    "moe_router",
    "moe_gate_up",
    "moe_gate_up_mxfp4",
    "moe_down",
    "moe_down_mxfp4",
    "argmax",
]
