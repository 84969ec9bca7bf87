"""Models, states, batches and bit-for-bit helpers of the megakernel's GPU tests."""

import dataclasses
import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from cute_megakernel.build import architecture, machine_code
from cute_megakernel.megakernel import Images, Megakernel
from cute_megakernel.recording import record_local_step
from cute_megakernel.schedule import make_schedule
from kimi_kernels.bench_layers import SHARDED, shard_moe
from kimi_kernels.bench_megakernel import random_model
from kimi_kernels.checkpoint import load_weights
from kimi_kernels.compare import assert_same_bits
from kimi_kernels.config import CONFIGS, KimiConfig
from kimi_kernels.meta_weights import meta_weights
from kimi_kernels.mini import make_mini
from kimi_kernels.state import Batch, State
from kimi_kernels.weights import ModelWeights

Tensor = torch.Tensor
CUDA = "cuda"
FAMILIES = ("k3", "kimi-linear")
PAGE, PAGES, SLOTS = 16, 6, 12  # 96 cached tokens a sequence


@dataclass(frozen=True)
class Model:
    """One rank's config and weights on the GPU, with the images that kernels share."""

    config: KimiConfig
    weights: ModelWeights
    images: Images
    gathered: dict[str, int]  # as `record_local_step` takes it

    @property
    def layers(self) -> list[int]:
        return [layer.index for layer in self.weights.layers]


@functools.cache
def mini(family: str, device: str = CUDA) -> Model:
    with tempfile.TemporaryDirectory() as root:
        config = make_mini(Path(root) / family, family, seed=3)
        weights = load_weights(Path(root) / family, config, device=device, progress=False)
    return Model(config, weights, Images(weights), {})


def some_layers(model: Model, count: int) -> Model:
    weights = dataclasses.replace(model.weights, layers=model.weights.layers[:count])
    return Model(model.config, weights, Images(weights), model.gathered)


def real(name: str, tp: int, layers: tuple[int, ...], sharded: bool) -> Model:
    """Random weights at real size; `sharded`: router and latent projections cut over the ranks too."""
    meta, gathered = real_meta(name, tp, layers, sharded)
    weights = random_model(meta, torch.Generator(CUDA).manual_seed(5))
    return Model(CONFIGS[name].shard(tp), weights, Images(weights), gathered)


def real_meta(name: str, tp: int, layers: tuple[int, ...], sharded: bool) -> tuple[ModelWeights, dict[str, int]]:
    meta = meta_weights(CONFIGS[name], tp, layers=layers)
    if not sharded:
        return meta, {}
    cut = tuple(shard_moe(layer, tp) for layer in meta.layers)
    return dataclasses.replace(meta, layers=cut), dict.fromkeys(SHARDED, tp)


def compile_ahead(name: str, tp: int, layers: tuple[int, ...], sharded: bool, rows: int) -> None:
    """Compiles the kernel of `real`, which needs no memory of the device."""
    meta, gathered = real_meta(name, tp, layers, sharded)
    local, sms = CONFIGS[name].shard(tp), torch.cuda.get_device_properties(0).multi_processor_count
    shape = make_schedule(record_local_step(local, meta, rows, SLOTS, PAGE, gathered), local, sms).shape
    machine_code(shape, architecture())


def random_state(model: Model, seed: int = 0, page: int = PAGE, pages: int = PAGES) -> State:
    state = State.zeros(model.config, SLOTS, SLOTS * pages, page, CUDA, model.layers)
    generator = torch.Generator(CUDA).manual_seed(seed)
    for pool in pools(state):
        pool.copy_(torch.randn(pool.shape, generator=generator, device=CUDA) * 0.2)
    return state


def pools(state: State) -> list[Tensor]:
    return [pool for layer in state.layers for pool in vars(layer).values()]


def copy_state(target: State, source: State | list[Tensor]) -> None:
    for a, b in zip(pools(target), source if isinstance(source, list) else pools(source), strict=True):
        a.copy_(b)


def batch_of(
    slots: list[int], lengths: list[int], new: tuple[int, ...] = (), first_valid_slot: int = 0, pages: int = PAGES
) -> Batch:
    """Each sequence owns the pages of its slot; those of padded rows are never to be touched."""
    table = [[max(slot, 0) * pages + i for i in range(pages)] for slot in slots]
    like = dict(dtype=torch.int32, device=CUDA)
    is_new = torch.tensor([row in new for row in range(len(slots))], device=CUDA)
    lens = torch.tensor(lengths, **like)
    return Batch(torch.tensor(slots, **like), is_new, lens, torch.tensor(table, **like), first_valid_slot)


def tokens_of(model: Model, rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.weights.embed.shape[0], (rows,), generator=generator).to(CUDA)


def kernel_of(model: Model, rows: int, state: State | None = None, **options) -> Megakernel:
    """A Megakernel on `state`, by default a fresh `random_state`."""
    state = random_state(model) if state is None else state
    if model.gathered:
        recording = record_local_step(model.config, model.weights, rows, SLOTS, PAGE, model.gathered)
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        options["schedule"] = make_schedule(recording, model.config, sms)
    return Megakernel(model.config, model.images, state, rows, **options)


def run(kernel: Megakernel, tokens: Tensor, batch: Batch) -> Tensor:
    """Logits of one step, copied; raises what `check` raises."""
    logits = kernel.step(tokens, batch).logits
    kernel.check()
    return logits.clone()


def assert_same_state(a: State, b: State, what: str = "pool") -> None:
    for x, y in zip(pools(a), pools(b), strict=True):
        assert_same_bits(x, y, what)


class Captured:
    """A step of a kernel as a CUDA graph; `replay` copies new inputs into the recorded tensors."""

    def __init__(self, kernel: Megakernel):
        rows = kernel.rows
        self.kernel, self.batch = kernel, batch_of([-1] * rows, [0] * rows)
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=CUDA)
        kernel.step(self.tokens, self.batch)
        kernel.check()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.output = kernel.step(self.tokens, self.batch)

    def replay(self, tokens: Tensor, batch: Batch) -> Tensor:
        for field in ("slots", "is_new", "seq_lens", "page_table"):
            getattr(self.batch, field).copy_(getattr(batch, field))
        self.tokens.copy_(tokens)
        self.output.logits.fill_(float("nan"))
        self.graph.replay()
        self.kernel.check()
        return self.output.logits.clone()
