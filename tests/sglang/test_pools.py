"""Views of SGLang's own pools: layouts, strides, page sizes, padded rows, state that follows prefix-cache entries."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from tiny_models import TINY_K3, TINY_KIMI_LINEAR

from kimi_kernels.backends import make_ops
from kimi_kernels.checkpoint import load_weights
from kimi_kernels.decode_step import decode_step
from kimi_kernels.state import State
from sglang_integration import compat, per_op
from sglang_integration.views import FIRST_VALID_SLOT, PoolViews, pool_state, step_batch

REQUESTS, SLOTS, TOKENS, CONTEXT = 4, 6, 64, 32
CONFIG = TINY_KIMI_LINEAR


@dataclasses.dataclass
class Pools:
    """SGLang's request and token pools of a tiny model, and a stand-in for the backend of a running forward."""

    requests: object
    tokens: object
    running: compat.Running


def make_pools(config=CONFIG, page_size=1, envelope=False, slots=(1, 2)) -> Pools:
    from sglang.srt.configs.mamba_utils import KimiLinearCacheParams, KimiLinearStateShape
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool

    shape = KimiLinearStateShape.create(
        tp_world_size=1, num_heads=config.kda_heads, head_dim=config.kda_head_dim, conv_kernel_size=config.conv_taps
    )
    layers = list(config.kda_layers)
    requests = HybridReqToTokenPool(
        size=REQUESTS,
        mamba_size=SLOTS,
        mamba_spec_state_size=0,
        max_context_len=CONTEXT,
        device="cpu",
        enable_memory_saver=False,
        cache_params=KimiLinearCacheParams(shape=shape, layers=layers),
        mamba_layer_ids=layers,
        enable_mamba_extra_buffer=True,
        mamba_envelope_layout=envelope,
    )
    tokens = HybridLinearKVPool(
        size=TOKENS,
        dtype=torch.float32,
        page_size=page_size,
        head_num=1,
        head_dim=config.kv_lora_rank + config.qk_rope_dim,
        full_attention_layer_ids=list(config.mla_layers),
        device="cpu",
        mamba_pool=requests.mamba_pool,
        use_mla=True,
        kv_lora_rank=config.kv_lora_rank,
        qk_rope_head_dim=config.qk_rope_dim,
    )
    cache = requests.mamba_pool.mamba_cache
    cache.conv[0].normal_()
    cache.temporal.normal_()
    for layer in config.mla_layers:
        tokens.get_key_buffer(layer).normal_()
    running = compat.Running(
        conv=cache.conv[0],
        temporal=cache.temporal,
        pool_index=requests.mamba_map,
        key_buffer=tokens.get_key_buffer,
        page_size=tokens.page_size,
        req_to_token=requests.req_to_token,
        slots=torch.tensor(slots, dtype=torch.int32),
        backend=None,
    )
    return Pools(requests, tokens, running)


def batch_of(requests: list[int], lengths: list[int]) -> SimpleNamespace:
    """The fields of a ForwardBatch that a step reads, with SGLang's dtypes."""
    return SimpleNamespace(req_pool_indices=torch.tensor(requests), seq_lens=torch.tensor(lengths))


@pytest.mark.parametrize("envelope", (False, True), ids=("dense", "envelope"))
@pytest.mark.parametrize("config", (TINY_KIMI_LINEAR, TINY_K3), ids=("kimi-linear", "k3"))
def test_state_is_sglangs_memory(config, envelope):
    """Fault T01: both conv layouts; strides of an envelope pool are taken as they are."""
    pools = make_pools(config, envelope=envelope)
    state = pool_state(pools.running, config)
    for layer in range(config.num_layers):
        if layer in config.mla_layers:
            ours, theirs = state.layers[layer].latent_cache, pools.tokens.get_key_buffer(layer)
        else:
            theirs = pools.requests.mamba2_layer_cache(layer).temporal
            ours = state.layers[layer].recurrent
            window = state.layers[layer].conv_window
            assert window.data_ptr() == pools.requests.mamba2_layer_cache(layer).conv[0].data_ptr()
        assert ours.data_ptr() == theirs.data_ptr()
        ours[1].fill_(float(layer))
        assert bool((theirs.flatten(0, 1) if layer in config.mla_layers else theirs)[1].eq(float(layer)).all())


def test_pools_of_another_layout_are_refused():
    pools = make_pools()
    with pytest.raises(ValueError, match="temporal state of layer 0 must be .* torch.float32"):
        pool_state(dataclasses.replace(pools.running, temporal=pools.running.temporal.bfloat16()), CONFIG)
    with pytest.raises(ValueError, match="conv state of layer 0 must be"):
        pool_state(dataclasses.replace(pools.running, conv=pools.running.conv.transpose(-1, -2)), CONFIG)


def test_pools_that_moved_are_noticed():
    views, pools = PoolViews(CONFIG), make_pools()
    assert views.state(pools.running) is views.state(pools.running)
    with pytest.raises(RuntimeError, match="moved"):
        views.state(dataclasses.replace(pools.running, temporal=pools.running.temporal.clone()))


