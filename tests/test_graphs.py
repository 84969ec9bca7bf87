"""The Triton step under CUDA graphs: padded rows, changed inputs, no compilation, no synchronisation, no allocation."""

import dataclasses

import pytest
import torch

from kimi_kernels.backends import make_ops
from kimi_kernels.checkpoint import load_weights
from kimi_kernels.compare import assert_same_bits
from kimi_kernels.decode_step import decode_step
from kimi_kernels.decoder import Decoder
from kimi_kernels.hf_config import load_config
from kimi_kernels.mini import make_mini
from kimi_kernels.state import Batch, State

pytestmark = pytest.mark.gpu
CUDA = "cuda"
PAGE, PAGES_PER_SEQUENCE, SLOTS = 16, 3, 40


@pytest.fixture(scope="module", params=("k3", "kimi-linear"))
def mini(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("mini") / request.param
    make_mini(directory, request.param, seed=3)
    config = load_config(directory)
    return config, load_weights(directory, config, device=CUDA, progress=False)


def random_state(config, seed: int = 0) -> State:
    state = State.zeros(config, SLOTS, SLOTS * PAGES_PER_SEQUENCE, PAGE, CUDA)
    generator = torch.Generator(CUDA).manual_seed(seed)
    for layer in state.layers:
        for pool in vars(layer).values():
            pool.copy_(torch.randn(pool.shape, generator=generator, device=CUDA) * 0.2)
    return state


def batch_of(slots: list[int], seq_lens: list[int]) -> Batch:
    """Each sequence owns the pages of its slot; padded rows point at page 0 with length 0."""
    pages = [[max(s, 0) * PAGES_PER_SEQUENCE + i for i in range(PAGES_PER_SEQUENCE)] for s in slots]
    return Batch(
        slots=torch.tensor(slots, dtype=torch.int32, device=CUDA),
        is_new=torch.zeros(len(slots), dtype=torch.bool, device=CUDA),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=CUDA),
        page_table=torch.tensor(pages, dtype=torch.int32, device=CUDA),
    )


def pools(state: State) -> list[torch.Tensor]:
    return [pool for layer in state.layers for pool in vars(layer).values()]


class Captured:
    """One step recorded for a batch size; `replay` copies new inputs into the recorded tensors."""

    def __init__(self, model, size: int):
        self.config, self.weights = model
        self.state = random_state(self.config)
        self.batch = batch_of([-1] * size, [0] * size)
        self.tokens = torch.zeros(size, dtype=torch.int64, device=CUDA)
        self.ops = make_ops("triton", CUDA)
        self.run()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.output = self.run()

    def run(self):
        return decode_step(self.ops, self.config, self.weights, self.state, self.batch, self.tokens)

    def replay(self, batch: Batch, tokens: torch.Tensor):
        for field in ("slots", "is_new", "seq_lens", "page_table"):
            getattr(self.batch, field).copy_(getattr(batch, field))
        self.tokens.copy_(tokens)
        self.output.logits.fill_(float("nan"))
        self.graph.replay()
        return self.output


def eager(model, state: State, batch: Batch, tokens: torch.Tensor):
    config, weights = model
    return decode_step(make_ops("triton", CUDA), config, weights, state, batch, tokens)


def test_replay_follows_changed_slots_lengths_pages_and_tokens_mini(mini):
    """G02: three replays with other slots, lengths and page tables equal eager runs, state included."""
    captured = Captured(mini, 4)
    reference = random_state(mini[0])
    for slots, lengths, seed in (
        ([0, 1, 2, 3], [5, 1, 9, 20], 1),
        ([9, 7, 30, 2], [33, 48, 2, 10], 2),
        ([7, 9, 2, 30], [49 - 1, 34, 11, 3], 3),
    ):
        tokens = torch.randint(0, 200, (4,), generator=torch.Generator().manual_seed(seed)).to(CUDA)
        want = eager(mini, reference, batch_of(slots, lengths), tokens)
        got = captured.replay(batch_of(slots, lengths), tokens)
        assert_same_bits(got.logits, want.logits, "logits")
        assert got.tokens.tolist() == want.tokens.tolist()
    for a, b in zip(pools(captured.state), pools(reference), strict=True):
        assert_same_bits(a, b, "pool")


