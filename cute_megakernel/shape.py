"""What the kernel is compiled for: sizes of one configuration, and the shared memory of one SM laid out for them."""

from dataclasses import dataclass

CONSUMER_WARPS = 16
CONSUMERS = CONSUMER_WARPS * 32
THREADS = CONSUMERS + 32  # one more warp streams
SLOT_BYTES = 20480  # two pieces
MXFP4_PIECE = 28  # blocks at most, 7616 bytes: fewer than fit, for they are work to decode
STATE_BYTES = 16384  # of a head's recurrent state, or of its tiles of a projection, in one slot
SHARED_BYTES = 232448  # most that a block may have, sm_90 and sm_100
FIELD_WORDS = 64  # words of a table row
GROUP_HEADS = 16  # heads of a unit of mla_decode
SLOT_TOKENS = 16  # cached tokens in one slot
SHORT_PART, PART = 64, 128  # tokens of a part of mla_decode: of a short sequence, and at least of a long one
DIRECT_PARTS = 16  # parts of a short sequence, which every SM puts together for itself
SUM_COLUMNS, SUM_PARTS = 64, 8  # of these parts of a head a warp adds up so many columns
SCORES_PITCH = 272  # bytes of a head's scores of one turn, and of its probabilities: 8 rows start in different banks
SCORE_GROUPS = 4  # of warps: each has a part of the columns
MAX_BANK = 8
PAIRS = CONSUMER_WARPS // 2  # a slot of the ring belongs to two warps, one piece each; so many slots at most
MOST_BLOCKS = SLOT_BYTES // 2 // 512 - 1  # bfloat16 blocks of a piece, with room for the pitch of its rows
PICKS = 16  # experts of a batch row at most
MAX_PICKS = 128  # distinct experts of one step


def mix_quads(hidden_size: int) -> int:
    """Groups of four columns that a thread holds in a mix."""
    return -(-hidden_size // (4 * CONSUMERS))


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
    low_rank_gate: bool = False  # the output gate of a KDA head comes by way of g_b
    delay: bool = False  # every warp sleeps a pseudo-random time before each row
    trace: bool = False

    @property
    def sums(self) -> int:
        """Partial sums of 8 outputs of all batch rows that are kept at a time: at least those of a tile of K3's dense
        layer, uncut."""
        return max(66, 256 // self.rows)

    @property
    def block_bytes(self) -> int:
        return 272 if self.mxfp4 else 512

    @property
    def head_groups(self) -> int:
        return -(-self.mla_heads // GROUP_HEADS)

    @property
    def splits(self) -> int:
        """Parts of a sequence at most, a power of two: enough units for the SMs of one GPU."""
        return max(DIRECT_PARTS, 128 >> (self.head_groups - 1).bit_length())

    @property
    def latent_bytes(self) -> int:
        """Of a cached row."""
        return 2 * (self.kv_lora_rank + self.qk_rope_dim)

    @property
    def latent_pitch(self) -> int:
        """From a cached row, or a query, to the next in shared memory: 8 of them start in different banks."""
        return self.latent_bytes + 16

    @property
    def turn_slots(self) -> int:
        """Slots of cached rows that mla_decode works on at a time, while the others are filled."""
        return min(4, (self.slots + 1) // 2)

    @property
    def sum_slices(self) -> int:
        """Slices of a head's columns that an SM puts together at a time where there are more than DIRECT_PARTS."""
        return CONSUMER_WARPS * SUM_PARTS // self.splits


@dataclass(frozen=True)
class Pieces:
    """How tiles of `kb` blocks are cut among warps: a piece is `blocks` of a tile, or `tiles` whole tiles.

    A bfloat16 tile lies in a slot as 8 rows, `pitch` bytes apart: an odd multiple of 64, for the banks. Where a tile
    has an even number of pieces, the two of a slot lie side by side in its rows (`copy` bytes each), else one behind
    the other; the second begins at `second`.
    """

    blocks: int
    per_tile: int
    tiles: int

    @classmethod
    def of(cls, kb: int, mxfp4: bool) -> "Pieces":
        most = MXFP4_PIECE if mxfp4 else MOST_BLOCKS  # blocks of half a slot
        if kb <= most:
            return cls(kb, 1, most // kb if mxfp4 else SLOT_BYTES // 2 // (8 * row_pitch(64 * kb)))
        blocks = next(size for size in range(most, 0, -1) if kb % size == 0)
        return cls(blocks, kb // blocks, 1)

    @property
    def copy(self) -> int:
        return 64 * self.blocks * (2 if self.per_tile % 2 == 0 else 1)

    @property
    def pitch(self) -> int:
        return row_pitch(self.copy)

    @property
    def second(self) -> int:
        return 64 * self.blocks if self.per_tile % 2 == 0 else 8 * self.tiles * self.pitch


def row_pitch(nbytes: int) -> int:
    return nbytes if nbytes % 128 else nbytes + 64


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
            "slots": 96,  # of each batch row: slot or -1, whether its state starts from zero; then the lengths
            "scratch": 2048,
            "ids": 4 * (MAX_PICKS + 4),
            "slot_of": 8 * MAX_PICKS,
            "pick_weights": 4 * 8 * 32,
            "local": 4 * (9 * s.kda_head_dim + 32),
            "sums": max(2 * s.sums * s.rows * 32, SCORE_GROUPS * GROUP_HEADS * SCORES_PITCH),
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