@pytest.mark.parametrize("page_size", (1, 8, 16))
def test_page_tables_find_the_tokens(page_size):
    """The row of each cached token is the one that req_to_token names, for any page size."""
    pools = make_pools(page_size=page_size)
    order = torch.randperm(TOKENS // page_size)[: CONTEXT // page_size] + 1
    slots = (order[:, None] * page_size + torch.arange(page_size)).flatten().to(torch.int32)
    pools.requests.req_to_token[2, :CONTEXT] = slots
    batch = step_batch(pools.running, batch_of([2, 2], [CONTEXT, 5]))
    layer = CONFIG.mla_layers[0]
    cache = pool_state(pools.running, CONFIG).layers[layer].latent_cache
    positions = torch.arange(CONTEXT)
    found = cache[batch.page_table[0].long()[positions // page_size], positions % page_size]
    assert torch.equal(found, pools.tokens.get_key_buffer(layer)[slots.long()].squeeze(1))
    assert batch.page_table.dtype == batch.seq_lens.dtype == batch.slots.dtype == torch.int32
    assert batch.seq_lens.tolist() == [CONTEXT, 5]


def test_padded_rows_of_a_graph_change_nothing_and_stay_finite(tiny):
    """While graphs are captured all rows have slot 0; at replay padded rows have -1, request 0 and a fill length."""
    pools = make_pools(slots=(3, -1, 0))
    pools.requests.req_to_token[1, :4] = torch.tensor([7, 9, 11, 13], dtype=torch.int32)
    state = pool_state(pools.running, CONFIG)
    weights, ops = load_weights(tiny / "kimi-linear", CONFIG, progress=False), make_ops("reference")
    before = [[tensor.clone() for tensor in vars(layer).values()] for layer in state.layers]
    batch = step_batch(pools.running, batch_of([1, 0, 0], [4, 1, 1]))
    assert batch.seq_lens.tolist() == [4, 0, 0]
    logits = decode_step(ops, CONFIG, weights, state, batch, torch.tensor([5, 6, 7])).logits
    assert bool(torch.isfinite(logits).all())
    for layer, old in zip(state.layers, before, strict=True):
        for tensor, was in zip(vars(layer).values(), old, strict=True):
            changed = (tensor != was).flatten(1).any(1).nonzero().flatten().tolist()
            assert changed == ([13] if tensor.shape[0] > SLOTS + 1 else [3])
    alone = State(tuple(type(layer)(*old) for layer, old in zip(state.layers, before, strict=True)))
    single = dataclasses.replace(pools.running, slots=pools.running.slots[:1])
    want = decode_step(ops, CONFIG, weights, alone, step_batch(single, batch_of([1], [4])), torch.tensor([5])).logits
    assert torch.equal(logits[:1], want)


def test_states_of_tracked_rows_follow_the_prefix_cache():
    """SGLang's own copy kernel, called once for all layers as its last KDA layer does."""
    from sglang.srt.layers.attention.linear.kda_backend import KDAAttnBackend

    pools = make_pools(slots=(1, 2))
    backend = object.__new__(KDAAttnBackend)
    backend.req_to_token_pool, backend.enable_unified_memory = pools.requests, False
    backend.forward_metadata = SimpleNamespace(mamba_track_indices=torch.tensor([4, 5]))
    batch = SimpleNamespace(mamba_track_mask=torch.tensor([True, False]), batch_size=2)
    cache = pools.requests.mamba_pool.mamba_cache
    before = cache.temporal.clone()
    compat.track_states(dataclasses.replace(pools.running, backend=backend), batch)
    for pool in (cache.conv[0], cache.temporal):
        assert torch.equal(pool[:, 4], pool[:, 1])
    assert torch.equal(cache.temporal[:, 5], before[:, 5])


@pytest.mark.parametrize("lower_bound", (None, -5.0), ids=("softplus", "bounded"))
@pytest.mark.parametrize("envelope", (False, True), ids=("dense", "envelope"))
def test_kda_ops_agree_with_sglangs_kernels(lower_bound, envelope):
    """Conv, gates and recurrence on SGLang's pools against its Triton kernels, with a padded row."""
    from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_update
    from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel

    heads, dim, rows = CONFIG.kda_heads, CONFIG.kda_head_dim, 3
    width = heads * dim
    ours, theirs = (make_pools(envelope=envelope) for _ in range(2))
    for name in ("conv", "temporal"):
        getattr(theirs.running, name).copy_(getattr(ours.running, name))
    layer = SimpleNamespace(
        conv_weights=torch.randn(3 * width, CONFIG.conv_taps),
        A_log=torch.rand(1, 1, heads, 1),
        dt_bias=torch.randn(width),
        lower_bound=lower_bound,
    )
    qkv, a, b = torch.randn(rows, 3 * width), torch.randn(rows, width), torch.randn(1, rows, heads)
    slots = torch.tensor([4, -1, 2], dtype=torch.int32)
    index = 1
    got = per_op.kda_decode(layer, ours.running.conv[index], ours.running.temporal[index], slots, qkv, a, b)
    conv, temporal = theirs.running.conv[index], theirs.running.temporal[index]
    mixed = causal_conv1d_update(
        qkv.clone(), conv.transpose(-1, -2), layer.conv_weights, None, activation="silu", conv_state_indices=slots
    )
    want = TritonKDAKernel().packed_decode(
        mixed, a, b, A_log=layer.A_log, dt_bias=layer.dt_bias, scale=dim**-0.5, ssm_states=temporal,
        cache_indices=slots, num_v_heads=heads, head_v_dim=dim, lower_bound=lower_bound,
    )  # fmt: skip
    live = [0, 2]
    # float32 on both sides, sums of 32 terms in other orders
    torch.testing.assert_close(got[0, live], want[0, live], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(ours.running.temporal, theirs.running.temporal, rtol=2e-5, atol=2e-5)
    assert torch.equal(ours.running.conv, theirs.running.conv)
    assert not got[0, 1].any()


def test_slot_zero_is_sglangs_padding_slot():
    pools = make_pools()
    free = pools.requests.mamba_allocator.alloc(SLOTS).tolist()
    assert sorted(free) == list(range(FIRST_VALID_SLOT, SLOTS + 1))
