"""One row against the recorded calls that it carries out: same inputs, weights, sizes and numbers."""

from cute_megakernel.lowering import BF16_BLOCK, blocks, expert_blocks, tiles
from cute_megakernel.recording import Call, Recording, View
from cute_megakernel.rows import Epilogue, Row

LINEAR_ARGS = {  # op -> input, weight, image
    "linear": ("x", "weight", "tiles"),
    "router_logits": ("x", "weight", "tiles"),
    "mla_absorb_query": ("q", "w_uk", "absorb"),
    "mla_expand_value": ("o_latent", "w_uv", "expand"),
}
EPILOGUES = {"situ": Epilogue.SITU, "swiglu": Epilogue.SWIGLU, "output_gate": Epilogue.OUTPUT_GATE}


class Carried:
    """Calls that a row does, and what was compared."""

    def __init__(self, calls: list[Call], **checks: bool):
        self.calls, self.checks = [call.index for call in calls], checks


class CallChecker:
    """One method a row code: row -> Carried."""

    def __init__(self, recording: Recording):
        self.recording = recording
        self.producer = {buffer.index: call for call in recording.calls for buffer in call.outputs}
        self.mixes = [call for call in recording.calls if call.op == "attn_res_norm"]
        self.scored: list[tuple[int, int]] = []

    def mix(self, row: Row) -> Carried:
        args = row.args
        if "dst" not in args and "norm" not in args:
            return Carried(
                [], input=row.x == args["src"], reads=row.reads == [row.x], width=args["width"] == row.x.width
            )
        calls, checks = [], {"batch rows": row.rows == (0, self.recording.rows)}
        prefix = args.get("src")
        if "dst" in args:
            call = self.producer[args["dst"].index]
            calls, prefix = [call], _whole(args["dst"])
            checks |= {"embedding": args["embed"] == call.args["weight"], "no source": "src" not in args}
        if "norm" in args:
            call = self.producer[args["h"].index]
            score = call.op == "attn_res_norm"
            checks |= {
                "norm": args["norm"] == call.args["norm_weight" if score else "weight"],
                "eps": args["eps"] == call.args["eps"],
                "prefix": prefix == call.args["prefix" if score else "x"],
                "bank": args.get("bank", []) == call.args.get("bank", []),
                "x": row.x == _whole(args["h"]),
            }
            if score:
                checks["scores"] = self.mixes[args["mix"]] is call
                checks["scores of each bank row"] = all(
                    (args["mix"], b) in self.scored for b in range(len(args["bank"]))
                )
                checks["bank rows whole"] = all(view.start == 0 for view in args["bank"])
            calls.append(call)
        return Carried(calls, **checks)

    def _sums(self, row: Row, base: Call) -> tuple[list[Call], dict[str, bool]]:
        """One or two sums behind what `base` makes, each with its other operand."""
        args, calls = row.args, [base]
        fine = base.outputs[0] == args["tap"]
        for other, out in (("add1", args.get("inner", args["dst"])), ("add2", args["dst"])):
            if other in args:
                call = self.producer[out.index]
                operands = {call.args["x"], call.args["delta"]} if call.op == "residual_add" else set()
                fine = fine and operands == {_whole(calls[-1].outputs[0]), args[other]} and args[other].start == 0
                calls.append(call)
        return calls, {"sums": fine and ("add2" in args) == ("inner" in args)}

    def bank_scores(self, row: Row) -> Carried:
        args = row.args
        mixes = [self.mixes[mix] for mix in args["mixes"]]
        self.scored += [(mix, args["slot"]) for mix in args["mixes"]]
        slot = args["slot"]
        return Carried(
            [],
            units=row.units == len(mixes) == len(args["weights"]),
            weights=args["weights"] == [call.args["score_weight"] for call in mixes],
            source=all(call.args["bank"][slot] == args["src"] for call in mixes),
            eps=all(call.args["eps"] == args["eps"] for call in mixes),
            batch=row.rows == (0, self.recording.rows),
        )

    def linear(self, row: Row) -> Carried:
        args = row.args
        base = self.producer[args.get("tap", args["dst"]).index]
        x, weight, image = LINEAR_ARGS[base.op]
        calls, epilogue = [base], Epilogue.FLOAT if base.op == "router_logits" else Epilogue.ACT
        checks = {"weight": args["weight"] == base.args[weight]}
        if "add1" in args:
            calls, more = self._sums(row, base)
            checks |= more
        elif "tap" in args:
            calls, epilogue, image, more = self._behind(row, base, image)
            checks |= more
        if args["epilogue"] == Epilogue.LOGITS:
            epilogue = Epilogue.LOGITS
        *_, n, c = args["weight"].shape
        inputs, outputs = (n, c) if base.op == "mla_absorb_query" else (c, n)
        heads = args["weight"].shape[0] if len(args["weight"].shape) == 3 else 1
        per_head = heads > 1 or len(args["weight"].shape) == 3
        checks |= {
            "input": row.x == base.args[x],
            "image": args["image"] == image,
            "epilogue": args["epilogue"] == epilogue,
            "outputs": args["n_valid"] == heads * outputs and args["batch_tiles"] == tiles(outputs),
            "tiles": args["total"] == heads * tiles(outputs) == row.units,
            "inputs": args["kb"] == blocks(inputs, BF16_BLOCK),
            "bytes": row.unit_bytes == args["kb"] * 512,
        }
        if per_head and not args.get("x_local"):
            checks["head"] = args["x_batch"] == 2 * (base.args[x].width // heads)
        return Carried(calls, **checks)

    def _behind(self, row: Row, base: Call, image: str) -> tuple[list[Call], Epilogue, str, dict]:
        """The activation or gate that joins a projection."""
        args = row.args
        call = self.producer[args["dst"].index]
        if call.op == "output_gate":
            fine = call.args["o"].buffer in base.outputs and args["gate"] == call.args["out_gate"]
            return [base, call], Epilogue.OUTPUT_GATE, image, {"gate": fine}
        return [base, call], EPILOGUES[call.op], f"paired {image}", {"activation": self._activation(row, base, call)}

    def _activation(self, row: Row, base: Call, call: Call) -> bool:
        numbers = [row.args.get("p0"), row.args.get("p1")]
        same = call.op != "situ" or numbers == [call.args["beta"], call.args["linear_beta"]]
        return call.args["gate_up"].buffer in base.outputs and same

    def moe_router(self, row: Row) -> Carried:
        args, call = row.args, self.producer[row.args["ids"].index]
        same = {name: args[name] == call.args[name] for name in ("bias", "scaling", "top_k")}
        outputs = (args["ids"], args["weights"]) == call.outputs
        return Carried([call], source=args["src"] == call.args["logits"], outputs=outputs, **same)

    def moe_gate_up(self, row: Row) -> Carried:
        args = row.args
        base, call = self.producer[args["tap"].index], self.producer[args["dst"].index]
        return Carried(
            [base, call],
            input=row.x == base.args["x"],
            ids=row.reads[1] == base.args["topk_ids"] and args["top_k"] == row.reads[1].width,
            activation=self._activation(row, base, call) and args["epilogue"] == EPILOGUES[call.op],
            image=args["image"] == "paired experts",
            **_experts(row, base, "w13"),
        )

    def moe_down(self, row: Row) -> Carried:
        call = self.producer[row.args.get("tap", row.args["dst"]).index]
        calls, sums = self._sums(row, call) if "add1" in row.args else ([call], {})
        reads = row.reads[1:3] == [call.args["topk_ids"], call.args["topk_weights"]]
        picks = call.args["topk_ids"].width
        group = row.args["top_k"] == picks and row.args["group"] * picks == row.x.width
        same = _experts(row, call, "w2")
        return Carried(
            calls,
            input=row.x == call.args["m"],
            **sums,
            picks=reads,
            group=group,
            image=row.args["image"] == "experts",
            **same,
        )

    def kda_head(self, row: Row) -> Carried:
        """All calls of a block, each with what the one before it makes."""
        args = row.args
        names = ("tap_raw_decay", "tap_z", "tap_log_decay", "tap_o", "dst")
        f_b, conv, gate, recurrent, norm = (self.producer[args[name].index] for name in names)
        calls = [f_b, conv, gate, recurrent, norm]
        z, parts = conv.outputs[0], [recurrent.args[name] for name in "qkv"]
        g_b = self.producer[args["tap_out_gate"].index] if args["tap_out_gate"] is not None else None
        out_gate = args["gate"] if g_b is None else _whole(g_b.outputs[0])
        if g_b is not None:
            calls.append(g_b)
        heads = args["pool"].shape[1]
        rank = sum(c.args["weight"].shape[1] for c in (f_b, g_b) if c is not None)
        return Carried(
            calls,
            f_b=f_b.op == "linear" and (args["f_a"], args["f_b"]) == (f_b.args["x"], f_b.args["weight"]),
            g_b=g_b is None or (args["gate"], args["g_b"]) == (g_b.args["x"], g_b.args["weight"]),
            conv=(args["src"], args["conv"], args["window"])
            == tuple(conv.args[name] for name in ("x", "weight", "conv_window")),
            gate=gate.args["raw_decay"] == _whole(f_b.outputs[0])
            and args["beta"] == gate.args["raw_beta"]
            and all(args[name] == gate.args[name] for name in ("A_log", "dt_bias")),
            bound=args["bound"] == gate.args.get("lower_bound", 0.0),
            decay=(args["tap_log_decay"], args["tap_beta"]) == gate.outputs
            and [recurrent.args[name] for name in ("log_decay", "beta")] == [_whole(b) for b in gate.outputs],
            state=args["pool"] == recurrent.args["state"]
            and parts == [View(z, i * (z.width // 3), z.width // 3) for i in range(3)],
            norm=norm.args["o"] == _whole(recurrent.outputs[0])
            and norm.args["out_gate"] == out_gate
            and (args["norm"], args["eps"]) == (norm.args["weight"], norm.args["eps"]),
            reads=row.reads == [args[name] for name in ("src", "f_a", "gate", "beta")],
            bytes=row.unit_bytes == 2 * (z.width // 3 // heads) * (2 * (z.width // 3 // heads) + rank),
        )

    def mla_kv_append(self, row: Row) -> Carried:
        args = row.args
        call = next(
            c for c in self.recording.calls if c.op == "mla_kv_append" and c.args["latent_cache"] == args["pool"]
        )
        return Carried([call], units=row.units == self.recording.rows, **self._newest(row))

    def _newest(self, row: Row) -> dict[str, bool]:
        """The row that goes to the cache, by the row that writes it or that reads it in the same launch."""
        args = row.args
        call = next(
            c for c in self.recording.calls if c.op == "mla_kv_append" and c.args["latent_cache"] == args["pool"]
        )
        fine = args["norm"] == call.args["norm_weight"] and args["eps"] == call.args["eps"]
        return {"source": args["ckv"] == call.args["ckv"], "norm": fine}

    def mla_decode(self, row: Row) -> Carried:
        return Carried([], **self._decode(row))

    def _decode(self, row: Row) -> dict[str, bool]:
        args, call = row.args, self.producer[row.args["part"].index]
        query = self.producer[args["src"].buffer.index]
        return {
            "query": args["src"] == call.args["q_latent"]
            and query.op == "mla_absorb_query"
            and args["rope"] == query.args["q"],
            "cache": args["pool"] == call.args["latent_cache"],
            **self._newest(row),
            "scale": args["scale"] == call.args["scale"] and args["latent"] == call.args["kv_lora_rank"],
            "batch rows": row.rows == (0, self.recording.rows),
        }

    def mla_reduce(self, row: Row) -> Carried:
        return Carried([], decode=row.args["decode"].args["part"] == row.args["dst"])

    def mla_combine(self, row: Row) -> Carried:
        args, call = row.args, self.producer[row.args["dst"].index]
        behind = args["for"].args
        return Carried(
            [call],
            x=row.x == _whole(args["dst"]) and args["for"].x == row.x,
            decode=args["decode"].args["part"] == args["dst"],
            heads=behind.get("x_local", False) and args["head_tiles"] == behind["batch_tiles"],
            pitch=2 * args["group_pad"] == behind["x_batch"]
            and args["group_pad"] >= 32 * behind["kb"] >= args["latent"],
        )

    def argmax(self, row: Row) -> Carried:
        call = self.producer[row.writes[0].index]
        logits = self.producer[call.args["logits"].buffer.index]
        count = tiles(logits.args["weight"].shape[0])
        start = row.args["vocab_start"] == call.args["vocab_start"]
        return Carried([call], logits=row.reads == [call.args["logits"]], tiles=row.args["tiles"] == count, start=start)


def _whole(buffer) -> View:
    return View(buffer, 0, buffer.width)


def _experts(row: Row, call: Call, name: str) -> dict[str, bool]:
    """Weights and sizes of an expert row."""
    args = row.args
    scale = call.args.get(f"{name}_scale")
    kb, nbytes = expert_blocks(args["weight"].shape[2], scale is not None)
    return {
        "weight": args["weight"] == call.args.get(name, call.args.get(f"{name}_packed")) and args["scale"] == scale,
        "sizes": args["kb"] == kb and row.unit_bytes == nbytes and args["total"] == tiles(args["weight"].shape[1]),
    }
