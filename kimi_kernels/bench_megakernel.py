"""Rows of `bench --backend megakernel`: layers and whole model of the fused kernel, beside the Triton chain and step.

    layer/kda+moe    a step with 2n such layers minus a step with n of them, by n: what one more layer costs
    model            embedding to next token, all layers of one rank; `sharded` as in `bench_layers`

Correct first: a step of real size over a dense, a KDA and an MLA layer is tapped, every op compared with its bound, and
the Triton op on the same inputs with it; if that fails, no row gets a number. The weights that are timed are random,
for the megakernel made in image form.
"""

import dataclasses
import gc
import importlib
from collections.abc import Callable, Sequence
from functools import partial

import torch

from kimi_kernels.bench_cases import USUAL_BANK
from kimi_kernels.bench_layers import (
    SHARDED,
    ChainSpec,
    gathered_outputs,
    layer_bytes,
    random_owner,
    shard_moe,
    with_gather,
)
from kimi_kernels.bench_rows import Bench, Row
from kimi_kernels.bench_timing import Timing
from kimi_kernels.compare_fused import Walk
from kimi_kernels.compare_step import OverBound, StepReport
from kimi_kernels.config import KimiConfig
from kimi_kernels.decode_step import decode_step
from kimi_kernels.meta_weights import meta_weights
from kimi_kernels.state import Batch, State
from kimi_kernels.traffic import PAGE_SIZE, record_step, resident_bytes, total_bytes
from kimi_kernels.weights import ModelWeights

Tensor = torch.Tensor
NAME = "megakernel"
WALK = 8  # layers that the longer of two walks has more
STEPS = 4  # of one graph
FREE_SHARE = 0.85  # of the memory that weights may take


