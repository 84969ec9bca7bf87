"""Whole layers as dependent chains, through the code of `decode_step`: distinct weights per layer, one rank.

    kda+moe, mla+moe    a layer of the model: mix, attention, add, mix, MoE, add
    kda, mla, moe       one half of it
    ... sharded         router and latent projections cut 1/tp as well; their gather is left out, later ops read a full
                        random tensor in place of the gathered one

All-reduces are left out. Bytes are weights and state of a layer, experts as the expected number of distinct ones: what
every implementation must move; activations and residual bank (4 rows) count as cached. A chain has at least 4 layers,
and more where 4 would fit in the cache.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from kimi_kernels.bench_cases import COLD_BYTES, MAX_SETS, USUAL_BANK, meta_state
from kimi_kernels.bench_inputs import random_tensor
from kimi_kernels.compare import check_op
from kimi_kernels.config import KimiConfig
from kimi_kernels.decode_step import kda, mix, mla, moe
from kimi_kernels.meta_weights import meta_weights
from kimi_kernels.op_specs import OPS
from kimi_kernels.state import Batch
from kimi_kernels.traffic import OpCall, record_step
from kimi_kernels.weights import LayerWeights, MoeWeights

Tensor = torch.Tensor
MIN_LAYERS = 4


@dataclass(frozen=True)
class ChainSpec:
    """Which halves of a layer the chain runs."""

    attention: str | None  # "kda" | "mla"
    moe: bool
    sharded: bool = False

    @property
    def name(self) -> str:
        parts = [self.attention or "", "moe" if self.moe else ""]
        return "layer/" + "+".join(part for part in parts if part) + (" sharded" if self.sharded else "")


def chain_specs(config: KimiConfig, tp: int) -> list[ChainSpec]:
    """The chains of a model; the sharded ones where there is a latent to shard."""
    plain = [("kda", True), ("mla", True), ("kda", False), ("mla", False), (None, True)]
    sharded = [("kda", True), ("mla", True), (None, True)] if tp > 1 and config.latent_size is not None else []
    return [ChainSpec(*halves) for halves in plain] + [ChainSpec(*halves, sharded=True) for halves in sharded]


def layer_bytes(spec: ChainSpec, config: KimiConfig, tp: int, rows: int, context: int) -> int:
    """Weights and state that one layer of the chain must move; `config` is the whole model's."""
    layer = _layer_index(spec, config)
    calls = record_step(config, tp, rows, context, layers=sorted({*config.dense_layers[:1], layer}))
    calls = [call for call in calls if call.layer == layer]
    halfway = 1 + next(i for i, call in enumerate(calls) if call.op == "residual_add")
    wanted: list[OpCall] = (calls[:halfway] if spec.attention else []) + (calls[halfway:] if spec.moe else [])
    nbytes = sum(call.memory_bytes for call in wanted)
    if spec.sharded:
        weights = _meta_layer(spec, config, tp)
        assert isinstance(weights.mlp, MoeWeights)
        nbytes -= sum(_full_moe(config, tp)[name].nbytes - getattr(weights.mlp, name).nbytes for name in SHARDED)
    return nbytes


SHARDED = ("router", "latent_down", "latent_up")


class Chain:
    """Random weights, state and inputs of one chain on the device of `generator`; `run` goes through it once."""

    def __init__(
        self, spec: ChainSpec, config: KimiConfig, tp: int, rows: int, context: int, generator: torch.Generator
    ):
        self.config = config.shard(tp)
        self.attention: Any = {"kda": kda, "mla": mla, None: None}[spec.attention]
        self.moe = spec.moe
        self.nbytes = layer_bytes(spec, config, tp, rows, context)
        count = max(MIN_LAYERS, min(MAX_SETS, math.ceil(COLD_BYTES / self.nbytes)))
        self.layers = [random_owner(_meta_layer(spec, config, tp), generator) for _ in range(count)]
        state, batch = meta_state(self.config, (_layer_index(spec, config),) * count, rows, context)
        self.states: list[Any] = [random_owner(layer, generator) if spec.attention else None for layer in state.layers]
        device, pages = generator.device, batch.page_table.numel()
        self.batch = Batch(
            slots=torch.randperm(rows, generator=generator, device=device).int(),
            is_new=torch.zeros(rows, dtype=torch.bool, device=device),
            seq_lens=torch.full((rows,), context, dtype=torch.int32, device=device),
            page_table=torch.randperm(pages, generator=generator, device=device).int().reshape(rows, -1),
        )
        hidden = torch.empty(rows, config.hidden_size, dtype=config.dtype, device="meta")
        self.prefix = random_tensor("prefix", hidden, generator)
        bank_rows = 0 if config.attn_res_block_size is None else USUAL_BANK
        self.bank = [random_tensor("bank", hidden, generator) for _ in range(bank_rows)]
        self._gathered = gathered_outputs(self.layers, self.config, rows, generator) if spec.sharded else {}

    @property
    def count(self) -> int:
        return len(self.layers)

    def run(self, ops: SimpleNamespace, layers: slice = slice(None)) -> Tensor:
        """The residual stream after the layers, as the layer loop of `decode_step` makes it."""
        ops, config, prefix = with_gather(ops, self._gathered), self.config, self.prefix
        for layer, state in zip(self.layers[layers], self.states[layers], strict=True):
            if self.attention is not None:
                h = mix(ops, config, prefix, self.bank, layer.attn_res_weight, layer.input_norm)
                prefix = ops.residual_add(prefix, self.attention(ops, config, layer.attn, state, self.batch, h))
            if self.moe:
                h = mix(ops, config, prefix, self.bank, layer.mlp_res_weight, layer.post_norm)
                prefix = ops.residual_add(prefix, moe(ops, config, layer.mlp, h))
        return prefix


