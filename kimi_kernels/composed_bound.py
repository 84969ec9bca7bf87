"""How far the logits of a correct backend may lie from the exact step: per-op bounds, carried through the model.

Worst-case bounds multiplied through dozens of layers say nothing, so the composition is sampled: the float64 step is
run again with every output of every op (and every pool entry it writes) displaced to a random end of its own bound,
and the largest resulting distance of the logits, times `SAFETY`, is the composed bound. A correct backend makes smaller
errors than these runs do: roundings spread over the interval, they do not sit at its ends.

Top-k is not continuous: two experts closer than a rounding may be picked either way, and the logits jump. So the exact
run decides the routing, and `steered` makes every other run follow it, each with weights from its own logits. Whether a
backend picks rightly by its own logits is the business of its `moe_router` test.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch

from kimi_kernels.collectives import single_rank
from kimi_kernels.compare import reference_bounds, rounding_limit
from kimi_kernels.config import KimiConfig
from kimi_kernels.decode_step import decode_step
from kimi_kernels.error_bound import Bounded, bounded
from kimi_kernels.op_specs import OPS
from kimi_kernels.state import Batch, State
from kimi_kernels.weights import ModelWeights

Tensor = torch.Tensor
SAFETY = 2.0
SAMPLES = 4


@dataclass(frozen=True)
class ExactSteps:
    """Exact logits of a fed token sequence and the composed bound of each step."""

    logits: Tensor  # [steps, VOCAB] float64
    bound: Tensor  # [steps] float64, on the largest distance over the vocabulary
    routes: list[Tensor]  # topk_ids of every moe_router call, in order


def exact_steps(config: KimiConfig, weights: ModelWeights, tokens: list[int], samples: int = SAMPLES) -> ExactSteps:
    """Feeds `tokens` to the float64 step and to `samples` displaced copies of it."""
    recorder, routes = recorded(displaced_ops(config.dtype, 0.0, 0))
    exact = _feed(config, weights, tokens, recorder)
    runs = []
    for seed in range(samples):
        ops = steered(displaced_ops(config.dtype, 1.0, seed), routes)
        runs.append(_feed(config, weights, tokens, ops))
    distance = torch.stack([(run - exact).abs().amax(-1) for run in runs]).amax(0)
    return ExactSteps(exact, SAFETY * distance, routes)


def recorded(ops: SimpleNamespace) -> tuple[SimpleNamespace, list[Tensor]]:
    """`ops` with a moe_router that notes its picks, and the list it notes them in."""
    routes: list[Tensor] = []

    def moe_router(*args):
        topk_ids, topk_weights = ops.moe_router(*args)
        routes.append(topk_ids)
        return topk_ids, topk_weights

    return SimpleNamespace(**{**vars(ops), "moe_router": moe_router}), routes


def steered(ops: SimpleNamespace, routes: list[Tensor]) -> SimpleNamespace:
    """`ops` with a moe_router that runs, then follows `routes` call by call, with the weights of its own logits."""
    following = iter(routes)

    def moe_router(logits: Tensor, bias: Tensor, top_k: int, scaling: float):
        ops.moe_router(logits, bias, top_k, scaling)
        topk_ids = next(following)
        picked = torch.sigmoid(logits).gather(-1, topk_ids.long())
        return topk_ids, picked / (picked.sum(-1, keepdim=True) + 1e-20) * scaling

    return SimpleNamespace(**{**vars(ops), "moe_router": moe_router})


def displaced_ops(act: torch.dtype, amplitude: float, seed: int) -> SimpleNamespace:
    """The float64 reference with each output moved by +-amplitude times the error that a kernel with `act` outputs
    may make."""
    generator = torch.Generator().manual_seed(seed)
    nominal = {"act": act, "f32": torch.float32}

    def displace(want: Bounded | Tensor, dtype: torch.dtype) -> Tensor:
        if not isinstance(want, Bounded) and not want.is_floating_point():
            return want
        want = bounded(want)
        sign = torch.randint(0, 2, want.shape, generator=generator) * 2.0 - 1.0
        return want.value + amplitude * sign * rounding_limit(want, dtype)

    def make(op: str):
        spec = OPS[op]
        kinds = [want.split()[-1] for want in spec.outputs.values()]

        def run(*args):
            outputs, pools = reference_bounds(op, args)
            for name, pool in pools.items():
                for index, want in pool.written.items():
                    pool.tensor[index] = displace(want, nominal[str(spec.args[name]).split()[-1]])
            results = tuple(displace(o, nominal.get(kind, act)) for o, kind in zip(outputs, kinds, strict=True))
            return results if len(results) > 1 else results[0] if results else None

        return run

    return SimpleNamespace(**{op: make(op) for op in OPS}, **single_rank())


def _feed(config: KimiConfig, weights: ModelWeights, tokens: list[int], ops: SimpleNamespace) -> Tensor:
    state = State.zeros(config, slots=1, pages=1, page_size=len(tokens), layers=[w.index for w in weights.layers])
    state = State(tuple(_in_float64(layer) for layer in state.layers))
    batch = Batch(
        slots=torch.zeros(1, dtype=torch.int32),
        is_new=torch.ones(1, dtype=torch.bool),
        seq_lens=torch.zeros(1, dtype=torch.int32),
        page_table=torch.zeros(1, 1, dtype=torch.int32),
    )
    logits = []
    for token in tokens:
        batch.seq_lens.add_(1)
        logits.append(decode_step(ops, config, weights, state, batch, torch.tensor([token])).logits[0])
        batch.is_new.fill_(False)
    return torch.stack(logits)


def _in_float64(layer):
    return type(layer)(**{name: pool.double() for name, pool in vars(layer).items()})
