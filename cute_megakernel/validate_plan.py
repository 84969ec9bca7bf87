"""What the kernel assumes about sizes: shared memory, loops over threads, alignment of words, int32 fields."""

from cute_megakernel.lowering import BF16_BLOCK_BYTES
from cute_megakernel.rows import STREAMED, Code, Epilogue, Row
from cute_megakernel.schedule import Schedule
from cute_megakernel.schedule_error import expect, label
from cute_megakernel.shape import (
    CONSUMER_WARPS,
    CONSUMERS,
    DIRECT_PARTS,
    GROUP_HEADS,
    MAX_BANK,
    MAX_PICKS,
    PAIRS,
    PICKS,
    SHARED_BYTES,
    SLOT_BYTES,
    SLOT_TOKENS,
    STATE_BYTES,
    SUM_COLUMNS,
    SharedLayout,
    mix_quads,
)
from cute_megakernel.table_view import Fields, TableView

MAX_EXPERTS = 1024  # bits of the router's map, one word a lane
INT32 = range(-(2**31), 2**31)


def check_plan(schedule: Schedule, view: TableView) -> None:
    shape = schedule.shape
    layout = SharedLayout.of(shape)
    expect(layout.end <= SHARED_BYTES, "shared memory", f"{layout.end} bytes are needed, {SHARED_BYTES} are there")
    expect(1 <= shape.slots <= PAIRS, "ring", f"{shape.slots} slots, not 1 to {PAIRS}: each has two warps of its own")
    expect(1 <= shape.rows <= 8, "batch", f"{shape.rows} rows, not 1 to 8")
    dim = shape.kda_head_dim
    fine = dim in (32, 64, 128) and STATE_BYTES % (4 * dim * (dim // CONSUMER_WARPS)) == 0
    expect(fine, "kda", f"head dim {dim} does not divide over the warps")
    held = not shape.low_rank_gate or shape.slots * STATE_BYTES >= 2 * dim * dim
    expect(held, "ring", f"{shape.slots} slots do not hold the tiles of g_b of a head")
    expect(
        shape.rows * shape.top_k <= MAX_PICKS,
        "router",
        f"{shape.rows} rows of {shape.top_k} experts are more than {MAX_PICKS}",
    )
    expect(
        shape.top_k <= PICKS and shape.num_experts <= MAX_EXPERTS,
        "router",
        "more picks or experts than it has room for",
    )
    for number, (row, f) in enumerate(zip(schedule.rows, view.rows, strict=True)):
        where = label(number, row)
        expect(all(word in INT32 for word in f.words), where, "a field does not fit 32 bits")
        expect(0 <= row.rows[0] < row.rows[1] <= shape.rows, where, f"serves batch rows {row.rows} of {shape.rows}")
        if row.code == Code.MIX:
            _check_mix(schedule, row, f, where)
        elif row.code == Code.KDA_HEAD:
            _check_head(schedule, row, f, where)
        elif row.code in STREAMED:
            _check_tiles(schedule, number, row, f, where)
        elif row.code == Code.MOE_ROUTER:
            same = (row.args["top_k"], row.args["experts"]) == (shape.top_k, shape.num_experts)
            expect(same, where, "picks or experts are not those that the kernel is built for")
        elif row.code == Code.MLA_DECODE:
            _check_decode(schedule, row, f, where)
        elif row.code == Code.MLA_COMBINE:
            largest = shape.mla_heads * f["groups"]
            exact = all(tile * f["magic"] >> 20 == tile // f["groups"] for tile in range(largest))
            expect(exact and largest * f["magic"] < 2**31, where, "tiles are too many to be divided by those of a head")
            used = (row.rows[1] - row.rows[0]) * f["x_pitch"]
            expect(used <= shape.x_bytes, where, f"its heads take {used} of {shape.x_bytes} bytes")


def _check_mix(schedule: Schedule, row: Row, f: Fields, where: str) -> None:
    shape, width = schedule.shape, f["width"]
    used = f["x_at"] + (row.rows[1] - row.rows[0]) * f["x_pitch"]
    expect(used <= shape.x_bytes, where, f"x takes {used} of {shape.x_bytes} bytes")
    quads = mix_quads(shape.hidden_size)
    expect(
        not f["kind"] or width <= 4 * CONSUMERS * quads,
        where,
        f"{width} columns, the threads hold {4 * CONSUMERS * quads}",
    )
    expect(f["norm"] == 0 or width % 8 == 0, where, f"{width} columns: weights of norms are sent for by 16 bytes")
    expect(width % 4 == 0 and f["group"] % 4 == 0 and f["group_pad"] % 4 == 0, where, "columns do not come in fours")
    expect(width % f["group"] == 0 and f["group"] <= f["group_pad"], where, "groups do not fill the row")
    expect(2 * (width // f["group"]) * f["group_pad"] <= f["x_pitch"], where, "a row of x runs into the next")
    expect(not f["kind"] or width % (4 * quads) == 0, where, f"{width} columns do not divide into {quads} parts")
    for name in ("src", "dst", "h"):
        expect(f[name] < 0 or f[name] % 2 == 0, where, f"{name} starts inside a pair of words")
    for name in ("src_pitch", "dst_pitch"):
        expect(f[name] % 2 == 0, where, f"{name} is odd")
    expect(f["n_bank"] <= MAX_BANK, where, f"{f['n_bank']} bank rows, at most {MAX_BANK}")


def _check_head(schedule: Schedule, row: Row, f: Fields, where: str) -> None:
    """Words in pairs, all of them in rows of one pitch, and projections as wide as a head."""
    shape = schedule.shape
    pairs = all(f[name] % 2 == 0 for name in ("src_pitch", "dst", "dst_pitch", "f_a", "gate"))
    expect(pairs, where, "words do not come in pairs")
    expect(len({view.buffer.index for view in row.reads}) == 1, where, "its inputs are not parts of one activation")
    size = [shape.kda_heads * shape.kda_head_dim, shape.kda_head_dim]
    weights = [f.subject(name) for name in ("f_b", "g_b")[: 1 + shape.low_rank_gate]]
    fine = all(weight is not None and list(weight.shape) == size for weight in weights)
    expect(fine, where, f"projections are not {size}, as the kernel is built for")
    expect(shape.low_rank_gate == (f["g_b"] != 0), where, "the output gate is not as the kernel is built for")


def _check_decode(schedule: Schedule, row: Row, f: Fields, where: str) -> None:
    """Queries and cached rows in shared memory, columns that divide over the warps, words in pairs."""
    shape, layout = schedule.shape, SharedLayout.of(schedule.shape)
    L, P, nope, pitch = shape.kv_lora_rank, shape.qk_rope_dim, shape.qk_nope_dim, shape.latent_pitch
    queries = GROUP_HEADS * pitch
    expect(queries <= shape.x_bytes, where, f"{GROUP_HEADS} queries take {queries} of {shape.x_bytes} bytes")
    expect(SLOT_TOKENS * pitch <= SLOT_BYTES, where, f"{SLOT_TOKENS} cached rows do not fit a slot")
    expect(pitch <= layout.sums - layout.local, where, "the newest row does not fit")
    expect(row.rows == (0, shape.rows), where, "does not serve all batch rows")
    pairs = -(-L // (16 * CONSUMER_WARPS))
    fine = L % (16 * pairs) == 0 and P % 16 == 0 and P <= 128 and L <= DIRECT_PARTS * SUM_COLUMNS // 2
    expect(fine, where, f"{L} and {P} columns do not divide over the warps")
    even = all(f[name] % 2 == 0 for name in ("src", "src_pitch", "rope", "rope_pitch", "ckv", "ckv_pitch"))
    expect(even and nope % 4 == 0, where, "words do not come in pairs")


def _check_tiles(schedule: Schedule, number: int, row: Row, f: Fields, where: str) -> None:
    """The loops over tiles and the areas for their sums."""
    shape = schedule.shape
    most = max(0, *(share[number][1] - share[number][0] for share in schedule.work))
    if row.code == Code.MOE_GATE_UP:
        most = -(-min(MAX_PICKS, shape.rows * shape.top_k, shape.num_experts) * f["total"] // shape.sms)
    _check_pieces(schedule, f, most, where)
    if row.code == Code.MOE_DOWN:
        room = min(2 * shape.sums // (PICKS * f["ppt"]), CONSUMERS // (8 * shape.rows))
        expect(most <= room, where, f"{most} tiles are too many for one SM, its sums have room for {room}")
        padded = f["kb"] * (64 if shape.mxfp4 else 32)
        expect(padded <= f["group_pad"], where, "weights reach past their inputs")
    if row.code == Code.MOE_GATE_UP:
        padded = -(-row.x.width // 64) * 64
        expect(f["kb"] * (64 if shape.mxfp4 else 32) <= padded, where, "weights reach past their inputs")
        expect(f["n_valid"] % 8 == 0, where, "outputs are no whole tiles")
    if row.code != Code.LINEAR:
        return
    batches, padded = row.units // f["batch_tiles"], -(-row.x.width // 64) * 64
    if not f["local"]:
        last = (batches - 1) * f["x_batch"] + 64 * f["kb"]
        expect(last <= 2 * padded, where, "weights reach past their inputs")
    if batches > 1:
        expect(f["n_valid"] == 8 * row.units, where, "heads of a number of outputs that is no multiple of 8")
    if f["epilogue"] in (Epilogue.SITU, Epilogue.SWIGLU, Epilogue.OUTPUT_GATE, Epilogue.LOGITS):
        expect(f["n_valid"] % 8 == 0, where, "outputs are no whole tiles")
    if f["epilogue"] == Epilogue.OUTPUT_GATE:
        expect(f["gate"] % 2 == 0 and f["gate_pitch"] % 2 == 0, where, "the gate starts inside a pair of words")


def _check_pieces(schedule: Schedule, f: Fields, most: int, where: str) -> None:
    """Tiles cut among warps: whole, two pieces in a slot, sums in their area, and the division by multiplication."""
    shape, code = schedule.shape, f["code"]
    block = BF16_BLOCK_BYTES if code == Code.LINEAR else shape.block_bytes
    whole = f["piece"] * f["ppt"] == f["kb"] and (f["ppt"] == 1 or f["tpp"] == 1)
    expect(whole, where, f"{f['ppt']} pieces of {f['piece']} blocks are no tile of {f['kb']}")
    used = 2 * f["piece"] * f["tpp"] * block
    if code == Code.LINEAR or not shape.mxfp4:
        side_by_side = f["copy"] == 128 * f["piece"]
        used = (1 if side_by_side else 2) * 8 * f["tpp"] * f["pitch"]
        rows = f["copy"] in (64 * f["piece"], 128 * f["piece"]) and f["copy"] <= f["pitch"] and f["pitch"] % 16 == 0
        second = 64 * f["piece"] if side_by_side else 8 * f["pitch"] * (1 if code == Code.MOE_GATE_UP else f["tpp"])
        expect(rows and (f["ppt"] % 2 == 0) == side_by_side, where, "rows of a piece do not lie in its slot")
        expect(f["second"] == second, where, "the second piece of a slot is elsewhere")
        expect(f["row_bytes"] % 16 == 0 and f["row_bytes"] >= 64 * f["kb"], where, "rows of weights are not aligned")
    expect(used <= SLOT_BYTES, where, "two pieces do not fit a slot")
    group, pieces = f["group_tiles"], most * f["ppt"]
    if code != Code.MOE_DOWN:
        expect(group > 0 and group % f["tpp"] == 0, where, f"{f['ppt']} pieces a tile: no tile fits the sums")
        fits = group * f["ppt"] <= shape.sums and 2 * group * shape.rows <= CONSUMERS
        expect(fits, where, f"{group} tiles do not fit the sums")
        tiles = f["tpp"] if code == Code.LINEAR else 1
        expect(f["group_pieces"] * tiles == group * f["ppt"], where, "a group's pieces are not those of its tiles")
    divisor = max(f["ppt"], f["tpp"]) if code == Code.LINEAR else f["ppt"]
    excess, largest = f["magic"] * divisor - (1 << 20), pieces + divisor
    exact = 0 <= excess and largest * excess < 1 << 20 and largest * f["magic"] < 2**31
    expect(exact, where, f"{pieces} pieces on an SM are too many to be divided by {divisor}")
    expect(pieces * f["piece"] * block < 2**31, where, "bytes of an SM do not fit 32 bits")