def gathered_outputs(
    layers: Sequence[LayerWeights], config: KimiConfig, rows: int, generator: torch.Generator
) -> dict[int, Tensor]:
    """By id of a weight that `shard_moe` cut: what the ranks together would make of it."""
    outputs = {}
    widths = {"router": config.num_experts, "latent_down": config.expert_in, "latent_up": config.hidden_size}
    for layer in layers:
        for name, width in widths.items() if isinstance(layer.mlp, MoeWeights) else ():
            dtype = torch.float32 if name == "router" else config.dtype
            like = torch.empty(rows, width, dtype=dtype, device="meta")
            outputs[id(getattr(layer.mlp, name))] = random_tensor("x", like, generator)
    return outputs


def with_gather(ops: SimpleNamespace, outputs: dict[int, Tensor]) -> SimpleNamespace:
    """`ops`, where a projection of a cut weight gives the gathered tensor in `outputs` instead of its own part."""
    if not outputs:
        return ops

    def gather(op: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        def run(x: Tensor, weight: Tensor) -> Tensor:
            part = op(x, weight)
            return outputs.get(id(weight), part)

        return run

    return SimpleNamespace(**{**vars(ops), "linear": gather(ops.linear), "router_logits": gather(ops.router_logits)})


def checked(ops: SimpleNamespace) -> SimpleNamespace:
    """`ops`, where every call is first compared with the reference on the same inputs; raises AssertionError."""

    def check(op: str) -> Callable:
        function = getattr(ops, op)

        def run(*args):
            check_op(op, function, *args)
            return function(*args)

        return run

    return SimpleNamespace(**{**vars(ops), **{op: check(op) for op in OPS}})


def random_owner(owner, generator: torch.Generator):
    """The dataclass `owner` with every tensor in it, nested ones included, made random on the device of `generator`."""

    def make(name: str, value):
        if isinstance(value, Tensor):
            return random_tensor(name, value, generator)
        return random_owner(value, generator) if is_dataclass(value) else value

    return replace(owner, **{field.name: make(field.name, getattr(owner, field.name)) for field in fields(owner)})


def _layer_index(spec: ChainSpec, config: KimiConfig) -> int:
    """A layer with experts and the wanted attention, that starts no block."""
    wanted = config.mla_layers if spec.attention == "mla" else config.kda_layers
    return next(layer for layer in wanted if layer not in config.dense_layers and not config.starts_block(layer))


def _meta_layer(spec: ChainSpec, config: KimiConfig, tp: int) -> LayerWeights:
    """One layer without data and without the half that the chain leaves out."""
    layer = meta_weights(config, tp, layers=[_layer_index(spec, config)]).layers[0]
    if spec.sharded:
        layer = shard_moe(layer, tp)
    left_out: dict[str, Any] = ({} if spec.attention else {"attn": None}) | ({} if spec.moe else {"mlp": None})
    return replace(layer, **left_out)


def shard_moe(layer: LayerWeights, tp: int) -> LayerWeights:
    """The layer, without data, with 1/tp of the outputs of router and latent projections."""
    if not isinstance(layer.mlp, MoeWeights):
        return layer
    cut: dict[str, Any] = {name: _first_rows(getattr(layer.mlp, name), tp) for name in SHARDED}
    return replace(layer, mlp=replace(layer.mlp, **cut))


def _full_moe(config: KimiConfig, tp: int) -> dict[str, Tensor]:
    layer = _layer_index(ChainSpec("kda", True), config)
    return vars(meta_weights(config, tp, layers=[layer]).layers[0].mlp)


def _first_rows(weight: Tensor, tp: int) -> Tensor:
    if weight.shape[0] % tp:
        raise ValueError(f"cannot cut {weight.shape[0]} rows into {tp} parts")
    return torch.empty(weight.shape[0] // tp, *weight.shape[1:], dtype=weight.dtype, device="meta")
