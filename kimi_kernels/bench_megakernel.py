"""Rows of `bench --backend megakernel`: layers and whole model of the fused kernel, beside the Triton chain and step.

    layer/kda+moe    a step with 2n such layers minus a step with n of them, by n: what one more layer costs
    model            embedding to next token, all layers of one rank; `sharded` as in `bench_layers`

Correct first: a step of real size over a dense, a KDA and an MLA layer is tapped and every op compared with its bound;
if that fails, no row gets a number. The weights that are timed are random and made in image form.
"""

import dataclasses
import importlib
from collections.abc import Sequence
from functools import partial

import torch

from kimi_kernels.bench_layers import SHARDED, ChainSpec, layer_bytes, random_owner, shard_moe
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
    """Adds the megakernel's rows, and the Triton step beside them, to `bench`."""

    def __init__(self, bench: Bench):
        self.bench, self.generator = bench, bench.generator
        self.config, self.tp, self.rows, self.context = bench.shape
        self.local = self.config.shard(self.tp)
        self._checked: dict[bool, float | str] = {}  # sharded -> worst error, or what failed

    def measure(self) -> None:
        """Every row; a row that fails says why."""
        ways = [False, True] if self.tp > 1 and self.config.latent_size is not None else [False]
        for sharded in ways:
            spec = ChainSpec("kda", True, sharded)
            self.bench.measure_layer(spec)
            self.bench.measure(Row("layer", spec.name, NAME, 0), partial(self._layer, spec))
        self.bench.measure(Row("model", "model", self.bench.by, 0), self._triton_model)
        for sharded in ways:
            name = "model sharded" if sharded else "model"
            self.bench.measure(Row("model", name, NAME, 0), partial(self._model, sharded))

    def _layer(self, spec: ChainSpec, row: Row) -> None:
        row.worst_over_bound = self.check(spec.sharded)
        row.bytes = layer_bytes(spec, *self.bench.shape)
        layers = [layer for layer in self.config.kda_layers if layer not in self.config.dense_layers]
        more = min(WALK, len(layers) // 2)
        short, long = (self.time_step(layers[:count], spec.sharded) for count in (more, 2 * more))
        if long.us <= short.us:
            raise RuntimeError(f"{2 * more} layers took {long.us:.2f} us, {more} layers {short.us:.2f} us")
        row.sets, row.cold = 2 * more, True
        us, p20, p80 = ((getattr(long, what) - getattr(short, what)) / more for what in ("us", "p20_us", "p80_us"))
        row.set_timing(Timing(us, p20, p80, long.calls, long.replays), self.bench.ceiling)
        row.note = f"{2 * more} layers minus {more}"

    def _model(self, sharded: bool, row: Row) -> None:
        row.worst_over_bound = self.check(sharded)
        row.bytes = self._model_bytes(sharded)
        if self._fits(row, self._meta(None, sharded)):
            row.sets, row.cold = 1, True
            row.set_timing(self.time_step(None, sharded), self.bench.ceiling)

    def _triton_model(self, row: Row) -> None:
        """The ops one by one; each was checked at its shapes in the layers above."""
        row.bytes = self._model_bytes(False)
        meta = self._meta(None, False)
        if not self._fits(row, meta):
            return
        weights = random_model(meta, self.generator)
        state, batch, tokens = self._inputs(meta)
        row.sets, row.cold = 1, True
        step = (self.bench.ops, self.local, weights, state, batch, tokens)
        row.set_timing(self.bench.timer(lambda: decode_step(*step), 1), self.bench.ceiling)

    def check(self, sharded: bool) -> float:
        """Worst error of a tapped step as a fraction of its bound. Raises AssertionError where an op leaves it."""
        if sharded not in self._checked:
            self._checked[sharded] = self._walk(sharded)
        result = self._checked[sharded]
        if isinstance(result, str):
            raise AssertionError(f"not timed: {result}")
        return result

    def _walk(self, sharded: bool) -> float | str:
        meta = self._meta(walk_layers(self.config), sharded)
        weights = random_model(meta, self.generator)
        state, batch, tokens = self._inputs(meta)
        module = importlib.import_module("cute_megakernel.megakernel")
        kernel = self._kernel(module.Images(weights), state, sharded, taps=True)
        report = StepReport()
        try:
            Walk(self.local, weights, kernel, report).step(tokens, batch)
        except (OverBound, module.MegakernelError) as error:
            return str(error)
        return max(op.right_ratio for op in report.ops.values())

    def time_step(self, layers: Sequence[int] | None, sharded: bool, **options) -> Timing:
        """A step over `layers` (all); `options` as Megakernel takes them. Raises where the logits are not finite."""
        meta = self._meta(layers, sharded)
        images = importlib.import_module("cute_megakernel.random_images").RandomImages(meta, self.generator)
        state, batch, tokens = self._inputs(meta)
        kernel = self._kernel(images, state, sharded, **options)
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

    def _kernel(self, images, state: State, sharded: bool, **options):
        """A Megakernel for these images, as wide as all ranks where router and latent are sharded."""
        recording = importlib.import_module("cute_megakernel.recording")
        schedule = importlib.import_module("cute_megakernel.schedule")
        gathered = dict.fromkeys(SHARDED, self.tp) if sharded else None
        recorded = recording.record_local_step(self.local, images.weights, self.rows, self.rows, PAGE_SIZE, gathered)
        sms = torch.cuda.get_device_properties(images.device).multi_processor_count
        made = schedule.make_schedule(recorded, self.local, sms)
        module = importlib.import_module("cute_megakernel.megakernel")
        return module.Megakernel(self.local, images, state, self.rows, schedule=made, **options)

    def _meta(self, layers: Sequence[int] | None, sharded: bool) -> ModelWeights:
        meta = meta_weights(self.config, self.tp, layers=layers)
        if not sharded:
            return meta
        return dataclasses.replace(meta, layers=tuple(shard_moe(layer, self.tp) for layer in meta.layers))

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
            nbytes -= resident_bytes(self._meta(None, False)) - resident_bytes(self._meta(None, True))
        return nbytes

    def _fits(self, row: Row, meta: ModelWeights) -> bool:
        """Notes in the row what is missing where the weights of the rank do not fit."""
        if self.generator.device.type != "cuda":
            return True
        torch.cuda.empty_cache()
        need, free = resident_bytes(meta), torch.cuda.mem_get_info()[0]
        if need > FREE_SHARE * free:
            row.missing = f"needs {need / 1e9:.0f} GB of weights, {free / 1e9:.0f} GB are free"
        return not row.missing


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
