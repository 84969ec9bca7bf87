"""The kernel: every SM walks the table once. One warp streams weights through the ring, sixteen consume them.

    launcher(shape) is what `build.py` compiles; `launch.py` launches its machine code, `megakernel.py` owns the memory.

Control words, int32: [0] launches so far, [1] SMs that entered, [2] error (0: none, else (row << 12 | SM) + 1),
[3] SMs that left. The last SM to leave makes the next launch possible.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64

from cute_megakernel import ptx
from cute_megakernel.core import Fields, Sm, fetch_row, region, sync
from cute_megakernel.launch import OVERLAP, TAGS_A_LAUNCH
from cute_megakernel.rows import Code
from cute_megakernel.shape import CONSUMER_WARPS, CONSUMERS, FIELD_WORDS, THREADS, KernelShape, SharedLayout
from cute_megakernel.stages.argmax import argmax
from cute_megakernel.stages.bank_scores import bank_scores
from cute_megakernel.stages.kda_head import kda_head
from cute_megakernel.stages.linear import linear
from cute_megakernel.stages.mix import mix
from cute_megakernel.stages.mla_combine import mla_combine
from cute_megakernel.stages.mla_decode import mla_decode
from cute_megakernel.stages.mla_kv_append import mla_kv_append
from cute_megakernel.stages.mla_reduce import mla_reduce
from cute_megakernel.stages.moe_down import moe_down
from cute_megakernel.stages.moe_gate_up import moe_gate_up
from cute_megakernel.stages.moe_router import moe_router
from cute_megakernel.stream import stream


def launcher(shape: KernelShape):
    """The function to compile for `shape`; its arguments are those of `launch.py`, and a stream."""
    layout = SharedLayout.of(shape)

    @cute.kernel
    def decode_step(
        fields: Int64, work: Int64, words: Int64, control: Int64, tokens: Int64, slots: Int64, is_new: Int64,
        seq_lens: Int64, page_table: Int64, next_tokens: Int64, next_values: Int64, trace: Int64,
        rows: Int32, first_row: Int32, end_row: Int32, first_moe: Int32, max_pages: Int32, first_valid_slot: Int32,
        poll_ns: Int32, delay_seed: Int32, limit_ns: Int64,
    ):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        lane = ptx.opaque(thread % 32)
        thread, block = ptx.opaque(thread), ptx.opaque(block)
        smem = ptx.opaque(cute.arch.get_dyn_smem(Int32, 128).toint())
        batch = {
            "tokens": tokens, "slots": slots, "is_new": is_new, "seq_lens": seq_lens, "page_table": page_table,
            "next_tokens": next_tokens, "next_values": next_values, "max_pages": max_pages,
            "first_valid_slot": first_valid_slot, "trace": trace, "poll_ns": poll_ns,
            "rows": rows,
            "first_row": first_row, "end_row": end_row, "first_moe": first_moe, "delay_seed": delay_seed,
        }  # fmt: skip
        tag = (ptx.ld_fresh_b32(control) + 1) * TAGS_A_LAUNCH
        sm = Sm(
            shape=shape, layout=layout, smem=smem, words=words, control=control, tag=tag,
            deadline=ptx.now_ns() + limit_ns, block=block, thread=thread, warp=warp, lane=lane,
            group=ptx.opaque(lane // 4), quad=ptx.opaque(lane % 4), batch=batch,
        )  # fmt: skip
        _prepare(sm)
        if _enter(sm) != 0:
            if warp < CONSUMER_WARPS:
                _consume(sm, fields, work + Int64(block) * Int64(rows) * 16)
            else:
                stream(sm, fields, work + Int64(block) * Int64(rows) * 16)
            ptx.bar_sync(2, THREADS)
            _leave(sm)

    @cute.jit
    def launch(
        fields: Int64, work: Int64, words: Int64, control: Int64, tokens: Int64, slots: Int64, is_new: Int64,
        seq_lens: Int64, page_table: Int64, next_tokens: Int64, next_values: Int64, trace: Int64,
        rows: Int32, first_row: Int32, end_row: Int32, first_moe: Int32, max_pages: Int32, first_valid_slot: Int32,
        poll_ns: Int32, delay_seed: Int32, limit_ns: Int64, stream_handle: CUstream,
    ):  # fmt: skip
        decode_step(
            fields, work, words, control, tokens, slots, is_new, seq_lens, page_table, next_tokens, next_values,
            trace, rows, first_row, end_row, first_moe, max_pages, first_valid_slot, poll_ns, delay_seed,
            limit_ns,
        ).launch(
            grid=[shape.sms, 1, 1], block=[THREADS, 1, 1], smem=layout.end, stream=stream_handle, cooperative=True
        )  # fmt: skip

    return launch


@cute.jit
def _prepare(sm: Sm):
    """Barriers, zeros, and the slots of the batch rows."""
    if sm.thread == 0:
        for i in range(sm.shape.slots):
            ptx.mbarrier_init(region(sm, "full") + i * 8, 1)
            ptx.mbarrier_init(region(sm, "empty") + i * 8, 2)
        ptx.mbarrier_init(region(sm, "ids_ready"), 1)
        ptx.mbarrier_init(region(sm, "ids_free"), 1)
        ptx.fence_barrier_init()
    if sm.thread < sm.shape.rows:
        slot = ptx.ld_table(sm.batch["slots"] + Int64(sm.thread) * 4)
        fresh = ptx.ld_global_u8(sm.batch["is_new"] + Int64(sm.thread))
        slot = ptx.select(slot >= sm.batch["first_valid_slot"], slot, Int32(-1))
        ptx.st_shared_v2_b32(region(sm, "slots") + sm.thread * 8, slot, fresh)
        length = ptx.ld_table(sm.batch["seq_lens"] + Int64(sm.thread) * 4)
        ptx.st_shared_b32(region(sm, "slots") + 64 + sm.thread * 4, length)
    if sm.thread < 128:
        ptx.st_shared_b32(region(sm, "zero") + sm.thread * 4, Int32(0))


@cute.jit
def _enter(sm: Sm) -> Int32:
    """Counts this SM in. 0: the instance is already running in another launch, which this one must not disturb."""
    if sm.thread == 0:
        order = ptx.atomic_add(sm.control + 4, Int32(1))
        alone = ptx.select(order < sm.shape.sms, Int32(1), Int32(0))
        if alone == 0:
            ptx.atomic_claim(sm.control + 8, Int32(OVERLAP))
        ptx.st_shared_b32(region(sm, "scratch") + 2044, alone)
    ptx.bar_sync(2, THREADS)
    return ptx.ld_shared_b32(region(sm, "scratch") + 2044)


@cute.jit
def _leave(sm: Sm):
    if sm.thread == 0:
        order = ptx.atomic_add(sm.control + 12, Int32(1))
        if order == sm.shape.sms - 1:
            if sm.batch["end_row"] == sm.batch["rows"]:  # else the step goes on in the next launch, with the same tag
                ptx.st_global_b32(sm.control, ptx.ld_fresh_b32(sm.control) + 1)
            ptx.st_global_b32(sm.control + 4, Int32(0))
            ptx.st_global_b32(sm.control + 12, Int32(0))


@cute.jit
def _consume(sm: Sm, fields: Int64, work: Int64):
    """The consumer warps: row after row, the next row's words on their way meanwhile."""
    pos, turn, row, rows = Int32(0), Int32(0), sm.batch["first_row"], sm.batch["end_row"]
    low, high, first, end, _ = fetch_row(sm, fields, work, row)
    while row < rows:
        following = ptx.select(row + 1 < rows, row + 1, row)
        next_low, next_high, next_first, next_end, _ = fetch_row(sm, fields, work, following)
        if first < end:
            f = Fields(region(sm, "row") + turn * (4 * FIELD_WORDS), row)
            if cutlass.const_expr(sm.shape.delay):
                delay(sm, row)
            if sm.warp == 0:
                ptx.st_shared_v2_b32(region(sm, "row") + turn * (4 * FIELD_WORDS) + sm.lane * 8, low, high)
            sync(sm)
            _mark(sm, row, 0)
            pos = _do(sm, f, pos, first, end)
            _mark(sm, row, 1)
            turn = turn ^ 1
        low, high, first, end = next_low, next_high, next_first, next_end
        row += 1


