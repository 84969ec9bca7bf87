"""mla_kv_append of one batch row, by one warp: RMSNorm of the latent, the extra dims as they are, to the last position.

Behind it a word tells mla_decode that the row is there.

Source   DESIGN.md section 5
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_megakernel import ptx
from cute_megakernel.core import Fields, Sm, address_of, float_of, poll_word, rms_scale, warp_sum, word_address
from cute_megakernel.stages.mla_cache import seq_len


@cute.jit
def mla_kv_append(sm: Sm, f: Fields, r: Int32):
    """One warp: RMSNorm of the latent, the extra dims as they are, to the last position of the sequence."""
    L, width = sm.shape.kv_lora_rank, sm.shape.kv_lora_rank + sm.shape.qk_rope_dim
    pairs = -(-width // 64)
    if sm.warp == 0:
        values = cute.make_rmem_tensor(pairs, Int32)
        squares = Float32(0.0)
        for j in cutlass.range_constexpr(pairs):
            p = sm.lane + 32 * j
            values[j] = Int32(0)
            if p < width // 2:
                values[j] = poll_word(sm, f.number, f["src"] + r * f["src_pitch"] + p, sm.tag)
            if p < L // 2:
                a, b = ptx.low_bf16(values[j]), ptx.high_bf16(values[j])
                squares = squares + (a * a + b * b)
        scale = rms_scale(warp_sum(squares), Float32(L), float_of(f, "eps"))
        position = seq_len(sm, r) - 1
        page = Int32(-1)
        if position >= 0:
            at = Int64(r) * Int64(sm.batch["max_pages"]) + position // f["page_size"]
            page = ptx.ld_table(sm.batch["page_table"] + at * 4)
        if (page >= 0) & (page < f["pool_count"]):
            row = address_of(f, "pool") + (Int64(page) * f["page_size"] + position % f["page_size"]) * (2 * width)
            for j in cutlass.range_constexpr(pairs):
                p = sm.lane + 32 * j
                word = values[j]
                if p < L // 2:
                    w = ptx.ld_table(address_of(f, "weight") + Int64(p) * 4)
                    word = ptx.pack_bf16(
                        ptx.low_bf16(word) * scale * ptx.low_bf16(w), ptx.high_bf16(word) * scale * ptx.high_bf16(w)
                    )
                if p < width // 2:
                    ptx.st_global_b32(row + Int64(p) * 4, word)
        ptx.fence_gpu()
        ptx.sync_warp()
        if sm.lane == 0:
            ptx.st_word(word_address(sm, f["flag"] + r), Int32(0), sm.tag)
