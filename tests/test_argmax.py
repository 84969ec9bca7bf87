"""argmax: exact against the reference, ties and NaN across and inside blocks."""

from dataclasses import dataclass

import pytest
import torch
from cases import act_dtypes, fills, make, rows, seeds, strided
from hypothesis import example, given
from hypothesis import strategies as st

from kimi_kernels.compare import assert_same_bits, check_op
from triton_ops.argmax import ArgmaxConfig, _launch, argmax

FP32, BF16 = torch.float32, torch.bfloat16
NAN, INF = float("nan"), float("inf")
BLOCKS = ArgmaxConfig(block=16, num_warps=1)  # several blocks and a merge also for short rows


@dataclass(frozen=True)
class Case:
    rows: int = 2
    vocab: int = 40
    vocab_start: int = 0
    fill: str = "normal"
    seed: int = 0
    dtype: torch.dtype = BF16

    def args(self, device: str) -> tuple:
        logits = make(self.rows, self.vocab, fill=self.fill, seed=self.seed, dtype=self.dtype, device=device)
        return strided(logits), self.vocab_start


cases = st.builds(
    Case,
    rows=rows,
    vocab=st.sampled_from((1, 8, 40, 320, 1000)),
    vocab_start=st.sampled_from((0, 1, 143360)),
    fill=fills,
    seed=seeds,
    dtype=act_dtypes,
)


@given(cases)
@example(Case(rows=1, vocab=20480))
@example(Case(rows=2, vocab=40000, vocab_start=40000))
def test_equals_the_reference(device, case):
    """Fills zeros, ones and special are all ties."""
    check_op("argmax", argmax, *case.args(device))


@given(cases.filter(lambda case: case.vocab <= 320))
def test_blocks_and_merge_equal_the_reference(device, case):
    check_op("argmax", lambda logits, start: _launch(BLOCKS, logits, start), *case.args(device))


@pytest.mark.parametrize("config", (BLOCKS, ArgmaxConfig(64, 1)), ids=str)
@pytest.mark.parametrize("first", (0, 15, 16, 17, 39))
def test_ties_take_the_lowest_index(device, config, first):
    logits = torch.full((1, 40), -1.0, dtype=BF16, device=device)
    logits[0, first:] = 2.0
    tokens, values = _launch(config, logits, 1000)
    assert tokens.tolist() == [1000 + first] and values.tolist() == [2.0]


@pytest.mark.parametrize("config", (BLOCKS, ArgmaxConfig(64, 1)), ids=str)
def test_zeros_of_both_signs_tie(device, config):
    logits = torch.full((2, 40), -1.0, device=device)
    logits[0, [20, 30]] = torch.tensor([-0.0, 0.0], device=device)
    logits[1, [3, 30]] = torch.tensor([0.0, -0.0], device=device)
    assert _launch(config, logits, 0)[0].tolist() == [20, 3]


@pytest.mark.parametrize("config", (BLOCKS, ArgmaxConfig(64, 1)), ids=str)
def test_nan_never_wins(device, config):
    """NaN counts as -inf; a row of NaN, or of -inf, gives index 0 and -inf."""
    logits = make(5, 40, dtype=FP32, device=device)
    logits[0, 0], logits[1], logits[2] = NAN, NAN, -INF
    logits[3], logits[3, 35] = NAN, -7.0
    logits[4, [18, 39]] = INF
    tokens, values = _launch(config, logits, 100)
    assert tokens[1:].tolist() == [100, 100, 135, 118] and values[1:].tolist() == [-INF, -INF, -7.0, INF]
    check_op("argmax", lambda logits, start: _launch(config, logits, start), logits, 100)


def test_memory_around_the_row_is_not_read(device):
    wide = torch.full((3, 80), INF, dtype=BF16, device=device)
    wide[:, 20:57] = make(3, 37, device=device)
    check_op("argmax", argmax, wide[:, 20:57], 0)


@given(seed=seeds, vocab=st.sampled_from((40, 1000)))
def test_ranks_together_equal_one_rank(device, seed, vocab):
    """Winners of slices, compared in the order of the ranks, are the winner of the row."""
    logits, _ = Case(rows=3, vocab=vocab, fill="special", seed=seed).args(device)
    parts = [argmax(part, vocab // 4 * rank) for rank, part in enumerate(logits.chunk(4, dim=1))]
    tokens, values = (torch.stack(column, dim=1) for column in zip(*parts, strict=True))
    first = values.eq(values.amax(1, keepdim=True)).int().argmax(1, keepdim=True)
    assert_same_bits(tokens.gather(1, first)[:, 0], argmax(logits, 0)[0])


def test_rows_are_independent(device):
    """Fault I20, with a NaN row among them; views equal copies (fault I11)."""
    logits, start = Case(rows=9, vocab=100).args(device)
    logits[4] = NAN
    together = argmax(logits, start)
    for r in range(9):
        for a, b in zip(argmax(logits[r : r + 1].contiguous(), start), together, strict=True):
            assert_same_bits(a[0], b[r])


def test_no_rows_give_empty_results(device):
    """Fault I19."""
    tokens, values = argmax(Case().args(device)[0][:0], 0)
    assert tokens.shape == values.shape == (0,) and tokens.dtype == torch.int64 and values.dtype == FP32


def test_results_are_fresh_tensors(device):
    """Fault S06."""
    logits, start = Case().args(device)
    first = argmax(logits, start)
    kept = [t.clone() for t in first]
    argmax(-logits, start)
    for a, b in zip(first, kept, strict=True):
        assert_same_bits(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", (1, 8, 32))
@pytest.mark.parametrize("vocab", (163840, 20480, 10240, 5120))
def test_model_shapes(device, vocab, rows):
    check_op("argmax", argmax, *Case(rows, vocab, vocab_start=163840 - vocab).args(device))
