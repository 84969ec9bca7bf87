"""What the kernel is compiled for: sizes of one configuration, and the shared memory of one SM laid out for them."""

from dataclasses import dataclass

CONSUMER_WARPS = 16
CONSUMERS = CONSUMER_WARPS * 32
THREADS = CONSUMERS + 32  # one more warp streams
SLOT_BYTES = 20480  # two pieces of up to 20 bfloat16 blocks
STATE_BYTES = 16384  # of a recurrent state in one slot
SHARED_BYTES = 232448  # most that a block may have, sm_90 and sm_100
FIELD_WORDS = 64  # words of a table row
MAX_SPLITS = 32  # parts of a sequence in mla_decode
SPLIT_TOKENS = 64
DECODE_TOKENS = 128  # tokens that mla_decode scores at a time
MAX_BANK = 8
PAIRS = CONSUMER_WARPS // 2  # a slot of the ring belongs to two warps, one piece each; so many slots at most
PICKS = 16  # experts of a batch row at most
MAX_PICKS = 128  # distinct experts of one step


@dataclass(frozen=True)
class KernelShape:
    """All build parameters; equal shapes are the same binary."""

    rows: int
    hidden_size: int
    kda_heads: int
    kda_head_dim: int
    mla_heads: int
    kv_lora_rank: int
    qk_nope_dim: int
    qk_rope_dim: int
    num_experts: int
    top_k: int
    mxfp4: bool
    x_bytes: int
    sms: int
    slots: int
    delay: bool = False  # every warp sleeps a pseudo-random time before each row
    trace: bool = False

    @property
    def sums(self) -> int:
        """Partial sums of 8 outputs of all batch rows that are kept at a time."""
        return max(64, 256 // self.rows)

    @property
    def block_bytes(self) -> int:
        return 272 if self.mxfp4 else 512


@dataclass(frozen=True)
class Pieces:
    """How tiles of `kb` blocks are cut among warps: a piece is `blocks` of a tile, or `tiles` whole tiles."""

    blocks: int
    per_tile: int
    tiles: int

    @classmethod
    def of(cls, kb: int, mxfp4: bool) -> "Pieces":
        most = 14 if mxfp4 else SLOT_BYTES // 1024  # blocks of half a slot; MXFP4 fewer, for it is work to decode
        if kb <= most:
            return cls(kb, 1, most // kb)
        blocks = next(size for size in range(most, 0, -1) if kb % size == 0)
        return cls(blocks, kb // blocks, 1)


@dataclass(frozen=True)
class SharedLayout:
    """Byte offsets into the shared memory of one SM."""

    full: int
    empty: int
    ids_ready: int
    ids_free: int
    zero: int
    row: int
    slots: int
    scratch: int
    ids: int
    slot_of: int
    pick_weights: int
    local: int
    sums: int
    x: int
    ring: int
    end: int

    @classmethod
    def of(cls, s: KernelShape) -> "SharedLayout":
        sizes = {
            "full": 8 * 32,
            "empty": 8 * 32,
            "ids_ready": 8,
            "ids_free": 8,
            "zero": 512,
            "row": 3 * 4 * FIELD_WORDS,  # two of the consumers in turn, one of the streaming warp
            "slots": 64,  # of each batch row: slot or -1, whether its state starts from zero
            "scratch": 2048,
            "ids": 4 * (MAX_PICKS + 4),
            "slot_of": 8 * MAX_PICKS,
            "pick_weights": 4 * 8 * 32,
            "local": 4 * (9 * s.kda_head_dim + 32),
            "sums": max(2 * s.sums * s.rows * 32, 4 * 16 * DECODE_TOKENS),
            "x": s.x_bytes,
            "ring": s.slots * SLOT_BYTES,
        }
        offsets, at = {}, 0
        for name, size in sizes.items():
            at = -(-at // 128) * 128
            offsets[name] = at
            at += size
        return cls(**offsets, end=at)


def most_slots(shape_without_slots: KernelShape) -> int:
    """Ring slots that fit beside everything else."""
    from dataclasses import replace

    used = SharedLayout.of(replace(shape_without_slots, slots=0)).end
    return min(PAIRS, (SHARED_BYTES - -(-used // 128) * 128) // SLOT_BYTES)
