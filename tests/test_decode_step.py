"""The whole step: Triton against the exact logits, rows against their neighbours, T tokens at once, ranks against the
whole."""

import dataclasses

import pytest
import torch
import torch.multiprocessing as mp

from kimi_kernels.backends import make_ops
from kimi_kernels.checkpoint import load_weights
from kimi_kernels.collectives import process_group
from kimi_kernels.compare import assert_same_bits
from kimi_kernels.composed_bound import exact_steps, steered
from kimi_kernels.config import K3, K3_MINI, KIMI_LINEAR_48B, KIMI_LINEAR_MINI, KimiConfig
from kimi_kernels.decode_step import decode_step
from kimi_kernels.decoder import Decoder
from kimi_kernels.hf_config import load_config
from kimi_kernels.mini import make_mini
from kimi_kernels.state import Batch, State

FAMILIES = ("k3", "kimi-linear")
TOKENS = [5, 9, 250, 3, 77, 1]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict:
    root = tmp_path_factory.mktemp("mini")
    for family in FAMILIES:
        make_mini(root / family, family, seed=1)
    return {family: root / family for family in FAMILIES}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, checkpoints, device):
    config = load_config(checkpoints[request.param])
    return config, load_weights(checkpoints[request.param], config, device=device, progress=False)


@pytest.fixture(scope="module")
def short(model):
    """The first four layers: dense and MoE, KDA and MLA, the start of two residual blocks."""
    config, weights = model
    return config, dataclasses.replace(weights, layers=weights.layers[:4])


def feed(decoder: Decoder, tokens: list[int], device: str) -> torch.Tensor:
    return torch.stack([decoder.step(torch.tensor([t], device=device)).logits[0].clone() for t in tokens])


@pytest.mark.parametrize("backend", ("reference", "triton"))
def test_logits_lie_within_the_composed_bound(model, backend, device):
    config, weights = model
    if device == "cuda":
        pytest.skip("the exact step is a CPU computation; covered by the CPU run")
    exact = exact_steps(config, weights, TOKENS)
    ops = steered(make_ops(backend, device), exact.routes)
    got = feed(Decoder(config, weights, backend, device=device, ops=ops), TOKENS, device)
    distance = (got.double() - exact.logits).abs().amax(-1)
    assert bool((distance <= exact.bound).all()), f"{float((distance / exact.bound).max()):.3g} of the bound"


def test_composed_bound_rejects_a_wrong_model(model, device):
    """A wrong eps of the norms leaves the bound: it is not idle."""
    config, weights = model
    if device == "cuda":
        pytest.skip("CPU computation")
    exact = exact_steps(config, weights, TOKENS)
    wrong = dataclasses.replace(config, rms_eps=0.3)
    ops = steered(make_ops("reference"), exact.routes)
    got = feed(Decoder(wrong, weights, "reference", ops=ops), TOKENS, device)
    assert bool(((got.double() - exact.logits).abs().amax(-1) > exact.bound).any())


