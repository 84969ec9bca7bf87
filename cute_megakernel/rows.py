"""The row: one entry of the table that every SM walks, and what the kernel, the emulator and the validator read of it.

A row carries out one op call or a few that belong together (a projection and its activation). Its work is cut into
`units`; every SM gets a range of them in `Schedule.work`. `units` 0 means that each SM does the whole row for itself,
because it needs the result in its own shared memory.
"""

from dataclasses import dataclass, field
from enum import IntEnum

from cute_megakernel.recording import Buffer, View, Weight
from kimi_kernels.places import Place


class Code(IntEnum):
    """What the row does; the handlers of the same names are in `stages/`."""

    MIX = 0  # x <- activations: embedding, attn_res_norm, rms_norm, or a plain load
    BANK_SCORES = 1  # scores of one bank row for the mixes that will read it
    # linear, router_logits, mla_absorb_query, mla_expand_value, with residual_add, situ, swiglu, output_gate behind
    LINEAR = 2
    MOE_ROUTER = 3
    MOE_GATE_UP = 4
    MOE_DOWN = 5  # with residual_add behind
    KDA_HEAD = 6  # all ops of one head of one batch row, from in_proj to the gated norm
    MLA_KV_APPEND = 7
    MLA_DECODE = 8
    MLA_REDUCE = 9  # the many parts of a long sequence put together, each SM some columns of a head
    MLA_COMBINE = 10  # x <- the few parts of a short one put together, or what MLA_REDUCE made
    ARGMAX = 11


class Epilogue(IntEnum):
    """What a LINEAR or MOE_GATE_UP row does with its sums."""

    ACT = 0  # rounded to bfloat16, two a word
    FLOAT = 1  # float32, one a word
    SITU = 2
    SWIGLU = 3
    OUTPUT_GATE = 4
    LOGITS = 5  # to the logits tensor, with a running argmax


# the code whose rows carry out an op; what a row of it does for the op is in the stage file of the code's or op's name
HANDLERS = {
    "embedding": Code.MIX,
    "attn_res_norm": Code.MIX,
    "rms_norm": Code.MIX,
    "linear": (Code.LINEAR, Code.KDA_HEAD),
    "causal_conv1d": Code.KDA_HEAD,
    "kda_gate_bounded": Code.KDA_HEAD,
    "kda_gate_softplus": Code.KDA_HEAD,
    "kda_recurrent": Code.KDA_HEAD,
    "gated_rms_norm": Code.KDA_HEAD,
    "mla_kv_append": Code.MLA_KV_APPEND,
    "mla_absorb_query": Code.LINEAR,
    "mla_decode": Code.MLA_COMBINE,  # of parts that MLA_DECODE rows made
    "mla_expand_value": Code.LINEAR,
    "output_gate": Code.LINEAR,
    "residual_add": (Code.LINEAR, Code.MOE_DOWN),
    "situ": (Code.LINEAR, Code.MOE_GATE_UP),
    "swiglu": (Code.LINEAR, Code.MOE_GATE_UP),
    "router_logits": Code.LINEAR,
    "moe_router": Code.MOE_ROUTER,
    "moe_gate_up": Code.MOE_GATE_UP,
    "moe_gate_up_mxfp4": Code.MOE_GATE_UP,
    "moe_down": Code.MOE_DOWN,
    "moe_down_mxfp4": Code.MOE_DOWN,
    "argmax": Code.ARGMAX,
}
STREAMED = (Code.LINEAR, Code.MOE_GATE_UP, Code.MOE_DOWN, Code.KDA_HEAD)
TILE_ROWS = 8  # outputs of one tile


@dataclass
class Row:
    """`args` holds Views, Weights, Pools, Buffers and numbers by field name; `encode.py` packs them into words."""

    code: Code
    place: Place
    calls: list[int]  # recorded calls that are complete once the row is
    units: int = 0
    unit_bytes: int = 0  # streamed per unit
    reads: list[View] = field(default_factory=list)  # activations that it waits for
    writes: list[Buffer] = field(default_factory=list)  # activations that it hands on
    x: View | None = None  # what must be, or what it puts, in shared memory
    x_side: int = 0  # in which of its two areas
    args: dict[str, object] = field(default_factory=dict)
    rows: tuple[int, int] = (0, 0)  # batch rows [first, end) that it serves

    @property
    def first(self) -> int | None:
        """Where units are items (batch row * heads + head): the first of this row; None elsewhere."""
        first = self.args.get("first")
        return first if isinstance(first, int) else None

    @property
    def name(self) -> str:
        weight = self.args.get("weight")
        what = weight.path.split(".")[-1] if isinstance(weight, Weight) else self.code.name.lower()
        return f"{self.place} {what}"
