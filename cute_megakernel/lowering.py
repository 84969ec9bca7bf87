"""From recorded op calls to rows: which calls share a row, in which order, and what is loaded when.

Four passes, each over a plain list:

    fuse      calls -> rows; activations and sums join the projection before them
    arrange   inside an MoE block, work that needs no expert ids goes before the work that does
    split     a row whose input does not fit for all batch rows is repeated for a few of them at a time
    load      a row whose input is not what the SM holds gets a load in front of it
"""

from cute_megakernel.recording import Call, Recording, View, Weight
from cute_megakernel.rows import TILE_ROWS, Code, Epilogue, Row

BF16_BLOCK, MXFP4_BLOCK = 32, 64  # inputs of one block of a tile
BF16_BLOCK_BYTES, MXFP4_BLOCK_BYTES = 512, 272

# MoE rows in the order that keeps the weight stream busy while the router decides
MOE_ORDER = ("router", "latent_down", "shared.gate_up", "moe_router", "shared.down", "w13", "w2", "", "latent_up")


def lower(recording: Recording, x_bytes: int, sms: int) -> list[Row]:
    """Rows of `recording` in the order in which every SM walks them. `x_bytes` of shared memory hold activations."""
    rows = arrange(Fuse(recording, sms).rows)
    second = second_x(recording.rows, recording.buffers[0].width)
    return load(split_rows(rows, x_bytes, recording.rows), second, x_bytes - second)


