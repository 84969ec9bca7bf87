"""Long proofs on the device: thousands of delayed launches without a different bit, hundreds of delay patterns, and
thousands of steps without drift. And one step by itself, for tools that slow a launch down a hundred times: `make
sanitize` runs `test_one_step_mini` under compute-sanitizer."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from megakernel_cases import CUDA, FAMILIES, Model, batch_of, copy_state, kernel_of, mini, pools, run, tokens_of

from kimi_kernels import reference
from kimi_kernels.collectives import single_rank
from kimi_kernels.composed_bound import SAFETY, displaced_ops, steered
from kimi_kernels.decode_step import decode_step
from kimi_kernels.decoder import Decoder
from kimi_kernels.op_specs import OPS
from kimi_kernels.state import Batch, State

pytestmark = pytest.mark.gpu
ROWS = 4
REPLAYS, SEEDS, REPLAYS_A_SEED = 10_000, 200, 50
STEPS, KEEP_EVERY = 2000, 50
SAMPLES, SAMPLE_STEPS = 2, 100  # errors do not grow with time: the largest of the first steps bound all


@pytest.mark.parametrize("family", FAMILIES)
def test_one_step_mini(family):
    model = mini(family)
    kernel = kernel_of(model, ROWS, limit_s=120.0)
    tokens, batch = first_case(model)
    assert bool(torch.isfinite(run(kernel, tokens, batch)).all())


def first_case(model: Model):
    return tokens_of(model, ROWS), batch_of([3, 0, 7, 5], [33, 1, 64, 17], new=(1,))


class Repeated:
    """One step from the same pools, again and again; what differs from the step of a kernel without delays is counted
    on the device."""

    def __init__(self, model: Model):
        self.kernel, quiet = kernel_of(model, ROWS, delay=True), kernel_of(model, ROWS)
        self.tokens, self.batch = first_case(model)
        self.start = [pool.clone() for pool in pools(quiet.state)]
        self.logits, self.after = run(quiet, self.tokens, self.batch), [pool.clone() for pool in pools(quiet.state)]
        self.differ = torch.zeros((), dtype=torch.int64, device=CUDA)
        self.step()
        self.differ.zero_()

    def step(self):
        copy_state(self.kernel.state, self.start)
        self.kernel.logits.fill_(float("nan"))
        self.kernel.step(self.tokens, self.batch)
        pairs = [(self.kernel.logits, self.logits), *zip(pools(self.kernel.state), self.after, strict=True)]
        for now, want in pairs:
            bits = torch.int16 if now.element_size() == 2 else torch.int32
            self.differ += (now.view(bits) != want.view(bits)).sum()

    def replay(self, seed: int, times: int) -> int:
        """Elements that differed in `times` replays of one graph; every replay has other delays, by its number."""
        self.kernel.delay_seed = seed
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        self.differ.zero_()
        for _ in range(times):
            graph.replay()
        self.kernel.check()
        return int(self.differ)


@pytest.mark.parametrize("family", FAMILIES)
def test_ten_thousand_delayed_replays_are_bitwise_equal_mini(family):
    """Faults C07 and C08, for long: no hand-over depends on who is late."""
    assert Repeated(mini(family)).replay(1, REPLAYS) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_no_seed_of_delays_changes_a_bit_mini(family):
    repeated = Repeated(mini(family))
    differ = {seed: repeated.replay(seed, REPLAYS_A_SEED) for seed in range(SEEDS)}
    assert not any(differ.values()), {seed: count for seed, count in differ.items() if count}


def test_a_different_bit_is_counted_mini():
    """The counter of the two tests above is not idle."""
    repeated = Repeated(mini("k3"))
    repeated.after[0].view(torch.int16)[0] ^= 1
    assert repeated.replay(1, 3) == 3 * repeated.after[0][0].numel()


@pytest.mark.parametrize("family", FAMILIES)
def test_state_and_logits_do_not_drift_in_two_thousand_steps_mini(family):
    """Against the float64 step on the same tokens and experts, within the composed bound all the time."""
    tokens = tokens_of(mini(family), STEPS, 1).cpu()
    got, logits, routes = fused_steps(mini(family), tokens)
    model = mini(family, "cpu")
    exact, exact_logits = float_steps(model, tokens, steered(float64_ops(), routes))
    state_bound, logit_bound = torch.zeros(len(exact[0])), torch.zeros(())
    for seed in range(SAMPLES):
        ops = steered(displaced_ops(model.config.dtype, 1.0, seed), routes)
        moved, moved_logits = float_steps(model, tokens[:SAMPLE_STEPS], ops)
        state_bound = torch.maximum(state_bound, distances(moved, exact[:SAMPLE_STEPS]).amax(0))
        logit_bound = torch.maximum(logit_bound, (moved_logits - exact_logits[:SAMPLE_STEPS]).abs().max())
    worst = distances(got, exact[KEEP_EVERY - 1 :: KEEP_EVERY]) / (SAFETY * state_bound)
    worst_logits = (logits - exact_logits).abs().amax(-1) / (SAFETY * logit_bound)
    print(f"{family}: state {worst.amax(0).tolist()} by layer, logits {float(worst_logits.max()):.3g} of the bound")
    assert float(worst.max()) <= 1 and float(worst_logits.max()) <= 1


def fused_steps(model: Model, tokens: torch.Tensor) -> tuple[list, torch.Tensor, list[torch.Tensor]]:
    """-> recurrent states after every KEEP_EVERY steps, logits of all steps, experts of all router calls in order"""
    config = dataclasses.replace(model.config, max_positions=STEPS)
    decoder = Decoder(config, model.weights, "megakernel", 1, STEPS, CUDA, kernel_options={"taps": True})
    calls = decoder.kernel.schedule.recording.calls
    picks = [call.outputs[0].index for call in calls if call.op == "moe_router"]
    kept, logits, routes = [], [], []
    for number, token in enumerate(tokens.to(CUDA).split(1), 1):
        logits.append(decoder.step(token).logits[0].clone())
        routes.append(torch.stack([decoder.kernel.tap(index) for index in picks]))
        if number % KEEP_EVERY == 0:
            kept.append([state.to("cpu", copy=True) for state in recurrent(decoder.state)])
    decoder.check()
    chosen = torch.stack(routes).cpu().flatten(0, 1)
    return kept, torch.stack(logits).cpu().double(), list(chosen)


def float_steps(model: Model, tokens: torch.Tensor, ops: SimpleNamespace) -> tuple[list, torch.Tensor]:
    """-> recurrent states and logits of every step, in float64"""
    pages = -(-STEPS // 64)
    state = State.zeros(model.config, 1, pages, 64, layers=model.layers)
    state = State(tuple(type(l)(**{name: pool.double() for name, pool in vars(l).items()}) for l in state.layers))
    zero = torch.zeros(1, dtype=torch.int32)
    batch = Batch(zero, torch.ones(1, dtype=torch.bool), zero.clone(), torch.arange(pages).int().unsqueeze(0))
    states, logits = [], []
    for token in tokens.split(1):
        batch.seq_lens.add_(1)
        logits.append(decode_step(ops, model.config, model.weights, state, batch, token).logits[0])
        batch.is_new.fill_(False)
        states.append([s.clone() for s in recurrent(state)])
    return states, torch.stack(logits)


def float64_ops() -> SimpleNamespace:
    """The reference in float64."""

    def make(op: str):
        function, spec = getattr(reference, op), OPS[op]

        def double(name: str, value):
            if isinstance(value, list):
                return [double(name, item) for item in value]
            floating = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.double() if floating and name not in spec.inplace else value

        return lambda *args: function(*(double(name, value) for name, value in zip(spec.args, args, strict=True)))

    return SimpleNamespace(**{op: make(op) for op in OPS}, **single_rank())


def recurrent(state: State) -> list[torch.Tensor]:
    return [layer.recurrent[0] for layer in state.layers if hasattr(layer, "recurrent")]


def distances(got: list, want: list) -> torch.Tensor:
    """[steps, KDA layers], relative"""
    pairs = [zip(a, b, strict=True) for a, b in zip(got, want, strict=True)]
    return torch.tensor([[float((a.double() - b).norm() / b.norm()) for a, b in pair] for pair in pairs])