def batch_of(slots: list[int], seq_lens: list[int], device: str, new: bool = False, pages: int = 2) -> Batch:
    size = len(slots)
    return Batch(
        slots=torch.tensor(slots, dtype=torch.int32, device=device),
        is_new=torch.full((size,), new, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        page_table=torch.arange(size * pages, dtype=torch.int32, device=device).reshape(size, pages),
    )


def random_state(config: KimiConfig, slots: int, pages: int, page_size: int, device: str, seed: int = 0) -> State:
    state = State.zeros(config, slots, pages, page_size, device, range(4))
    generator = torch.Generator().manual_seed(seed)
    for layer in state.layers:
        for pool in vars(layer).values():
            pool.copy_(torch.randn(pool.shape, generator=generator) * 0.2)
    return state


def pools(state: State) -> list[torch.Tensor]:
    return [pool for layer in state.layers for pool in vars(layer).values()]


def test_a_row_does_not_depend_on_its_neighbours(short, device):
    """Changing the token, state and length of other rows leaves a row's logits and state bit for bit."""
    config, weights = short
    ops = make_ops("triton", device)
    outputs, states = [], []
    for tokens, lengths, noise in (([7, 20, 31], [5, 6, 3], 0.0), ([7, 99, 4], [5, 2, 8], 0.5)):
        state = random_state(config, 3, 6, 8, device)
        for pool in pools(state):
            pool[1:3] += noise if pool.shape[0] == 3 else 0
        out = decode_step(
            ops, config, weights, state, batch_of([0, 1, 2], lengths, device), torch.tensor(tokens, device=device)
        )
        outputs.append(out.logits[0])
        states.append([pool[0].clone() for pool in pools(state)])
    assert_same_bits(outputs[0], outputs[1], "logits of row 0")
    for a, b in zip(*states, strict=True):
        assert_same_bits(a, b, "state of sequence 0")


def test_two_runs_are_bitwise_equal(short, device):
    config, weights = short
    runs = [feed(Decoder(config, weights, "triton", device=device), TOKENS[:3], device) for _ in range(2)]
    assert_same_bits(runs[0], runs[1], "logits of two runs")


@pytest.mark.parametrize("backend", ("reference", "triton"))
def test_two_tokens_at_once_equal_two_steps(short, backend, device):
    """A verify step of T = 2 gives what two single steps give; rows are b*T + t."""
    config, weights = short
    ops = make_ops(backend, device)
    tokens = torch.tensor([[7, 20], [31, 2]], device=device)
    single, double = (random_state(config, 2, 4, 8, device) for _ in range(2))
    rows = [
        decode_step(
            ops, config, weights, single, batch_of([0, 1], [5 + t, 9 + t], device), tokens[:, t].contiguous()
        ).logits
        for t in range(2)
    ]
    both = decode_step(ops, config, weights, double, batch_of([0, 1], [6, 10], device), tokens.flatten()).logits
    scale = both.float().abs().max()
    assert float((both.float().unflatten(0, (2, 2)) - torch.stack(rows, 1).float()).abs().max()) <= 2**-6 * scale


def test_padded_rows_change_nothing_and_live_rows_do_not_notice(short, device):
    """Graph padding: slots below the first valid one leave every pool alone (NaN in unused places reaches nothing)."""
    config, weights = short
    ops = make_ops("triton", device)
    alone, padded = (random_state(config, 2, 4, 8, device) for _ in range(2))
    for pool in pools(alone) + pools(padded):
        pool[1 if pool.shape[0] == 2 else slice(2, 4)] = float("nan")
    token = torch.tensor([7], device=device)
    want = decode_step(ops, config, weights, alone, batch_of([0], [5], device), token).logits
    batch = batch_of([0, -1], [5, 0], device)
    got = decode_step(ops, config, weights, padded, batch, torch.tensor([7, 3], device=device)).logits
    assert bool(torch.isfinite(got).all())
    assert_same_bits(pools(alone)[0], pools(padded)[0], "conv window")
    distance = float((want[0].float() - got[0].float()).abs().max())
    assert distance <= 2**-6 * float(want.float().abs().max())


def test_a_new_sequence_ignores_what_its_slot_holds(short, device):
    config, weights = short
    ops = make_ops("triton", device)
    clean, dirty = (State.zeros(config, 1, 2, 8, device, range(4)) for _ in range(2))
    for pool in pools(dirty):
        pool.fill_(float("nan"))
    logits = [
        decode_step(
            ops, config, weights, s, batch_of([0], [1], device, new=True), torch.tensor([7], device=device)
        ).logits
        for s in (clean, dirty)
    ]
    assert_same_bits(logits[0], logits[1], "first logits of a new sequence")


def _rank(rank: int, world: int, directory, port: int, routes, results) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    config = load_config(directory)
    weights = load_weights(directory, config, tp=world, rank=rank, progress=False)
    ops = steered(make_ops("reference", collectives=process_group()), routes)
    decoder = Decoder(config.shard(world), weights, "reference", ops=ops)
    outputs = [decoder.step(torch.tensor([t])) for t in TOKENS]
    results[rank] = [(o.tokens.tolist(), o.logits) for o in outputs]
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_together_equal_the_whole(family, checkpoints, device):
    """Two tensor-parallel ranks over torch.distributed: concatenated logits within the bound, one token on both
    ranks."""
    if device == "cuda":
        pytest.skip("two ranks of one GPU; covered by the CPU run")
    directory = checkpoints[family]
    config = load_config(directory)
    exact = exact_steps(config, load_weights(directory, config, progress=False), TOKENS)
    with mp.Manager() as manager:
        results = manager.dict()
        port = 29500 + FAMILIES.index(family)
        mp.spawn(_rank, (2, directory, port, exact.routes, results), nprocs=2)
        ranks = [results[0], results[1]]
    logits = torch.cat([torch.stack([step[1][0] for step in rank]) for rank in ranks], dim=-1)
    assert [step[0] for step in ranks[0]] == [step[0] for step in ranks[1]]
    distance = (logits.double() - exact.logits).abs().amax(-1)
    assert bool((distance <= 2 * exact.bound).all()), f"{float((distance / exact.bound).max()):.3g} of the bound"


def test_layer_map_of_the_real_models():
    """T09: 69 KDA and 24 MLA layers, 91 and 92 both MLA, layer 0 dense."""
    assert len(K3.kda_layers) == 69 and len(K3.mla_layers) == 24
    assert {91, 92} <= set(K3.mla_layers) and K3.dense_layers == (0,) and K3.kda_layers[:3] == (0, 1, 2)
    assert KIMI_LINEAR_48B.mla_layers == (3, 7, 11, 15, 19, 23, 26)
    assert len([l for l in range(93) if K3.starts_block(l)]) == 8


@pytest.mark.parametrize("config", (K3_MINI, KIMI_LINEAR_MINI), ids=FAMILIES)
def test_mini_keeps_confusable_dims_apart(config):
    dims = [config.hidden_size, config.vocab_size, config.dense_size, config.expert_size, config.kv_lora_rank]
    dims += [
        config.kda_heads * config.kda_head_dim,
        config.num_experts,
        config.latent_size or 0,
        config.q_lora_rank or 1,
    ]
    assert len(set(dims)) == len(dims)
