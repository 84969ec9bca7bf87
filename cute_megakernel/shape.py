"""What the kernel is compiled for: sizes of one configuration, and the shared memory of one SM laid out for them."""

from dataclasses import dataclass

CONSUMER_WARPS = 16
CONSUMERS = CONSUMER_WARPS * 32
THREADS = CONSUMERS + 32  # one more warp streams
SLOT_BYTES = 16384
SHARED_BYTES = 232448  # most that a block may have, sm_90 and sm_100
FIELD_WORDS = 64  # words of a table row
MAX_SPLITS = 32  # parts of a sequence in mla_decode
SPLIT_TOKENS = 64
DECODE_TOKENS = 128  # tokens that mla_decode scores at a time
MAX_BANK = 8
CHUNK = 4  # blocks that one warp takes in a row, of all other projections
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
    up_chunk: int  # blocks of a tile that one warp takes in a row: moe_gate_up
    down_chunk: int  # moe_down
    x_bytes: int
    sms: int
    slots: int
    delay_seed: int = 0  # > 0: every warp sleeps a pseudo-random time before each row
    trace: bool = False

    @property
    def tiles_in_group(self) -> int:
        """Tiles whose partial sums are added up together."""
        return 8 if self.rows <= 2 else 4

    @property
    def block_bytes(self) -> int:
        return 272 if self.mxfp4 else 512


def expert_chunk(width: int, mxfp4: bool) -> int:
    """Most blocks in a row for a warp, up to 4, that divide the blocks of `width` inputs."""
    blocks = -(-width // (64 if mxfp4 else 32))
    return next(chunk for chunk in (4, 3, 2, 1) if blocks % chunk == 0 and (mxfp4 or chunk != 3))


@dataclass(frozen=True)
class SharedLayout:
    """Byte offsets into the shared memory of one SM."""

    full: int
    empty: int
    ids_ready: int
    ids_free: int
    zero: int
    row: int
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
            "scratch": 2048,
            "ids": 4 * (MAX_PICKS + 4),
            "slot_of": 8 * MAX_PICKS,
            "pick_weights": 4 * 8 * 32,
            "local": 4 * (9 * s.kda_head_dim + 32),
            "sums": max(2 * s.tiles_in_group * CONSUMER_WARPS * s.rows * 32, 4 * 16 * DECODE_TOKENS),
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
    return min(32, (SHARED_BYTES - -(-used // 128) * 128) // SLOT_BYTES)
