"""The one table of ops: names, arguments, dims and dtypes, in decode order.

Reference, Triton ops and megakernel stages carry the same names and the same signatures; `checks.validate` refuses what
the table does not allow; traffic is counted from it.

Dims are bound by name within one call (`R` rows, `B` sequences, `D` hidden, ...; CONTRIBUTING.md lists them). A
tensor spec reads

    "R D act"            dims, then dtype class
    "B i32?"             `?`: the argument may be None
    "*R D act"           `*`: a list of such tensors

Dtype classes: `act` is the activation dtype (bfloat16 or float32, the same for all `act` tensors of a call), `float` is
any of the two independently, `f32 i32 u8 bool` are exact, `token` is int32 or int64.
`inplace` names arguments that the op changes; `relations` must hold between dims and scalar arguments; `pools` names
arguments of which only some rows are touched, with the number of first-dim rows read per call; they are counted once,
or twice when changed in place.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

ACT_DTYPES = (torch.bfloat16, torch.float32)
DTYPE_CLASSES = {
    "act": ACT_DTYPES,
    "float": ACT_DTYPES,
    "f32": (torch.float32,),
    "i32": (torch.int32,),
    "u8": (torch.uint8,),
    "i64": (torch.int64,),
    "bool": (torch.bool,),
    "token": (torch.int32, torch.int64),
}


@dataclass(frozen=True)
class OpSpec:
    """One op: argument name -> tensor spec or scalar type, and output name -> tensor spec."""

    args: dict[str, str | type]
    outputs: dict[str, str]
    inplace: tuple[str, ...] = ()
    pools: dict[str, str] = field(default_factory=dict)  # argument -> dim expression of touched rows
    relations: tuple[str, ...] = ()  # what must hold between dims and scalar arguments


OPS: dict[str, OpSpec] = {
    "embedding": OpSpec(
        {"tokens": "R token", "weight": "VOCAB D act"},
        {"x": "R D act"},
        pools={"weight": "R"},
    ),
    "attn_res_norm": OpSpec(
        {"prefix": "R D act", "bank": "*R D act", "score_weight": "D f32", "norm_weight": "D act", "eps": float},
        {"h": "R D act"},
    ),
    "rms_norm": OpSpec({"x": "R D act", "weight": "D act", "eps": float}, {"h": "R D act"}),
    "linear": OpSpec({"x": "R C act", "weight": "N C act"}, {"y": "R N act"}),
    "causal_conv1d": OpSpec(
        {
            "x": "R CH act",
            "weight": "CH W f32",
            "conv_window": "SLOTS W-1 CH act",
            "slots": "B i32",
            "is_new": "B bool",
            "first_valid_slot": int,
        },
        {"z": "R CH f32"},
        inplace=("conv_window",),
        pools={"conv_window": "B"},
        relations=("0 <= first_valid_slot",),
    ),
    "kda_gate_bounded": OpSpec(
        {
            "raw_decay": "R H K act",
            "raw_beta": "R H act",
            "A_log": "H f32",
            "dt_bias": "H K f32",
            "lower_bound": float,
        },
        {"log_decay": "R H K f32", "beta": "R H f32"},
    ),
    "kda_gate_softplus": OpSpec(
        {"raw_decay": "R H K act", "raw_beta": "R H act", "A_log": "H f32", "dt_bias": "H K f32"},
        {"log_decay": "R H K f32", "beta": "R H f32"},
    ),
    "kda_recurrent": OpSpec(
        {
            "q": "R H K float",
            "k": "R H K float",
            "v": "R H V float",
            "log_decay": "R H K f32",
            "beta": "R H f32",
            "state": "SLOTS H V K f32",
            "slots": "B i32",
            "is_new": "B bool",
            "first_valid_slot": int,
        },
        {"o": "R H V f32"},
        inplace=("state",),
        pools={"state": "B"},
        relations=("0 <= first_valid_slot",),
    ),
    "gated_rms_norm": OpSpec(
        {"o": "R H V float", "out_gate": "R H V act", "weight": "V f32", "eps": float},
        {"y": "R H V act"},
    ),
    "mla_kv_append": OpSpec(
        {
            "ckv": "R LP act",
            "norm_weight": "L act",
            "eps": float,
            "latent_cache": "PAGES PAGE LP act",
            "page_table": "B MAX_PAGES i32",
            "seq_lens": "B i32",
        },
        {},
        inplace=("latent_cache",),
        pools={"latent_cache": "R/PAGE", "page_table": "0"},
        relations=("L <= LP",),
    ),
    "mla_absorb_query": OpSpec(
        {"q": "R H QD act", "w_uk": "H NOPE L act"},
        {"q_latent": "R H L+QD-NOPE act"},
        relations=("NOPE <= QD",),
    ),
    "mla_decode": OpSpec(
        {
            "q_latent": "R H LP act",
            "latent_cache": "PAGES PAGE LP act",
            "page_table": "B MAX_PAGES i32",
            "seq_lens": "B i32",
            "scale": float,
            "kv_lora_rank": int,
        },
        {"o_latent": "R H kv_lora_rank act"},
        pools={"latent_cache": "B*S/PAGE", "page_table": "0"},
        relations=("1 <= kv_lora_rank <= LP",),
    ),
    "mla_expand_value": OpSpec({"o_latent": "R H L act", "w_uv": "H V L act"}, {"o": "R H V act"}),
    "output_gate": OpSpec({"o": "R N act", "out_gate": "R N act"}, {"y": "R N act"}),
    "residual_add": OpSpec({"x": "R D act", "delta": "R D act"}, {"y": "R D act"}),
    "situ": OpSpec({"gate_up": "R 2*I act", "beta": float, "linear_beta": float}, {"m": "R I act"}),
    "swiglu": OpSpec({"gate_up": "R 2*I act"}, {"m": "R I act"}),
    "router_logits": OpSpec({"x": "R D act", "weight": "E D act"}, {"logits": "R E f32"}),
    "moe_router": OpSpec(
        {"logits": "R E f32", "bias": "E f32", "top_k": int, "scaling": float},
        {"topk_ids": "R top_k i32", "topk_weights": "R top_k f32"},
        relations=("1 <= top_k <= E",),
    ),
    "moe_gate_up": OpSpec(
        {"x": "R Z act", "topk_ids": "R A i32", "w13": "E 2*I Z act"},
        {"gate_up": "R A 2*I act"},
        pools={"w13": "ACTIVE"},
    ),
    "moe_gate_up_mxfp4": OpSpec(
        {
            "x": "R Z act",
            "topk_ids": "R A i32",
            "w13_packed": "E 2*I Z/2 u8",
            "w13_scale": "E 2*I Z/32 u8",
        },
        {"gate_up": "R A 2*I act"},
        pools={"w13_packed": "ACTIVE", "w13_scale": "ACTIVE"},
    ),
    "moe_down": OpSpec(
        {"m": "R A I act", "topk_ids": "R A i32", "topk_weights": "R A f32", "w2": "E Z I act"},
        {"y": "R Z act"},
        pools={"w2": "ACTIVE"},
    ),
    "moe_down_mxfp4": OpSpec(
        {
            "m": "R A I act",
            "topk_ids": "R A i32",
            "topk_weights": "R A f32",
            "w2_packed": "E Z I/2 u8",
            "w2_scale": "E Z I/32 u8",
        },
        {"y": "R Z act"},
        pools={"w2_packed": "ACTIVE", "w2_scale": "ACTIVE"},
    ),
    "argmax": OpSpec(
        {"logits": "R VOCAB act", "vocab_start": int},
        {"tokens": "R i64", "values": "R f32"},
    ),
}


def markdown_table() -> str:
    """The op table of DESIGN.md."""

    def cell(items: Mapping[str, str | type]) -> str:
        shown = (f"{name} {want if isinstance(want, str) else want.__name__}" for name, want in items.items())
        return "<br>".join(f"`{text}`" for text in shown) or "-"

    rows = [
        f"| {name} | {cell(op.args)} | {cell(op.outputs)} | {', '.join(op.inplace) or '-'} |"
        for name, op in OPS.items()
    ]
    return "\n".join(["| op | arguments | results | changed in place |", "|---|---|---|---|", *rows])


if __name__ == "__main__":
    sys.stdout.write(markdown_table() + "\n")
