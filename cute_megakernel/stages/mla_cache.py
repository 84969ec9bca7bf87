"""What the MLA rows share: where a cached token is, and into how many parts a sequence is cut.

Up to 32 parts of a sequence, 64 tokens or more each, are attended to by different SMs, 16 heads at a time; how many is
a matter of the length of the sequence alone, so a row does not depend on its neighbours. A part leaves, for each head,

    ml    largest score, sum of exp(score - largest)
    part  sum of exp(score - largest) * latent             both float32
"""

import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_megakernel import ptx
from cute_megakernel.core import Fields, Sm, address_of
from cute_megakernel.shape import MAX_SPLITS, SPLIT_TOKENS

NO_SCORE = -1.0e30


@cute.jit
def split(length: Int32):
    """Tokens of a part, a multiple of 8, and the number of parts."""
    parts = (length + SPLIT_TOKENS - 1) // SPLIT_TOKENS
    parts = ptx.select(parts > MAX_SPLITS, Int32(MAX_SPLITS), parts)
    parts = ptx.select(parts < 1, Int32(1), parts)
    tokens = ((length + parts - 1) // parts + 7) // 8 * 8
    tokens = ptx.select(tokens < 8, Int32(8), tokens)
    return tokens, (length + tokens - 1) // tokens


@cute.jit
def row_address(sm: Sm, f: Fields, r: Int32, position: Int32) -> Int64:
    """The cached row of a token; a page outside the pool counts as page 0."""
    page = ptx.ld_table(
        sm.batch["page_table"] + (Int64(r) * Int64(sm.batch["max_pages"]) + position // f["page_size"]) * 4
    )
    page = ptx.select((page >= 0) & (page < f["pool_count"]), page, Int32(0))
    width = sm.shape.kv_lora_rank + sm.shape.qk_rope_dim
    return address_of(f, "pool") + (Int64(page) * f["page_size"] + position % f["page_size"]) * (2 * width)


def seq_len(sm: Sm, r: Int32) -> Int32:
    return ptx.ld_table(sm.batch["seq_lens"] + Int64(r) * 4)