def test_padded_rows_of_a_graph_are_finite_and_touch_nothing_mini(mini):
    """G01: capture 8 rows, replay 5 live ones: live rows equal an eager run of the 8-row batch, pools of other slots
    keep their bits."""
    captured = Captured(mini, 8)
    before = [pool.clone() for pool in pools(captured.state)]
    slots, lengths = [3, 5, 11, 0, 8, -1, -1, -1], [4, 17, 2, 40, 9, 0, 0, 0]
    tokens = torch.arange(8, device=CUDA)
    got = captured.replay(batch_of(slots, lengths), tokens)
    assert bool(torch.isfinite(got.logits).all())
    live = [s for s in slots if s >= 0]
    want = eager(mini, random_state(mini[0]), batch_of(slots, lengths), tokens)
    assert_same_bits(got.logits[: len(live)], want.logits[: len(live)], "live rows")
    assert got.tokens[: len(live)].tolist() == want.tokens[: len(live)].tolist()
    for pool, old in zip(pools(captured.state), before, strict=True):
        per_slot = pool.shape[0] // SLOTS
        untouched = torch.ones(pool.shape[0], dtype=torch.bool, device=CUDA)
        for slot in live:
            untouched[slot * per_slot : (slot + 1) * per_slot] = False
        assert_same_bits(pool[untouched], old[untouched], "untouched slots")


def test_a_larger_eager_batch_between_replays_changes_nothing_mini(mini):
    """G04: no buffer is shared or regrown between batch sizes."""
    captured = Captured(mini, 4)
    batch, tokens = batch_of([0, 1, 2, 3], [5, 1, 9, 20]), torch.arange(4, device=CUDA)
    snapshot = [pool.clone() for pool in pools(captured.state)]
    first = captured.replay(batch, tokens).logits.clone()
    eager(mini, random_state(mini[0]), batch_of(list(range(32)), [3] * 32), torch.arange(32, device=CUDA))
    for pool, old in zip(pools(captured.state), snapshot, strict=True):
        pool.copy_(old)
    assert_same_bits(captured.replay(batch, tokens).logits, first, "logits")


def test_decode_path_does_not_synchronise_or_allocate_mini(mini):
    """P09: 50 replayed steps under sync-debug mode, with the allocator's counters unchanged."""
    config, weights = mini
    decoder = Decoder(config, weights, "triton", context=128, device=CUDA)
    tokens = torch.tensor([1], device=CUDA)
    decoder.step(tokens)
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(50):
            decoder.step(tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated


def test_no_compilation_when_rows_and_lengths_change_mini(mini, monkeypatch):
    """P01, G05: after a warm-up of one size per row bucket, no batch size and no length compiles anything."""
    from triton.runtime.jit import JITFunction

    def run(size: int, length: int) -> None:
        batch = batch_of(list(range(size)), [length] * size)
        eager(mini, state, batch, torch.zeros(size, dtype=torch.int64, device=CUDA))

    state = random_state(mini[0])
    for size in (1, 2, 8, 16, 17, 32, 33, 40):
        run(size, 5)
    compiled = []
    compile_kernel = JITFunction._do_compile
    monkeypatch.setattr(
        JITFunction,
        "_do_compile",
        lambda self, *a, **k: compiled.append(self.__name__) or compile_kernel(self, *a, **k),
    )
    for size in range(1, 41):
        run(size, 1 + size % 47)
    assert not compiled


def test_graph_decode_equals_eager_decode_mini(mini):
    """Tokens of the captured decoder equal those of the same decoder run without a graph."""
    config, weights = mini
    graphed, plain = (Decoder(config, weights, "triton", context=64, device=CUDA) for _ in range(2))
    plain.use_graph = False
    a, b = graphed.generate([[1, 2, 3]], 24), plain.generate([[1, 2, 3]], 24)
    assert a.tokens == b.tokens
    assert_same_bits(a.logits, b.logits, "logits")
    again = graphed.generate([[1, 2, 3]], 24)
    assert again.tokens == a.tokens, "a second request on the same slots sees the first one's state"


def test_layers_may_be_a_slice_mini(mini):
    config, weights = mini
    part = dataclasses.replace(weights, layers=weights.layers[1:4])
    logits = Decoder(config, part, "triton", device=CUDA).generate([[1, 2]], 4).logits
    assert bool(torch.isfinite(logits).all())
