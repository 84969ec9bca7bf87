"""The model's numbers: one frozen dataclass, read from a Hugging Face `config.json`, and four built-in instances.

Source   config.json of moonshotai/Kimi-K3 (fields of `text_config`) and of moonshotai/Kimi-Linear-48B-A3B-Instruct.
"""

import dataclasses
from dataclasses import dataclass

import torch

TP_SIZES = (1, 2, 4, 8, 16, 32)
MXFP4_GROUP = 32


class ConfigError(ValueError):
    """A config that is incomplete, contradictory or outside what the ops support."""


@dataclass(frozen=True)
class KimiConfig:
    """All dims of one model. Unsharded; `shard(tp)` gives the sizes that one tensor-parallel rank holds.

    `mla_layers` is 0-based. `q_lora_rank`, `gate_lower_bound`, `attn_res_block_size` and `latent_size` are None
    where the family has no such thing: a direct query projection, the softplus decay gate, the plain residual, experts
    on the full hidden size.
    """

    family: str  # "k3" | "kimi-linear": names of the checkpoint tensors
    num_layers: int
    hidden_size: int  # D
    vocab_size: int  # VOCAB
    mla_layers: tuple[int, ...]
    kda_heads: int
    kda_head_dim: int  # K = V
    conv_taps: int  # W
    full_rank_out_gate: bool
    gate_lower_bound: float | None
    mla_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int  # L
    qk_nope_dim: int
    qk_rope_dim: int  # P, unrotated
    v_dim: int
    mla_out_gate: bool
    lora_eps: float
    dense_layers: tuple[int, ...]
    dense_size: int
    num_experts: int  # E
    top_k: int  # A
    expert_size: int  # I
    shared_size: int  # width of the fused shared experts
    latent_size: int | None  # Z
    routed_scaling: float
    activation: str  # "situ" | "silu"
    situ_beta: float
    situ_linear_beta: float
    mxfp4_experts: bool
    attn_res_block_size: int | None
    rms_eps: float
    max_positions: int
    eos_token_ids: tuple[int, ...] = ()
    dtype: torch.dtype = torch.bfloat16

    @property
    def kda_layers(self) -> tuple[int, ...]:
        return tuple(l for l in range(self.num_layers) if l not in self.mla_layers)

    @property
    def decay_rank(self) -> int:
        """Width of f_a and g_a: the head dim, in every release."""
        return self.kda_head_dim

    @property
    def expert_in(self) -> int:
        """Width that the routed experts read and write: the latent size, or the hidden size."""
        return self.latent_size or self.hidden_size

    @property
    def softmax_scale(self) -> float:
        return (self.qk_nope_dim + self.qk_rope_dim) ** -0.5

    def starts_block(self, layer: int) -> bool:
        return self.attn_res_block_size is not None and layer % self.attn_res_block_size == 0

    def shard(self, tp: int) -> "KimiConfig":
        """The config as one of `tp` ranks sees it: heads, expert widths and MLP widths divided, the rest replicated."""
        if tp not in TP_SIZES:
            raise ConfigError(f"tp must be one of {TP_SIZES}, got {tp}")
        split = ("kda_heads", "mla_heads", "dense_size", "expert_size", "shared_size", "vocab_size")
        for name in split:
            if getattr(self, name) % tp:
                raise ConfigError(f"tp={tp} does not divide {name}={getattr(self, name)}")
        if self.mxfp4_experts and self.expert_size // tp % MXFP4_GROUP:
            raise ConfigError(
                f"tp={tp} cuts expert_size={self.expert_size} into {self.expert_size // tp}, "
                f"not a multiple of the MXFP4 group {MXFP4_GROUP}"
            )
        return dataclasses.replace(self, **{name: getattr(self, name) // tp for name in split})


K3 = KimiConfig(
    family="k3",
    num_layers=93,
    hidden_size=7168,
    vocab_size=163840,
    mla_layers=(*range(3, 92, 4), 92),
    kda_heads=96,
    kda_head_dim=128,
    conv_taps=4,
    full_rank_out_gate=True,
    gate_lower_bound=-5.0,
    mla_heads=96,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_dim=128,
    qk_rope_dim=64,
    v_dim=128,
    mla_out_gate=True,
    lora_eps=1e-6,
    dense_layers=(0,),
    dense_size=33792,
    num_experts=896,
    top_k=16,
    expert_size=3072,
    shared_size=6144,
    latent_size=3584,
    routed_scaling=1.0,
    activation="situ",
    situ_beta=4.0,
    situ_linear_beta=25.0,
    mxfp4_experts=True,
    attn_res_block_size=12,
    rms_eps=1e-5,
    max_positions=1048576,
    eos_token_ids=(163586,),
)

KIMI_LINEAR_48B = KimiConfig(
    family="kimi-linear",
    num_layers=27,
    hidden_size=2304,
    vocab_size=163840,
    mla_layers=(3, 7, 11, 15, 19, 23, 26),
    kda_heads=32,
    kda_head_dim=128,
    conv_taps=4,
    full_rank_out_gate=False,
    gate_lower_bound=None,
    mla_heads=32,
    q_lora_rank=None,
    kv_lora_rank=512,
    qk_nope_dim=128,
    qk_rope_dim=64,
    v_dim=128,
    mla_out_gate=False,
    lora_eps=1e-6,
    dense_layers=(0,),
    dense_size=9216,
    num_experts=256,
    top_k=8,
    expert_size=1024,
    shared_size=1024,
    latent_size=None,
    routed_scaling=2.446,
    activation="silu",
    situ_beta=4.0,
    situ_linear_beta=25.0,
    mxfp4_experts=False,
    attn_res_block_size=None,
    rms_eps=1e-5,
    max_positions=1048576,
    eos_token_ids=(163586,),
)

# The MINI configs keep every op kind of their family; no two dims that could be confused are equal.
K3_MINI = dataclasses.replace(
    K3,
    num_layers=6,
    hidden_size=160,
    vocab_size=320,
    mla_layers=(3, 5),
    kda_heads=4,
    kda_head_dim=32,
    mla_heads=2,
    q_lora_rank=80,
    kv_lora_rank=48,
    qk_nope_dim=32,
    qk_rope_dim=16,
    v_dim=48,
    dense_size=224,
    num_experts=24,
    top_k=4,
    expert_size=64,
    shared_size=128,
    latent_size=96,
    attn_res_block_size=2,
    max_positions=1024,
    eos_token_ids=(319,),
)

KIMI_LINEAR_MINI = dataclasses.replace(
    KIMI_LINEAR_48B,
    num_layers=5,
    hidden_size=144,
    vocab_size=288,
    mla_layers=(2, 4),
    kda_heads=2,
    kda_head_dim=32,
    mla_heads=4,
    kv_lora_rank=80,
    qk_nope_dim=32,
    qk_rope_dim=16,
    v_dim=16,
    dense_size=208,
    num_experts=12,
    top_k=3,
    expert_size=48,
    shared_size=48,
    max_positions=1024,
    eos_token_ids=(287,),
)

CONFIGS = {
    "k3": K3,
    "kimi-linear-48b": KIMI_LINEAR_48B,
    "k3-mini": K3_MINI,
    "kimi-linear-mini": KIMI_LINEAR_MINI,
}
