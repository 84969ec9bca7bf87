"""The machine instructions the megakernel uses, one function each; every memory access of the kernel goes through here.

Addresses are plain integers: shared memory as 32-bit offsets, global memory as 64-bit addresses. All accesses are
volatile to the compiler, so program order is kept. What a whole warp or block must do together (barriers, shuffles,
votes) goes through the DSL's own operations: the compiler may copy inline assembly into both sides of a branch, and a
barrier that a warp reaches in two halves counts twice.
"""

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.cute.arch import inline_ptx


def ld_shared_b32(addr: Int32) -> Int32:
    return inline_ptx("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[addr])


def ld_shared_u16(addr: Int32) -> Int32:
    text = "{ .reg .b16 h; ld.shared.u16 h, [{$r0}]; cvt.u32.u16 {$w0}, h; }"
    return inline_ptx(text, write_only_types=[Int32], read_only_args=[addr])


def ld_shared_u8(addr: Int32) -> Int32:
    return inline_ptx("ld.shared.u8 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[addr])


def ld_shared_f32(addr: Int32) -> Float32:
    return inline_ptx("ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[addr])


def ld_shared_b64(addr: Int32) -> Int64:
    return inline_ptx("ld.shared.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[addr])


def ld_shared_v2_b32(addr: Int32):
    text = "ld.shared.v2.b32 { {$w0}, {$w1} }, [{$r0}];"
    return inline_ptx(text, write_only_types=[Int32] * 2, read_only_args=[addr])


def ld_shared_v2_f32(addr: Int32):
    text = "ld.shared.v2.f32 { {$w0}, {$w1} }, [{$r0}];"
    return inline_ptx(text, write_only_types=[Float32] * 2, read_only_args=[addr])


def ld_shared_v4_b32(addr: Int32):
    text = "ld.shared.v4.b32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];"
    return inline_ptx(text, write_only_types=[Int32] * 4, read_only_args=[addr])


def ld_shared_v4_f32(addr: Int32):
    text = "ld.shared.v4.f32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];"
    return inline_ptx(text, write_only_types=[Float32] * 4, read_only_args=[addr])


def st_shared_u8(addr: Int32, value: Int32):
    inline_ptx("st.shared.u8 [{$r0}], {$r1};", read_only_args=[addr, value])


def st_shared_b32(addr: Int32, value: Int32):
    inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[addr, value])


def st_shared_f32(addr: Int32, value: Float32):
    inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[addr, value])


def st_shared_v2_b32(addr: Int32, a: Int32, b: Int32):
    inline_ptx("st.shared.v2.b32 [{$r0}], { {$r1}, {$r2} };", read_only_args=[addr, a, b])


def st_shared_v2_f32(addr: Int32, a: Float32, b: Float32):
    inline_ptx("st.shared.v2.f32 [{$r0}], { {$r1}, {$r2} };", read_only_args=[addr, a, b])


def ld_table(addr: Int64) -> Int32:
    """A word that nothing writes during the launch; may be cached near the SM."""
    return inline_ptx("ld.global.nc.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[addr])


def ld_row(addr: Int64):
    """Two words of the table."""
    text = "ld.global.nc.v2.b32 { {$w0}, {$w1} }, [{$r0}];"
    return inline_ptx(text, write_only_types=[Int32] * 2, read_only_args=[addr])


def ld_share(addr: Int64):
    """Four words of the table."""
    text = "ld.global.nc.v4.b32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];"
    return inline_ptx(text, write_only_types=[Int32] * 4, read_only_args=[addr])


def ld_global_f32(addr: Int64) -> Float32:
    return inline_ptx("ld.global.nc.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[addr])


def ld_global_v4_f32(addr: Int64):
    text = "ld.global.nc.v4.f32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];"
    return inline_ptx(text, write_only_types=[Float32] * 4, read_only_args=[addr])


def ld_global_v2_b32(addr: Int64):
    text = "ld.global.nc.v2.b32 { {$w0}, {$w1} }, [{$r0}];"
    return inline_ptx(text, write_only_types=[Int32] * 2, read_only_args=[addr])


def ld_global_u8(addr: Int64) -> Int32:
    return inline_ptx("ld.global.nc.u8 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[addr])


def ld_global_b64(addr: Int64) -> Int64:
    return inline_ptx("ld.global.nc.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[addr])


def ld_fresh_b32(addr: Int64) -> Int32:
    """A word that other SMs may have written in this launch: read where all SMs agree, past the near cache."""
    return inline_ptx("ld.relaxed.gpu.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[addr])


def ld_fresh_u16(addr: Int64) -> Int32:
    text = "{ .reg .b16 h; ld.relaxed.gpu.global.u16 h, [{$r0}]; cvt.u32.u16 {$w0}, h; }"
    return inline_ptx(text, write_only_types=[Int32], read_only_args=[addr])


def ld_word(addr: Int64):
    """One activation word -> (payload, tag); a single 8-byte access, so that the tag vouches for the payload."""
    text = "{ .reg .b64 w; ld.relaxed.gpu.global.b64 w, [{$r0}]; mov.b64 { {$w0}, {$w1} }, w; }"
    return inline_ptx(text, write_only_types=[Int32] * 2, read_only_args=[addr])


def ld_word_pair(addr: Int64):
    """Two neighbouring activation words (16-byte aligned) -> (payload, tag, payload, tag)."""
    text = (
        "{ .reg .b64 v; .reg .b64 w; ld.relaxed.gpu.global.v2.b64 { v, w }, [{$r0}];"
        " mov.b64 { {$w0}, {$w1} }, v; mov.b64 { {$w2}, {$w3} }, w; }"
    )
    return inline_ptx(text, write_only_types=[Int32] * 4, read_only_args=[addr])


def st_word(addr: Int64, payload: Int32, tag: Int32):
    text = "{ .reg .b64 w; mov.b64 w, { {$r1}, {$r2} }; st.relaxed.gpu.global.b64 [{$r0}], w; }"
    inline_ptx(text, read_only_args=[addr, payload, tag])


def st_word_pair(addr: Int64, first: Int32, second: Int32, tag: Int32):
    text = (
        "{ .reg .b64 v; .reg .b64 w; mov.b64 v, { {$r1}, {$r3} }; mov.b64 w, { {$r2}, {$r3} };"
        " st.relaxed.gpu.global.v2.b64 [{$r0}], { v, w }; }"
    )
    inline_ptx(text, read_only_args=[addr, first, second, tag])


def st_global_b32(addr: Int64, value: Int32):
    inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[addr, value])


def st_global_v2_b32(addr: Int64, a: Int32, b: Int32):
    inline_ptx("st.global.v2.b32 [{$r0}], { {$r1}, {$r2} };", read_only_args=[addr, a, b])


def st_global_u16(addr: Int64, value: Int32):
    text = "{ .reg .b16 h; cvt.u16.u32 h, {$r1}; st.global.u16 [{$r0}], h; }"
    inline_ptx(text, read_only_args=[addr, value])


def st_global_f32(addr: Int64, value: Float32):
    inline_ptx("st.global.f32 [{$r0}], {$r1};", read_only_args=[addr, value])


def st_global_v4_f32(addr: Int64, a: Float32, b: Float32, c: Float32, d: Float32):
    text = "st.global.v4.f32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };"
    inline_ptx(text, read_only_args=[addr, a, b, c, d])


def st_global_b64(addr: Int64, value: Int64):
    inline_ptx("st.global.b64 [{$r0}], {$r1};", read_only_args=[addr, value])


def atomic_add(addr: Int64, value: Int32) -> Int32:
    text = "atom.acq_rel.gpu.global.add.u32 {$w0}, [{$r0}], {$r1};"
    return inline_ptx(text, write_only_types=[Int32], read_only_args=[addr, value])


def atomic_claim(addr: Int64, value: Int32) -> Int32:
    """Writes `value` where a zero is; returns what was there."""
    text = "atom.relaxed.gpu.global.cas.b32 {$w0}, [{$r0}], 0, {$r1};"
    return inline_ptx(text, write_only_types=[Int32], read_only_args=[addr, value])


def mbarrier_init(addr: Int32, count: int):
    inline_ptx("mbarrier.init.shared::cta.b64 [{$r0}], {$r1};", read_only_args=[addr, Int32(count)])


def mbarrier_arrive(addr: Int32):
    inline_ptx("mbarrier.arrive.release.cta.shared::cta.b64 _, [{$r0}];", read_only_args=[addr])


def mbarrier_arrive_lane0(addr: Int32, lane: Int32):
    """One arrival of the warp, behind all that its lanes read."""
    sync_warp()
    text = "{ .reg .pred p; setp.eq.s32 p, {$r1}, 0; @p mbarrier.arrive.release.cta.shared::cta.b64 _, [{$r0}]; }"
    inline_ptx(text, read_only_args=[addr, lane])


def mbarrier_expect(addr: Int32, nbytes: Int32):
    inline_ptx("mbarrier.arrive.expect_tx.shared::cta.b64 _, [{$r0}], {$r1};", read_only_args=[addr, nbytes])


def mbarrier_expect_part(addr: Int32, nbytes: Int32, last: Boolean):
    """Announces bytes of a phase; the `last` announcement is its arrival."""
    text = (
        "{ .reg .pred p; setp.ne.s32 p, {$r2}, 0;"
        " @!p mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [{$r0}], {$r1};"
        " @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [{$r0}], {$r1}; }"
    )
    inline_ptx(text, read_only_args=[addr, nbytes, Int32(last)])


def mbarrier_try_wait(addr: Int32, parity: Int32) -> Int32:
    """1 once the phase of `parity` is complete; may sleep a little before it answers 0."""
    text = (
        "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [{$r0}], {$r1};"
        " selp.b32 {$w0}, 1, 0, p; }"
    )
    return inline_ptx(text, write_only_types=[Int32], read_only_args=[addr, parity])


def bulk_copy(dst: Int32, src: Int64, nbytes: Int32, barrier: Int32):
    """Global to shared memory by the copy engine; read once, so first to leave the cache. Multiples of 16 bytes."""
    text = (
        "{ .reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"
        " cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [{$r0}], [{$r1}], {$r2}, [{$r3}], policy; }"
    )
    inline_ptx(text, read_only_args=[dst, src, nbytes, barrier])


def prefetch_line(src: Int64):
    """The line that the address is in, to the cache that all SMs share."""
    inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[src])


def fence_barrier_init():
    inline_ptx("fence.mbarrier_init.release.cluster;")


def prefetch(src: Int64, nbytes: Int32):
    """Global memory to the cache that all SMs share; both multiples of 16."""
    inline_ptx("cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};", read_only_args=[src, nbytes])


def bar_sync(barrier: int, threads: int):
    cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)


def sync_warp():
    cute.arch.sync_warp()


def shfl(value, lane: Int32):
    """`value` of another lane."""
    return cute.arch.shuffle_sync(value, lane)


def shfl_f32(value: Float32, lane: int) -> Float32:
    return cute.arch.shuffle_sync(value, lane)


def shfl_up(value: Int32, delta: int) -> Int32:
    """`value` of the lane `delta` below; of this lane where there is none."""
    return cute.arch.shuffle_sync_up(value, delta)


def max_u32(a: Int32, b: Int32) -> Int32:
    return inline_ptx("max.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b])


def above_u32(a: Int32, b: Int32, tie: Boolean) -> Boolean:
    """a > b as unsigned numbers, or equal and `tie`."""
    text = (
        "{ .reg .pred p; .reg .pred q; .reg .pred t; setp.ne.s32 t, {$r2}, 0; setp.gt.u32 p, {$r0}, {$r1};"
        " setp.eq.and.b32 q, {$r0}, {$r1}, t; or.pred p, p, q; selp.b32 {$w0}, 1, 0, p; }"
    )
    return inline_ptx(text, write_only_types=[Int32], read_only_args=[a, b, Int32(tie)]) != 0


def not_below_u32(a: Int32, b: Int32) -> Boolean:
    text = "{ .reg .pred p; setp.ge.u32 p, {$r0}, {$r1}; selp.b32 {$w0}, 1, 0, p; }"
    return inline_ptx(text, write_only_types=[Int32], read_only_args=[a, b]) != 0


def ballot(condition: Boolean) -> Int32:
    return cute.arch.vote_ballot_sync(condition)


def shfl_xor(value: Float32, mask: int) -> Float32:
    return cute.arch.shuffle_sync_bfly(value, mask)


def redux_max_u32(value: Int32) -> Int32:
    return Int32(cute.arch.warp_redux_sync(Uint32(value), "umax"))


def redux_min_u32(value: Int32) -> Int32:
    return Int32(cute.arch.warp_redux_sync(Uint32(value), "umin"))


def ldmatrix(addr: Int32):
    """Four matrices of 8 rows of 16 bytes each, as operands of `mma_bf16`; each lane gives the address of one row."""
    text = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];"
    return inline_ptx(text, write_only_types=[Int32] * 4, read_only_args=[addr])


def ldmatrix_transposed(addr: Int32):
    text = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];"
    return inline_ptx(text, write_only_types=[Int32] * 4, read_only_args=[addr])


def mma_bf16(c, a, b):
    """D[16, 8] += A[16, 16] B[16, 8] on four, four and two registers."""
    text = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { {$w0}, {$w1}, {$w2}, {$w3} },"
        " { {$r0}, {$r1}, {$r2}, {$r3} }, { {$r4}, {$r5} }, { {$r6}, {$r7}, {$r8}, {$r9} };"
    )
    return inline_ptx(text, write_only_types=[Float32] * 4, read_only_args=[*a, *b, *c])


def mul_bf16x2(a: Int32, b: int) -> Int32:
    text = "{ .reg .b32 t; mov.b32 t, {$r1}; mul.rn.bf16x2 {$w0}, {$r0}, t; }"  # takes no constants
    return inline_ptx(text, write_only_types=[Int32], read_only_args=[a, Int32(b)])


def add_bf16x2(a: Int32, b: Int32) -> Int32:
    """Sums of two pairs, each rounded to nearest even."""
    return inline_ptx("add.rn.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b])


def pack_bf16(low: Float32, high: Float32) -> Int32:
    """Two floats rounded to nearest even, `low` in the low half."""
    text = "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};"
    return inline_ptx(text, write_only_types=[Int32], read_only_args=[low, high])


def low_bf16(pair: Int32) -> Float32:
    text = "{ .reg .b32 t; shl.b32 t, {$r0}, 16; mov.b32 {$w0}, t; }"
    return inline_ptx(text, write_only_types=[Float32], read_only_args=[pair])


def high_bf16(pair: Int32) -> Float32:
    text = "{ .reg .b32 t; and.b32 t, {$r0}, 0xffff0000; mov.b32 {$w0}, t; }"
    return inline_ptx(text, write_only_types=[Float32], read_only_args=[pair])


def shift_half(pair: Int32, index: Int32) -> Int32:
    """The bfloat16 of an even index (low half) or an odd one (high half), in the low half."""
    return select(index % 2 == 0, pair & 0xFFFF, (pair >> 16) & 0xFFFF)


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """a * b + c, rounded once."""
    text = "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};"
    return inline_ptx(text, write_only_types=[Float32], read_only_args=[a, b, c])


def float_bits(value: Float32) -> Int32:
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def bits_float(value: Int32) -> Float32:
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[value])


def exp2_approx(x: Float32) -> Float32:
    return inline_ptx("ex2.approx.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def log2_approx(x: Float32) -> Float32:
    return inline_ptx("lg2.approx.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def rsqrt_approx(x: Float32) -> Float32:
    return inline_ptx("rsqrt.approx.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def div_full(a: Float32, b: Float32) -> Float32:
    """a / b within 2 ulp, over the whole range."""
    return inline_ptx("div.full.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def fmax(a: Float32, b: Float32) -> Float32:
    return inline_ptx("max.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def fmax_nan(a: Float32, b: Float32) -> Float32:
    """The larger; NaN where either is."""
    return inline_ptx("max.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def fmin(a: Float32, b: Float32) -> Float32:
    return inline_ptx("min.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def abs_f32(x: Float32) -> Float32:
    return inline_ptx("abs.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def copysign(size: Float32, sign: Float32) -> Float32:
    return inline_ptx("copysign.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Float32], read_only_args=[size, sign])


def select_f32(condition: Boolean, yes: Float32, no: Float32) -> Float32:
    text = "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; selp.f32 {$w0}, {$r1}, {$r2}, p; }"
    return inline_ptx(text, write_only_types=[Float32], read_only_args=[Int32(condition), yes, no])


def smaller(a: Int32, b: Int32) -> Int32:
    return inline_ptx("min.s32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b])


def larger(a: Int32, b: Int32) -> Int32:
    return inline_ptx("max.s32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b])


def select(condition: Boolean, yes: Int32, no: Int32) -> Int32:
    text = "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; selp.b32 {$w0}, {$r1}, {$r2}, p; }"
    return inline_ptx(text, write_only_types=[Int32], read_only_args=[Int32(condition), yes, no])


def red_or_shared(addr: Int32, bits: Int32):
    inline_ptx("red.shared.or.b32 [{$r0}], {$r1};", read_only_args=[addr, bits])


def atomic_add_shared(addr: Int32, value: Int32) -> Int32:
    text = "atom.shared.add.u32 {$w0}, [{$r0}], {$r1};"
    return inline_ptx(text, write_only_types=[Int32], read_only_args=[addr, value])


def popc(value: Int32) -> Int32:
    return inline_ptx("popc.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def opaque(value: Int32) -> Int32:
    """The same value, in a register: the compiler does not compute it again where it is used."""
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def now_ns() -> Int64:
    return cute.arch.globaltimer()


def sleep_ns(ns: Int32):
    inline_ptx("nanosleep.u32 {$r0};", read_only_args=[ns])
