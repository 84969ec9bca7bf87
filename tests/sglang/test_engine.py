"""Real engines: with the flag, and with our KDA ops, they give SGLang's own tokens and logprobs.

SGLang's models are written independently of this repository, K3's too, so equal logprobs are evidence for both. One
workload (engine_jobs.py) has six requests at once, chunked prefill, mixed batches and prefix-cache hits with state.
"""

import re

import pytest
from engine_jobs import JOBS, NEW

# float32 on both sides, sums in other orders: seen below 1e-5
LOGPROB = 1e-3
COVERED = ("flag", "per-op")


@pytest.mark.parametrize("family", ("kimi-linear", "k3"))
@pytest.mark.parametrize("who", COVERED)
def test_tokens_and_logprobs_are_those_of_sglang(engines, family, who):
    """Fault T03: decode rows next to prefill rows; T15: scale and unrotated dims; T11: the output gate of wrapped
    modules."""
    want, got = engines.outcome(f"{family} stock"), engines.outcome(f"{family} {who}")
    for ours, theirs in zip(got.rounds, want.rounds, strict=True):
        assert ours["tokens"] == theirs["tokens"]
        assert ours["cached"] == theirs["cached"]
        assert worst(ours, theirs) < LOGPROB


def test_k3_as_released(engines):
    """MXFP4 experts inside the multimodal class: raw weights noted at load, before SGLang repacks them."""
    want, got = engines.outcome("k3-released stock"), engines.outcome("k3-released flag")
    assert got.rounds[0]["tokens"] == want.rounds[0]["tokens"]
    assert worst(got.rounds[0], want.rounds[0]) < LOGPROB
    assert re.search(r"active \(kimi-kernels-k3: .* 0\.[1-9] MiB of MXFP4 kept", got.log)


@pytest.mark.parametrize("family", ("kimi-linear", "k3"))
def test_the_triton_step_gives_the_same(engines, family):
    name = f"{family} flag, triton"
    want, got = engines.outcome(f"{family} stock").rounds[0], engines.outcome(name).rounds[0]
    for position, request in enumerate(JOBS[name].requests):
        length = len(got["tokens"][position])
        assert got["tokens"][position] == want["tokens"][request][:length] and length > 1
        pairs = zip(got["logprobs"][position], want["logprobs"][request], strict=False)
        assert max(abs(a - b) for a, b in pairs) < LOGPROB


@pytest.mark.parametrize("family", ("kimi-linear", "k3"))
def test_the_workload_has_what_it_is_for(engines, family):
    """Otherwise the equality above would prove less than it says."""
    stock = engines.outcome(f"{family} stock")
    assert [len(tokens) for tokens in stock.rounds[0]["tokens"]] == list(NEW)
    assert sum(cached > 0 for cached in stock.rounds[1]["cached"]) >= 4
    assert stock.rounds[0]["tokens"] == stock.rounds[1]["tokens"]
    beside_decodes = re.findall(r"Prefill batch, .*#running-req: [1-9]", stock.log)
    assert beside_decodes, "no prefill chunk ran beside decodes"


@pytest.mark.parametrize("family", ("kimi-linear", "k3"))
def test_the_log_says_what_decodes(engines, family):
    """Fault T01: a fused path that is skipped silently stays unnoticed for months."""
    flag, triton = engines.outcome(f"{family} flag").log, engines.outcome(f"{family} flag, triton").log
    active = r"NVIDIA megakernel: active \(kimi-kernels-[\w-]+: reference ops \(KIMI_SGLANG_RUNNER=reference\)"
    assert len(re.findall(active, flag)) == 1
    assert len(re.findall(r"active \(kimi-kernels-[\w-]+: triton ops \(no megakernel: device cpu\)", triton)) == 1
    assert len(re.findall(r"kimi-kernels: first covered step, \d rows", flag)) == 1
    gate = "kda_gate_bounded" if family == "k3" else "kda_gate_softplus"
    per_op = engines.outcome(f"{family} per-op").log
    assert len(re.findall(rf"KDA layers decode through causal_conv1d, {gate}, kda_recurrent", per_op)) == 1
    assert "kimi-kernels:" not in engines.outcome(f"{family} stock").log


def worst(ours: dict, theirs: dict) -> float:
    """Largest difference of two rounds' logprobs."""
    pairs = zip(ours["logprobs"], theirs["logprobs"], strict=True)
    return max(abs(a - b) for left, right in pairs for a, b in zip(left, right, strict=True))
