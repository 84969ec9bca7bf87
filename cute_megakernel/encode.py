"""Rows as the 64 words that the kernel reads. `address` says where weights, pools and lists are."""

import struct
from collections.abc import Callable

import torch

from cute_megakernel.images import pair_rows
from cute_megakernel.lowering import pitch_bytes, second_x, x_pitch
from cute_megakernel.recording import Buffer, Pool, View
from cute_megakernel.rows import Code, Row
from cute_megakernel.schedule import Schedule
from cute_megakernel.shape import CONSUMERS, FIELD_WORDS, MAX_BANK, SLOT_BYTES, Pieces, mix_quads
from cute_megakernel.table import ABSENT, FIELD, WIDE

Address = Callable[[str, object], int]  # (what, subject) -> device address


class Encoder:
    """Encodes the rows of one schedule, in order."""

    def __init__(self, schedule: Schedule, address: Address, taps: bool = False):
        self.schedule, self.address, self.taps = schedule, address, taps
        self._read = {
            row.args["src"].buffer.index for row in schedule.rows if row.code == Code.MIX and "src" in row.args
        }
        self._moe = -1
        self._decodes = [row for row in schedule.rows if row.code == Code.MLA_DECODE]

    def table(self) -> torch.Tensor:
        """[rows, 64] int32"""
        return torch.tensor([self.words(row) for row in self.schedule.rows], dtype=torch.int32)

    def work(self, in_flight: int = 1) -> torch.Tensor:
        """[sms, rows, 4] int32"""
        shares, caps = torch.tensor(self.schedule.work), torch.tensor(self.schedule.caps(in_flight)).unsqueeze(-1)
        return torch.cat([shares, caps, torch.zeros_like(caps)], dim=-1).int()

    def words(self, row: Row) -> list[int]:
        """The words of one row; rows are encoded in their order."""
        values = {"code": int(row.code), "r0": row.rows[0], "r1": row.rows[1], "copies": 1}
        values |= {name: ABSENT for name in ("src", "dst", "h", "add1", "add2", "rope")}
        if row.x is not None and row.code not in (Code.MLA_DECODE, Code.MOE_ROUTER):
            values["x_pitch"] = (
                x_pitch(row) if row.code != Code.MIX or "group" not in row.args else self._picks_pitch(row)
            )
        values["x_at"] = row.x_side * second_x(self.schedule.shape.rows, self.schedule.shape.hidden_size)
        getattr(self, "_" + row.code.name.lower())(row, values)
        words = [0] * FIELD_WORDS
        for name, value in values.items():
            if name in WIDE:
                words[FIELD[name]], words[FIELD[name] + 1] = _signed(value & 0xFFFFFFFF), _signed(value >> 32)
            elif isinstance(value, float):
                words[FIELD[name]] = struct.unpack("<i", struct.pack("<f", value))[0]
            else:
                words[FIELD[name]] = int(value)
        return words

    def _picks_pitch(self, row: Row) -> int:
        return pitch_bytes(row.args["width"] // row.args["group"] * row.args["group_pad"])

    def _sum(self, row: Row, values: dict):
        """The sums behind a projection: other operands, and where taps want what is between."""
        args = row.args
        if "add1" in args:
            self._tap(values, "tap", args["tap"])
            self._tap(values, "inner", args.get("inner"))
        for name in ("add1", "add2"):
            if name in args:
                self._view(values, name, args[name], "dst_pitch")
        other = values.get("dst_pitch")
        self._view(values, "dst", args["dst"])
        assert other in (None, values["dst_pitch"]), "sums of rows with different pitches"

    def _pieces(self, values: dict, mxfp4: bool):
        """How the row's tiles are cut among warps, and how many tiles are finished at a time."""
        shape, pieces = self.schedule.shape, Pieces.of(values["kb"], mxfp4)
        tiles = min(shape.sums // pieces.per_tile, CONSUMERS // (2 * shape.rows * values["copies"]))
        whole = tiles // pieces.tiles * pieces.tiles  # a piece never lies in two groups
        values |= {"piece": pieces.blocks, "ppt": pieces.per_tile, "tpp": pieces.tiles}
        values |= {"copy": pieces.copy, "pitch": pieces.pitch, "second": pieces.second}
        values |= {"group_tiles": whole, "group_pieces": whole * pieces.per_tile // pieces.tiles}
        values["magic"] = -(-(1 << 20) // pieces.per_tile)

    def _heads_pitch(self, row: Row) -> int:
        """One batch row of the heads whose tiles one SM has at most."""
        tiles = -(-row.units // self.schedule.shape.sms)
        heads = (tiles - 1) // row.args["batch_tiles"] + 2
        pitch = heads * row.args["x_batch"] + 64
        if pitch * self.schedule.shape.rows > self.schedule.shape.x_bytes:
            raise ValueError(f"{row.name}: {heads} heads of {self.schedule.shape.rows} rows do not fit")
        return pitch

    def _view(self, values: dict, name: str, view: View | Buffer | None, pitch: str | None = None):
        """Place of an activation under `name`, and of its next row under `name`_pitch."""
        if view is None:
            values[name] = ABSENT
            return
        buffer, start = (view, 0) if isinstance(view, Buffer) else (view.buffer, view.start)
        place = self.schedule.places[buffer.index]
        values[name] = place.start + (start // 2 if buffer.dtype == torch.bfloat16 else start)
        # [R * picks, I] is [R, picks * I]
        values[pitch or f"{name}_pitch"] = place.pitch * max(1, buffer.rows // self.schedule.shape.rows)

    def _tap(self, values: dict, name: str, view: View | Buffer | None, pitch: str | None = None):
        """An activation that other SMs rarely read: handed on if a row does, or the caller wants to see everything."""
        buffer = view if isinstance(view, Buffer) or view is None else view.buffer
        wanted = buffer is not None and (self.taps or buffer.index in self._read)
        self._view(values, name, view if wanted else None, pitch)

    def _mix(self, row: Row, values: dict):
        args = row.args
        width = args["width"]
        values |= {"kind": int("norm" in args or "dst" in args), "width": width}
        values["span"] = width // 4 // mix_quads(self.schedule.shape.hidden_size)
        values["group"] = args.get("group", width)
        values["group_pad"] = args.get("group_pad", -(-width // 64) * 64)
        self._view(values, "dst", args.get("dst"))
        self._tap(values, "h", args.get("h"))
        if "embed" in args:
            values |= {"weight": self.address("weight", args["embed"]), "pool_count": args["embed"].shape[0]}
        else:
            self._view(values, "src", args["src"])
        values.setdefault("dst_pitch", values.get("src_pitch", 0))
        if "norm" in args:
            values |= {"norm": self.address("weight", args["norm"]), "eps": float(args["eps"])}
        if "bank" in args:
            scores = self.schedule.extras["scores"]
            values["n_bank"] = len(args["bank"])
            values["scores"] = scores.start + args["mix"] * self.schedule.shape.rows * MAX_BANK
            call = next(
                c for c in self.schedule.recording.calls if c.op == "attn_res_norm" and c.outputs[0] == args["h"]
            )
            values["weight2"] = self.address("weight", call.args["score_weight"])
            for i, view in enumerate(args["bank"]):
                values[f"bank{i}"] = self.schedule.places[view.buffer.index].start

    def _bank_scores(self, row: Row, values: dict):
        args, rows = row.args, self.schedule.shape.rows
        start = self.schedule.extras["scores"].start
        targets = [start + mix * rows * MAX_BANK + args["slot"] for mix in args["mixes"]]
        self._view(values, "src", args["src"])
        values |= {"width": args["width"], "eps": float(args["eps"]), "out": self.address("int32", targets)}
        values["weight"] = self.address("int64", [self.address("weight", w) for w in args["weights"]])

    def _linear(self, row: Row, values: dict):
        args = row.args
        values["weight"] = self.address(args["image"], args["weight"])
        self._weight_rows(args, values)
        for name in ("kb", "total", "batch_tiles", "n_valid"):
            values[name] = args[name]
        copies = self.schedule.recording.gathered.get(args["weight"].path.split(".")[-1], 1)
        if copies > 1:
            n = args["n_valid"]
            values |= {"copies": copies, "copy_stride": n if args["epilogue"].name == "FLOAT" else n // 2}
        self._pieces(values, False)
        values["magic"] = -(-(1 << 20) // max(values["ppt"], values["tpp"]))  # pieces to tiles, or tiles to pieces
        values |= {"x_batch": args.get("x_batch", 0), "epilogue": int(args["epilogue"])}
        values["local"] = int(args.get("x_local", False))
        if values["local"]:
            values["x_pitch"] = self._heads_pitch(row)
        self._sum(row, values)
        if "tap" in args:
            self._tap(values, "tap", args["tap"])
        if "gate" in args:
            self._view(values, "gate", args["gate"])
        for name in ("p0", "p1"):
            values[name] = float(args.get(name, 0.0))
        if args["epilogue"].name == "LOGITS":
            values |= {"out": self.address("logits", args["dst"]), "part": self.schedule.extras["best"].start}

    def _weight_rows(self, args: dict, values: dict):
        """Where the rows of a bfloat16 weight are."""
        values["row_bytes"] = self.address("row bytes", (args["image"], args["weight"]))
        values["pair"] = pair_rows(args["weight"].shape[-2]) if args["image"].startswith("paired") else 0

    def _moe_router(self, row: Row, values: dict):
        args = row.args
        self._moe += 1
        self._view(values, "src", args["src"])
        self._tap(values, "dst", args["ids"])
        self._tap(values, "tap", args["weights"])
        values |= {"weight": self.address("weight", args["bias"]), "scale": float(args["scaling"]), "sub": self._moe}

    def _moe_gate_up(self, row: Row, values: dict):
        self._experts(row, values)
        values |= {"epilogue": int(row.args["epilogue"]), "n_valid": row.args["width"]}
        self._tap(values, "tap", row.args["tap"])
        for name in ("p0", "p1"):
            values[name] = float(row.args.get(name, 0.0))

    def _moe_down(self, row: Row, values: dict):
        self._experts(row, values)
        values["group_pad"] = row.args["group_pad"]
        values["local"] = int(row.rows[1] == self.schedule.shape.rows)  # the list of experts is free again

    def _experts(self, row: Row, values: dict):
        args = row.args
        values["weight"] = self.address(args["image"], (args["weight"], args["scale"]))
        values |= {"kb": args["kb"], "total": args["total"], "sub": self._moe}
        self._pieces(values, self.schedule.shape.mxfp4)
        pieces, gate_up = Pieces.of(args["kb"], self.schedule.shape.mxfp4), row.code == Code.MOE_GATE_UP
        if gate_up:  # one tile a piece at most
            values["group_pieces"] = values["group_tiles"] * pieces.per_tile
        if self.schedule.shape.mxfp4:
            values["expert_stride"] = args["kb"] * args["total"] * self.schedule.shape.block_bytes
            values["second"] = pieces.blocks * self.schedule.shape.block_bytes if gate_up else SLOT_BYTES // 2
        else:
            self._weight_rows(args, values)
            values["expert_stride"] = self.address("expert bytes", (args["image"], args["weight"]))
            if gate_up and pieces.per_tile == 1:  # one tile a piece
                values["second"] = 8 * pieces.pitch
        self._sum(row, values)

    def _pool(self, values: dict, pool: Pool):
        values |= {"pool": self.address("pool", pool), "pool_stride": self.address("pool stride", pool)}
        values["pool_count"] = self.address("pool count", pool)

    def _kda_head(self, row: Row, values: dict):
        args = row.args
        self._view(values, "src", args["src"])
        self._view(values, "dst", args["dst"])
        for name in ("f_a", "gate", "beta"):
            self._view(values, name, args[name], "src_pitch")
        for name in ("tap_z", "tap_raw_decay", "tap_out_gate", "tap_log_decay", "tap_beta", "tap_o"):
            wanted = self.taps and args[name] is not None
            values[name] = self.schedule.places[args[name].index].start if wanted else ABSENT
        for name in ("f_b", "g_b"):
            values[name] = self.address("heads", args[name]) if args[name] is not None else 0
        for name, weight in (("weight", "conv"), ("A_log", "A_log"), ("weight2", "dt_bias"), ("norm", "norm")):
            values[name] = self.address("weight", args[weight])
        self._pool(values, args["pool"])
        values |= {"p0": float(args["bound"]), "eps": float(args["eps"])}
        window = args["window"]
        values |= {"window": self.address("pool", window), "window_stride": self.address("pool stride", window)}
        values["pool_count"] = min(values["pool_count"], self.address("pool count", window))

    def _mla_kv_append(self, row: Row, values: dict):
        self._view(values, "ckv", row.args["ckv"])
        values |= {"norm": self.address("weight", row.args["norm"]), "eps": float(row.args["eps"])}
        self._pool(values, row.args["pool"])
        values["page_size"] = self.address("page size", row.args["pool"])

    def _mla_decode(self, row: Row, values: dict):
        self._mla_kv_append(row, values)
        self._view(values, "src", row.args["src"])
        # the absorb row leaves [H, L] packed, without the unrotated dims of the op's result
        self._view(values, "rope", row.args["rope"])
        values["scale"] = float(row.args["scale"])
        self._parts(row, values)

    def _parts(self, decode: Row, values: dict):
        number = next(i for i, r in enumerate(self._decodes) if r.args["part"] == decode.args["part"])
        values |= {
            "part": self.schedule.extras["part"].start,
            "ml": self.schedule.extras["ml"].start,
            "sub": 1 + number,
        }

    def _mla_reduce(self, row: Row, values: dict):
        self._view(values, "o", row.args["dst"])
        self._parts(row.args["decode"], values)

    def _mla_combine(self, row: Row, values: dict):
        args = row.args
        values |= {"groups": args["head_tiles"], "group_pad": args["group_pad"]}
        values["magic"] = -(-(1 << 20) // args["head_tiles"])
        values["x_pitch"] = self._heads_pitch(args["for"])
        self._tap(values, "dst", args["dst"])
        self._mla_reduce(row, values)

    def _argmax(self, row: Row, values: dict):
        values |= {"part": self.schedule.extras["best"].start, "vocab_start": row.args["vocab_start"]}
        values["total"] = min(row.args["tiles"], self.schedule.shape.sms)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