class FusedBench:
    """Adds rows of the megakernel, and of the Triton ops beside them, to `bench`. A row that fails says why."""

    def __init__(self, bench: Bench):
        self.bench, self.generator = bench, bench.generator
        self.config, self.tp, self.rows, self.context = bench.shape
        self.local = self.config.shard(self.tp)
        self._checked: dict[bool, dict[str, float] | str] = {}  # sharded -> worst error by backend, or what failed

    def measure(self) -> None:
        """Every row of the config."""
        ways = [False, True] if self.tp > 1 and self.config.latent_size is not None else [False]
        for sharded in ways:
            self.measure_layer(sharded)
        for sharded in ways:
            self.measure_model(sharded)

    def measure_layer(self, sharded: bool) -> None:
        """A layer of KDA and experts."""
        spec = ChainSpec("kda", True, sharded)
        self.bench.measure_layer(spec)
        self.bench.measure(Row("layer", spec.name, NAME, 0), partial(self._layer, spec))

    def measure_model(self, sharded: bool) -> None:
        """All layers, embedding and head."""
        name = "model sharded" if sharded else "model"
        for by, time in ((self.bench.by, self.time_triton), (NAME, self.time_step)):
            self.bench.measure(Row("model", name, by, 0), partial(self._model, time, sharded))

    def _layer(self, spec: ChainSpec, row: Row) -> None:
        row.worst_over_bound = self.check(spec.sharded)[NAME]
        row.bytes = layer_bytes(spec, *self.bench.shape)
        walks = layer_walks(self.config)
        fewer, more = map(len, walks)
        short, long = (self.time_step(layers, spec.sharded) for layers in walks)
        if long.us <= short.us:
            raise RuntimeError(f"{more} layers took {long.us:.2f} us, {fewer} layers {short.us:.2f} us")
        row.sets, row.cold = more, True
        differences = (getattr(long, what) - getattr(short, what) for what in ("us", "p20_us", "p80_us"))
        us, p20, p80 = (difference / (more - fewer) for difference in differences)
        row.set_timing(Timing(us, p20, p80, long.calls, long.replays), self.bench.ceiling)
        row.note = f"{more} layers minus {fewer}"

    def _model(self, time: Callable[[None, bool], Timing], sharded: bool, row: Row) -> None:
        row.worst_over_bound = self.check(sharded)[row.by]
        row.bytes = self._model_bytes(sharded)
        if self._fits(row, rank_weights(self.config, self.tp, None, sharded)):
            row.sets, row.cold = 1, True
            row.set_timing(time(None, sharded), self.bench.ceiling)

    def check(self, sharded: bool) -> dict[str, float]:
        """Worst error of a tapped step as a fraction of its bound, by backend. Raises AssertionError where an op leaves
        it."""
        if sharded not in self._checked:
            self._checked[sharded] = self._walk(sharded)
        result = self._checked[sharded]
        if isinstance(result, str):
            raise AssertionError(f"not timed: {result}")
        return result

    def _walk(self, sharded: bool) -> dict[str, float] | str:
        layers = walk_layers(self.config)
        weights = random_model(rank_weights(self.config, self.tp, layers, sharded), self.generator)
        state, batch, tokens = self._inputs(weights)
        module = importlib.import_module("cute_megakernel.megakernel")
        kernel = self._kernel(module.Images(weights), state, layers, sharded, taps=True)
        report = StepReport()
        try:
            Walk(self.local, weights, kernel, report, {self.bench.by: self.bench.ops}).step(tokens, batch)
        except (OverBound, module.MegakernelError) as error:
            return str(error)
        ours, theirs = (max(getattr(op, side) for op in report.ops.values()) for side in ("right_ratio", "left_ratio"))
        return {NAME: ours, self.bench.by: theirs}

    def time_triton(self, layers: Sequence[int] | None, sharded: bool) -> Timing:
        """The ops of a step over `layers` (all) one by one, in one graph."""
        weights = random_model(rank_weights(self.config, self.tp, layers, sharded), self.generator)
        state, batch, tokens = self._inputs(weights)
        whole = gathered_outputs(weights.layers, self.local, self.rows, self.generator) if sharded else {}
        step = (with_gather(self.bench.ops, whole), self.local, weights, state, batch, tokens)
        return self.bench.timer(lambda: decode_step(*step), 1)

    def time_step(self, layers: Sequence[int] | None, sharded: bool) -> Timing:
        """A launch over `layers` (all). Raises where the logits are not finite."""
        meta = rank_weights(self.config, self.tp, layers, sharded)
        images = importlib.import_module("cute_megakernel.random_images").RandomImages(meta, self.generator)
        state, batch, tokens = self._inputs(meta)
        kernel = self._kernel(images, state, layers, sharded)
        kernel.step(tokens, batch)
        kernel.check()
        if not bool(torch.isfinite(kernel.logits).all()):
            raise AssertionError("the logits are not finite")

        def work() -> None:
            for _ in range(STEPS):
                kernel.step(tokens, batch)

        timing = self.bench.timer(work, STEPS)
        kernel.check()
        return timing

    def _kernel(self, images, state: State, layers: Sequence[int] | None, sharded: bool, **options):
        sms = torch.cuda.get_device_properties(images.device).multi_processor_count
        schedule = fused_schedule(self.config, self.tp, self.rows, layers, sharded, sms)
        module = importlib.import_module("cute_megakernel.megakernel")
        return module.Megakernel(self.local, images, state, self.rows, schedule=schedule, **options)

    def _inputs(self, meta: ModelWeights) -> tuple[State, Batch, Tensor]:
        """Pools N(0, 1) / 10, `context` cached tokens on pages in random order."""
        device, rows, generator = self.generator.device, self.rows, self.generator
        pages = -(-self.context // PAGE_SIZE)
        layers = [layer.index for layer in meta.layers]
        state = State.zeros(self.local, rows, rows * pages, PAGE_SIZE, device, layers)
        for pool in (pool for layer in state.layers for pool in vars(layer).values()):
            pool.normal_(0.0, 0.1, generator=generator)
        batch = Batch(
            slots=torch.randperm(rows, generator=generator, device=device).int(),
            is_new=torch.zeros(rows, dtype=torch.bool, device=device),
            seq_lens=torch.full((rows,), self.context, dtype=torch.int32, device=device),
            page_table=torch.randperm(rows * pages, generator=generator, device=device).int().reshape(rows, pages),
        )
        tokens = torch.randint(self.config.vocab_size, (rows,), generator=generator, device=device)
        return state, batch, tokens

    def _model_bytes(self, sharded: bool) -> int:
        nbytes = total_bytes(record_step(self.config, self.tp, self.rows, self.context))
        if sharded:
            whole, cut = (resident_bytes(rank_weights(self.config, self.tp, None, way)) for way in (False, True))
            nbytes -= whole - cut
        return nbytes

    def _fits(self, row: Row, meta: ModelWeights) -> bool:
        """Notes in the row what is missing where the weights of the rank do not fit."""
        if self.generator.device.type != "cuda":
            return True
        gc.collect()
        torch.cuda.empty_cache()
        need, free = resident_bytes(meta), torch.cuda.mem_get_info()[0]
        if need > FREE_SHARE * free:
            row.missing = f"needs {need / 1e9:.0f} GB of weights, {free / 1e9:.0f} GB are free"
        return not row.missing


def rank_weights(config: KimiConfig, tp: int, layers: Sequence[int] | None, sharded: bool) -> ModelWeights:
    """Weights without data of one rank; `sharded`: router and latent projections cut over the ranks too."""
    meta = meta_weights(config, tp, layers=layers)
    if not sharded:
        return meta
    return dataclasses.replace(meta, layers=tuple(shard_moe(layer, tp) for layer in meta.layers))


def fused_schedule(config: KimiConfig, tp: int, rows: int, layers: Sequence[int] | None, sharded: bool, sms: int):
    """The schedule that is timed: its activations are as wide as all ranks where router and latent are sharded."""
    recording = importlib.import_module("cute_megakernel.recording")
    schedule = importlib.import_module("cute_megakernel.schedule")
    gathered = dict.fromkeys(SHARDED, tp) if sharded else None
    local, weights = config.shard(tp), rank_weights(config, tp, layers, sharded)
    recorded = recording.record_local_step(local, weights, rows, rows, PAGE_SIZE, gathered)
    return schedule.make_schedule(recorded, local, sms)


def layer_walks(config: KimiConfig) -> tuple[list[int], list[int]]:
    """Layers of the shorter and of the longer walk. Both begin with layers that start a block, so that what is between
    them has as many bank rows as the chain of `bench_layers`, if the model has so many layers."""
    kda = [layer for layer in config.kda_layers if layer not in config.dense_layers]
    starts = [layer for layer in kda if config.starts_block(layer)][: min(USUAL_BANK, len(kda) - 2)]
    rest = [layer for layer in kda if layer not in starts]
    count = min(WALK, len(rest) // 2)
    return [*starts, *rest[:count]], [*starts, *rest[: 2 * count]]


def walk_layers(config: KimiConfig) -> list[int]:
    """A dense layer where there is one, a KDA and an MLA layer with experts."""
    rest = [layer for layer in range(config.num_layers) if layer not in config.dense_layers]
    kinds = [[l for l in rest if (l in config.mla_layers) == mla] for mla in (False, True)]
    return sorted([*config.dense_layers[:1], *(kind[0] for kind in kinds if kind)])


def random_model(meta: ModelWeights, generator: torch.Generator) -> ModelWeights:
    """Random weights; the layers one by one, so that no second copy of the model exists."""
    layers = tuple(random_owner(layer, generator) for layer in meta.layers)
    rest = random_owner(dataclasses.replace(meta, layers=()), generator)
    return dataclasses.replace(rest, layers=layers)
