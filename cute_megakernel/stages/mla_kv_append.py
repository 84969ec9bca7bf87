"""mla_kv_append of one batch row, by one warp: RMSNorm of the latent, the extra dims as they are, to the last position.

Nobody waits for it: in this launch, mla_decode makes the newest row for itself.

Source   DESIGN.md section 5
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_megakernel import ptx
from cute_megakernel.core import Fields, Sm, address_of
from cute_megakernel.stages.mla_cache import make_latent, seq_len, steps


@cute.jit
def mla_kv_append(sm: Sm, f: Fields, r: Int32):
    if sm.warp == 0:
        L, last = sm.shape.kv_lora_rank, steps(sm)
        words = cute.make_rmem_tensor(2 * last + 2, Int32)
        make_latent(sm, f, r, words)
        position = seq_len(sm, r) - 1
        page = Int32(-1)
        if position >= 0:
            at = Int64(r) * Int64(sm.batch["max_pages"]) + position // f["page_size"]
            page = ptx.ld_table(sm.batch["page_table"] + at * 4)
        if (page >= 0) & (page < f["pool_count"]):
            place = Int64(page) * f["page_size"] + position % f["page_size"]
            row = address_of(f, "pool") + place * sm.shape.latent_bytes + Int64(sm.lane) * 8
            for j in cutlass.range_constexpr(last):
                if sm.lane + 32 * j < L // 4:
                    ptx.st_global_v2_b32(row + 256 * j, words[2 * j], words[2 * j + 1])
            if sm.lane < sm.shape.qk_rope_dim // 4:
                ptx.st_global_v2_b32(row + 2 * L, words[2 * last], words[2 * last + 1])
