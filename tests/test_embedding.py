"""embedding: rows of the table bit for bit, whatever the tokens and strides."""

from dataclasses import dataclass

import pytest
import torch
from cases import act_dtypes, far_pool, fills, make, rows, seeds, strided
from hypothesis import example, given
from hypothesis import strategies as st

from kimi_kernels.compare import assert_same_bits, check_op
from triton_ops.embedding import embedding

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    rows: int = 2
    vocab: int = 11
    width: int = 40
    fill: str = "normal"
    seed: int = 0
    dtype: torch.dtype = BF16
    token_dtype: torch.dtype = torch.int64

    def args(self, device: str) -> tuple:
        """Tokens from one below to one above the vocabulary, every third column of a table; the weight between NaN."""
        generator = torch.Generator().manual_seed(self.seed)
        tokens = torch.randint(-1, self.vocab + 1, (self.rows, 3), generator=generator, dtype=self.token_dtype)
        weight = make(self.vocab, self.width, fill=self.fill, seed=self.seed, dtype=self.dtype, device=device)
        return tokens.to(device)[:, 1], strided(weight)


cases = st.builds(
    Case,
    rows=rows,
    vocab=st.sampled_from((1, 11, 320)),
    width=st.sampled_from((8, 40, 1100)),
    fill=fills,
    seed=seeds,
    dtype=act_dtypes,
    token_dtype=st.sampled_from((torch.int32, torch.int64)),
)


@given(cases)
@example(Case(rows=1, width=160))
def test_equals_the_reference(device, case):
    check_op("embedding", embedding, *case.args(device))


@pytest.mark.parametrize("token_dtype", (torch.int32, torch.int64))
def test_rows_are_copied_bit_for_bit(device, token_dtype):
    weight = make(9, 33, fill="wide", device=device)
    tokens = torch.tensor([8, 0, 3, 3], dtype=token_dtype, device=device)
    assert_same_bits(embedding(tokens, weight), weight[tokens.long()])


def test_a_token_outside_the_table_gives_a_zero_row(device):
    weight = make(9, 33, fill="ones", device=device)
    x = embedding(torch.tensor([-1, 9, 2**40, 0, -(2**63)], device=device), weight)
    assert x[[0, 1, 2, 4]].eq(0).all() and x[3].eq(1).all()


def test_no_rows_give_an_empty_result(device):
    """Fault I19."""
    tokens, weight = Case().args(device)
    x = embedding(tokens[:0], weight)
    assert x.shape == (0, 40) and x.dtype == BF16


def test_results_are_fresh_tensors(device):
    """Fault S06."""
    tokens, weight = Case().args(device)
    first = embedding(tokens, weight)
    kept = first.clone()
    embedding(tokens.flip(0), weight)
    assert_same_bits(first, kept)


def test_token_times_pitch_overflows_32_bits(device):
    """As fault I02: int32 tokens and a pitch that fits 32 bits; token 2 times the pitch does not."""
    near = make(3, 32, device=device)
    tokens = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
    assert_same_bits(embedding(tokens, far_pool(near)), embedding(tokens, near))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", (1, 8, 32))
def test_k3_shapes(device, rows):
    weight = torch.randn(163840, 7168, device=device, dtype=BF16)
    tokens = torch.randint(0, 163840, (rows,), device=device)
    tokens[0] = 163839
    assert_same_bits(embedding(tokens, weight), weight[tokens])