def blocks(width: int, block: int) -> int:
    return -(-width // block)


def tiles(width: int) -> int:
    return -(-width // TILE_ROWS)


class Fuse:
    """Walks the calls once; one method an op. `rows` is the result."""

    def __init__(self, recording: Recording, sms: int):
        self.recording, self.sms = recording, sms
        self.rows: list[Row] = []
        self._embedded: dict[int, Call] = {}  # outputs of embedding that no row computes yet
        self._maker: dict[int, Row] = {}  # row that writes a buffer
        self._heads: list[Call] = []  # calls of the KDA block that is being collected
        self._of_heads = {  # what f_b and g_b make; a full-rank output gate is a part of what in_proj makes
            view.buffer.index
            for call in recording.calls
            if call.op in ("kda_gate_bounded", "kda_gate_softplus", "gated_rms_norm")
            for view in (call.args.get("raw_decay"), call.args.get("out_gate"))
            if isinstance(view, View) and view.width == view.buffer.width
        }
        self._mixes = [c for c in recording.calls if c.op == "attn_res_norm"]
        self._scored: set[tuple[int, int]] = set()
        for call in recording.calls:
            getattr(self, call.op)(call)
        for call in list(self._embedded.values()):
            self._mix(call, View(call.outputs[0], 0, call.outputs[0].width), None)

    def _add(self, row: Row) -> Row:
        self.rows.append(row)
        for buffer in row.writes:
            self._maker[buffer.index] = row
        return row

    # embedding and norms: x in every SM; sums: behind the row that makes an operand

    def embedding(self, call: Call):
        self._embedded[call.outputs[0].index] = call

    def residual_add(self, call: Call):
        """Joins the row that makes the later operand; the other one is there before."""
        operands = [call.args["x"], call.args["delta"]]
        made = [view for view in operands if view.buffer.index in self._maker]
        later = max(made, key=lambda view: self._order(self._maker[view.buffer.index]))
        other = operands[1 - operands.index(later)]
        row, out = self._maker[later.buffer.index], call.outputs[0]
        row.calls.append(call.index)
        row.writes = [*row.writes, out]
        row.reads.append(other)
        if "tap" not in row.args:
            row.args |= {"tap": row.args["dst"], "add1": other, "dst": out}
        else:
            row.args |= {"inner": row.args["dst"], "add2": other, "dst": out}
        self._maker[out.index] = row

    def _order(self, row: Row) -> tuple[int, int]:
        """What comes before what once the rows are arranged."""
        first = next(i for i, other in enumerate(self.rows) if other.place == row.place)
        return first, _moe_key(row) if row.place.part == "moe" else self.rows.index(row)

    def rms_norm(self, call: Call):
        view = call.args["x"]
        self._mix(call, view, call.args["weight"])

    def attn_res_norm(self, call: Call):
        for view in call.args["bank"]:
            self._score(view)
        self._mix(call, call.args["prefix"], call.args["norm_weight"])

    def _mix(self, call: Call, prefix: View, norm: Weight | None):
        """One row: the embedding, where it is the prefix, the mixture with the bank, the norm."""
        row = Row(Code.MIX, call.place, [call.index], args={"width": prefix.width})
        embedded = self._embedded.pop(prefix.buffer.index, None)
        if embedded is not None:
            row.writes.append(prefix.buffer)
            row.calls = sorted({embedded.index, call.index})
            row.args |= {"tokens": "tokens", "embed": embedded.args["weight"], "dst": prefix.buffer}
        else:
            row.args["src"] = prefix
            row.reads = [prefix]
        if norm is not None:
            row.args |= {"norm": norm, "eps": call.args["eps"], "h": call.outputs[0]}
            row.writes.append(call.outputs[0])
            row.x = View(call.outputs[0], 0, call.outputs[0].width)
        else:
            row.x = prefix
        if call.op == "attn_res_norm":
            row.args |= {"bank": call.args["bank"], "mix": self._mix_index(call)}
            row.reads += call.args["bank"]
        self._add(row)

    def _mix_index(self, call: Call) -> int:
        return self._mixes.index(call)

    def _score(self, view: View):
        """Scores of a new bank row for all mixes that read it, in one row."""
        if (view.buffer.index, 0) in self._scored:
            return
        self._scored.add((view.buffer.index, 0))
        if view.buffer.index in self._embedded:  # a bank row that nothing has computed yet
            call = self._embedded[view.buffer.index]
            self._mix(call, view, None)
        users = [c for c in self._mixes if view in c.args["bank"]]
        row = Row(Code.BANK_SCORES, users[0].place, [], units=len(users), reads=[view])
        row.args = {
            "src": view,
            "width": view.width,
            "weights": [c.args["score_weight"] for c in users],
            "mixes": [self._mix_index(c) for c in users],
            "slot": users[0].args["bank"].index(view),
            "eps": users[0].args["eps"],
        }
        self._add(row)

    # projections

    def linear(self, call: Call):
        if call.outputs[0].index in self._of_heads:
            self._heads.append(call)
        else:
            self._linear(call, Epilogue.ACT)

    def router_logits(self, call: Call):
        self._linear(call, Epilogue.FLOAT)

    def _linear(self, call: Call, epilogue: Epilogue, x: str = "x") -> Row:
        weight, out = call.args["weight"], call.outputs[0]
        n, c = weight.shape
        kb = blocks(c, BF16_BLOCK)
        row = Row(Code.LINEAR, call.place, [call.index], units=tiles(n), unit_bytes=kb * BF16_BLOCK_BYTES)
        row.x, row.reads, row.writes = call.args[x], [call.args[x]], [out]
        row.args = {"weight": weight, "image": "tiles", "kb": kb, "total": tiles(n), "batch_tiles": tiles(n)}
        row.args |= {"epilogue": epilogue, "dst": out, "n_valid": n}
        return self._add(row)

    def _batched(self, call: Call, x: View, weight: Weight, image: str, n: int, c: int, x_batch: int) -> Row:
        """One small projection a head."""
        heads, kb = weight.shape[0], blocks(c, BF16_BLOCK)
        row = Row(Code.LINEAR, call.place, [call.index], units=heads * tiles(n), unit_bytes=kb * BF16_BLOCK_BYTES)
        row.x, row.reads, row.writes = x, [x], [call.outputs[0]]
        row.args = {"weight": weight, "image": image, "kb": kb, "total": heads * tiles(n), "batch_tiles": tiles(n)}
        row.args |= {"x_batch": 2 * x_batch, "epilogue": Epilogue.ACT, "n_valid": heads * n, "dst": call.outputs[0]}
        return self._add(row)

    def situ(self, call: Call):
        self._activate(call, Epilogue.SITU, {"p0": call.args["beta"], "p1": call.args["linear_beta"]})

    def swiglu(self, call: Call):
        self._activate(call, Epilogue.SWIGLU, {})

    def _activate(self, call: Call, epilogue: Epilogue, numbers: dict):
        """Joins the projection that makes gate and up: their rows alternate in its tiles."""
        row = self._maker[call.args["gate_up"].buffer.index]
        row.calls.append(call.index)
        row.writes = [*row.writes, call.outputs[0]]
        row.args |= {"epilogue": epilogue, "tap": row.args["dst"], "dst": call.outputs[0], **numbers}
        row.args["image"] = {"tiles": "paired tiles", "experts": "paired experts"}[row.args["image"]]
        self._maker[call.outputs[0].index] = row

    def output_gate(self, call: Call):
        row = self._maker[call.args["o"].buffer.index]
        row.calls.append(call.index)
        row.writes = [*row.writes, call.outputs[0]]
        row.reads.append(call.args["out_gate"])
        row.args |= {"epilogue": Epilogue.OUTPUT_GATE, "tap": row.args["dst"], "dst": call.outputs[0]}
        row.args["gate"] = call.args["out_gate"]
        self._maker[call.outputs[0].index] = row

    def argmax(self, call: Call):
        row = self._maker[call.args["logits"].buffer.index]
        row.args |= {"epilogue": Epilogue.LOGITS, "vocab_start": call.args["vocab_start"]}
        done = Row(Code.ARGMAX, call.place, [call.index], units=1, reads=[call.args["logits"]], writes=[*call.outputs])
        done.args = {"vocab_start": call.args["vocab_start"], "tiles": row.units}
        self._add(done)

    # experts

    def moe_router(self, call: Call):
        row = Row(Code.MOE_ROUTER, call.place, [call.index], reads=[call.args["logits"]], writes=[*call.outputs])
        row.args = {"src": call.args["logits"], "bias": call.args["bias"], "scaling": call.args["scaling"]}
        row.args |= {"ids": call.outputs[0], "weights": call.outputs[1], "experts": call.args["bias"].shape[0]}
        row.args["top_k"] = call.args["top_k"]
        self._add(row)

    def moe_gate_up(self, call: Call):
        weight, scale = call.args.get("w13", call.args.get("w13_packed")), call.args.get("w13_scale")
        experts, n, packed = weight.shape
        kb, nbytes = expert_blocks(packed, scale is not None)
        row = Row(Code.MOE_GATE_UP, call.place, [call.index], units=-1, unit_bytes=nbytes)
        row.x, row.reads, row.writes = call.args["x"], [call.args["x"], call.args["topk_ids"]], [call.outputs[0]]
        row.args = {"weight": weight, "scale": scale, "image": "experts", "kb": kb, "total": tiles(n)}
        row.args |= {"epilogue": Epilogue.ACT, "dst": call.outputs[0], "width": n, "top_k": call.args["topk_ids"].width}
        row.args["experts"] = experts
        self._add(row)

    moe_gate_up_mxfp4 = moe_gate_up

    def moe_down(self, call: Call):
        weight, scale = call.args.get("w2", call.args.get("w2_packed")), call.args.get("w2_scale")
        experts, n, packed = weight.shape
        kb, nbytes = expert_blocks(packed, scale is not None)
        row = Row(Code.MOE_DOWN, call.place, [call.index], units=tiles(n), unit_bytes=nbytes)
        row.x = call.args["m"]
        row.reads = [call.args["m"], call.args["topk_ids"], call.args["topk_weights"]]
        row.writes = [call.outputs[0]]
        picks = call.args["topk_ids"].width
        row.args = {"weight": weight, "scale": scale, "image": "experts", "kb": kb, "total": tiles(n)}
        row.args |= {"dst": call.outputs[0], "top_k": picks, "experts": experts}
        row.args["group_pad"] = kb * (MXFP4_BLOCK if scale is not None else BF16_BLOCK)
        row.args["group"] = row.x.width // picks
        self._add(row)

    moe_down_mxfp4 = moe_down

    # KDA: all calls of a (batch row, head) item in one row, one item an SM

    def causal_conv1d(self, call: Call):
        self._heads.append(call)

    kda_gate_bounded = kda_gate_softplus = kda_recurrent = causal_conv1d

    def gated_rms_norm(self, call: Call):
        calls, self._heads = [*self._heads, call], []
        by_op = {c.op: c for c in calls}
        made_by = {c.outputs[0].index: c for c in calls}
        gate = by_op.get("kda_gate_bounded") or by_op["kda_gate_softplus"]
        f_b, g_b = (made_by.get(view.buffer.index) for view in (gate.args["raw_decay"], call.args["out_gate"]))
        conv, recurrent = by_op["causal_conv1d"], by_op["kda_recurrent"]
        args = {
            "src": conv.args["x"],
            "f_a": f_b.args["x"],
            "gate": call.args["out_gate"] if g_b is None else g_b.args["x"],
            "beta": gate.args["raw_beta"],
            "f_b": f_b.args["weight"],
            "g_b": None if g_b is None else g_b.args["weight"],
            "conv": conv.args["weight"],
            "window": conv.args["conv_window"],
            "A_log": gate.args["A_log"],
            "dt_bias": gate.args["dt_bias"],
            "bound": gate.args.get("lower_bound", 0.0),
            "pool": recurrent.args["state"],
            "norm": call.args["weight"],
            "eps": call.args["eps"],
            "tap_z": conv.outputs[0],
            "tap_raw_decay": f_b.outputs[0],
            "tap_out_gate": None if g_b is None else g_b.outputs[0],
            "tap_log_decay": gate.outputs[0],
            "tap_beta": gate.outputs[1],
            "tap_o": recurrent.outputs[0],
            "dst": call.outputs[0],
        }
        _, heads, V, K = recurrent.args["state"].shape
        nbytes = 4 * V * K + sum(2 * K * c.args["weight"].shape[1] for c in (f_b, g_b) if c is not None)
        items = self.recording.rows * heads
        for first in range(0, items, self.sms):
            some = min(self.sms, items - first)
            done = sorted(c.index for c in calls) if first + some == items else []
            row = Row(Code.KDA_HEAD, call.place, done, units=some, unit_bytes=nbytes, args={"first": first, **args})
            row.reads = [args[name] for name in ("src", "f_a", "gate", "beta")]
            row.writes = [buffer for c in calls for buffer in c.outputs]
            self._add(row)

    # MLA

    def mla_kv_append(self, call: Call):
        """Held back: its row goes behind mla_expand_value, because nobody in this launch waits for it."""
        row = Row(Code.MLA_KV_APPEND, call.place, [call.index], units=self.recording.rows, reads=[call.args["ckv"]])
        row.args = {"ckv": call.args["ckv"], "norm": call.args["norm_weight"], "eps": call.args["eps"]}
        row.args["pool"] = call.args["latent_cache"]
        self._append = row

    def mla_absorb_query(self, call: Call):
        weight, q = call.args["w_uk"], call.args["q"]
        heads, nope, latent = weight.shape
        self._batched(call, q, weight, "absorb", latent, nope, q.width // heads)
        self._absorbed = call

    def mla_decode(self, call: Call):
        q = self._absorbed.args["q"]
        heads = self._absorbed.args["w_uk"].shape[0]
        newest = self._append.args
        row = Row(Code.MLA_DECODE, call.place, [], units=-1, reads=[call.args["q_latent"], q, newest["ckv"]])
        row.args = {"src": call.args["q_latent"], "rope": q, "heads": heads, "scale": call.args["scale"], **newest}
        row.args |= {"latent": call.args["kv_lora_rank"], "part": call.outputs[0]}
        self._decoded = (call, self._add(row))

    def mla_expand_value(self, call: Call):
        decode, decode_row = self._decoded
        reduce = Row(Code.MLA_REDUCE, decode.place, [], units=-1)
        reduce.args = {"decode": decode_row, "dst": decode.outputs[0]}
        self._add(reduce)
        weight, x = call.args["w_uv"], call.args["o_latent"]
        heads, v, latent = weight.shape
        combine = Row(Code.MLA_COMBINE, decode.place, [decode.index], reads=[], writes=[*decode.outputs], x=x)
        padded = blocks(latent, 64) * 64
        combine.args = {"part": decode.outputs[0], "decode": decode_row, "dst": decode.outputs[0], "latent": latent}
        combine.args |= {"head_tiles": tiles(v), "group_pad": padded, "heads": heads}
        self._add(combine)
        row = self._batched(call, x, weight, "expand", v, latent, padded)
        row.args["x_local"] = True  # x holds the heads of this SM's tiles only
        combine.args["for"] = row
        self._add(self._append)


def expert_blocks(packed: int, mxfp4: bool) -> tuple[int, int]:
    """Blocks and bytes of one tile of an expert whose rows take `packed` elements."""
    if mxfp4:
        kb = blocks(2 * packed, MXFP4_BLOCK)
        return kb, kb * MXFP4_BLOCK_BYTES
    kb = blocks(packed, BF16_BLOCK)
    return kb, kb * BF16_BLOCK_BYTES


def arrange(rows: list[Row]) -> list[Row]:
    """Sorts each MoE block by MOE_ORDER; everything else keeps the order of the step."""
    result: list[Row] = []
    block: list[Row] = []
    for row in [*rows, None]:
        if row is not None and row.place.part == "moe" and (not block or block[0].place == row.place):
            block.append(row)
            continue
        result += sorted(block, key=_moe_key)
        block = []
        if row is not None and row.place.part == "moe":
            block = [row]
        elif row is not None:
            result.append(row)
    return result


def _moe_key(row: Row) -> int:
    weight = row.args.get("weight")
    what = weight.path.split("mlp.")[-1] if isinstance(weight, Weight) else ""
    if row.code == Code.MOE_ROUTER:
        what = "moe_router"
    return MOE_ORDER.index(what)


def x_pitch(row: Row) -> int:
    """Bytes of shared memory that one batch row of the row's input takes."""
    width = row.x.width
    if "group_pad" in row.args and row.code == Code.MOE_DOWN:
        width = row.args["group_pad"] * row.args["top_k"]
    return pitch_bytes(width)


def pitch_bytes(width: int) -> int:
    """Whole 64-input blocks, then 64 bytes more, so that neighbouring rows start in different banks."""
    return blocks(width, 64) * 128 + 64


def second_x(rows: int, hidden_size: int) -> int:
    """Where the second area of activations begins: behind the hidden states of all batch rows."""
    return rows * pitch_bytes(hidden_size)


def split_rows(rows: list[Row], x_bytes: int, batch: int) -> list[Row]:
    """A row whose input does not fit for all batch rows at once is repeated for a few of them at a time."""
    result = []
    for row in rows:
        fits = (
            batch
            if row.x is None or row.code in (Code.MIX, Code.MLA_COMBINE) or row.args.get("x_local")
            else min(batch, x_bytes // x_pitch(row))
        )
        if fits < 1:
            raise ValueError(f"{row.name}: one row of its input takes {x_pitch(row)} bytes, there are {x_bytes}")
        for first in range(0, batch, fits):
            part = Row(**{**vars(row), "args": dict(row.args)})
            part.rows = (first, min(batch, first + fits))
            if part.rows[1] < batch:
                part.calls = []
            result.append(part)
    return result


def load(rows: list[Row], second: int, second_bytes: int) -> list[Row]:
    """Puts a plain MIX row in front of a row whose input is not in shared memory. There are two areas: one for the
    hidden state, and from `second` on `second_bytes` for what fits them. The experts' input is loaded before the router
    decides, where it is another than the router's."""
    result: list[Row] = []
    held: list[tuple | None] = [None, None]
    for number, row in enumerate(rows):
        behind = [later for later in rows[number + 1 : number + 8] if later.place == row.place]
        reader = row
        if row.code == Code.MOE_ROUTER:
            reader = next((later for later in behind if later.code == Code.MOE_GATE_UP), row)
        if row.code in (Code.MIX, Code.MLA_COMBINE):
            held = [_key(row), held[1] if row.code == Code.MIX else None]
        elif row.code == Code.MLA_DECODE:
            held = [None, None]
        elif reader.x is not None and _key(reader) not in held:
            used = [key is not None and key in map(_key, behind) for key in held]
            nbytes = (reader.rows[1] - reader.rows[0]) * x_pitch(reader)
            side = int(nbytes <= second_bytes and (used[0] or not used[1]))
            result.append(_loaded(reader, side))
            held = [held[0], _key(reader)] if side else [_key(reader), held[1] if nbytes <= second else None]
        if row.x is not None and _key(row) in held and row.code != Code.MIX:
            row.x_side = held.index(_key(row))
        result.append(row)
    return result


def _key(row: Row) -> tuple:
    return row.x, row.rows


def _loaded(row: Row, side: int) -> Row:
    """A plain load of what the row reads."""
    assert row.x is not None
    need = Row(Code.MIX, row.place, [], reads=[row.x], x=row.x, rows=row.rows, x_side=side)
    need.args = {"src": row.x, "width": row.x.width}
    need.args |= {k: row.args[k] for k in ("group", "group_pad") if row.code == Code.MOE_DOWN}
    return need