@cute.jit
def _do(sm: Sm, f: Fields, pos: Int32, first: Int32, end: Int32) -> Int32:
    """One row. -> position in the ring behind it"""
    code = f["code"]
    if code == Code.MIX:
        mix(sm, f)
    elif code == Code.LINEAR:
        pos = linear(sm, f, pos, first, end)
    elif code == Code.MOE_GATE_UP:
        pos = moe_gate_up(sm, f, pos)
    elif code == Code.MOE_DOWN:
        pos = moe_down(sm, f, pos, first, end)
    elif code == Code.MOE_ROUTER:
        moe_router(sm, f)
    elif code == Code.KDA_HEAD:
        pos = kda_head(sm, f, pos, first)
    elif code == Code.BANK_SCORES:
        bank_scores(sm, f, first, end)
    elif code == Code.MLA_KV_APPEND:
        for r in range(first, end):
            mla_kv_append(sm, f, r)
    elif code == Code.MLA_DECODE:
        pos = mla_decode(sm, f, pos)
    elif code == Code.MLA_REDUCE:
        mla_reduce(sm, f)
    elif code == Code.MLA_COMBINE:
        mla_combine(sm, f, first, end)
    elif code == Code.ARGMAX:
        argmax(sm, f)
    return pos


@cute.jit
def delay(sm: Sm, row: Int32):
    """Sleeps up to 16 us, differently for each row, SM, warp, launch and seed."""
    mixed = row * 7919 + sm.block * 104729 + sm.warp * 1299709 + sm.tag * 86028121 + sm.batch["delay_seed"] * 15485863
    mixed = mixed * 747796405 + 12345
    ptx.sleep_ns((mixed >> 12) & 0x3FFF)


@cute.jit
def _mark(sm: Sm, row: Int32, which: cutlass.Constexpr):
    if cutlass.const_expr(sm.shape.trace):
        if sm.thread == 0:
            at = (Int64(sm.block) * Int64(sm.batch["rows"]) + Int64(row)) * 16 + which * 8
            ptx.st_global_b64(sm.batch["trace"] + at, ptx.now_ns())


assert CONSUMERS + 32 == THREADS
