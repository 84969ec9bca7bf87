"""attn_res_norm: cases against the reference, the properties of a mixture, known faults of attention residuals."""

from dataclasses import dataclass

import pytest
import torch
from cases import act_dtypes, fills, make, rows, seeds, strided
from hypothesis import example, given
from hypothesis import strategies as st

from kimi_kernels.compare import assert_same_bits, check_op
from triton_ops.attn_res_norm import AttnResNormConfig, _launch, attn_res_norm

FP32, BF16 = torch.float32, torch.bfloat16
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    rows: int = 2
    bank: int = 3
    width: int = 40
    spread: int = 0  # bank row j is scaled by 10^(+-spread)
    score_scale: float = 1.0
    fill: str = "normal"
    seed: int = 0
    dtype: torch.dtype = BF16

    def args(self, device: str) -> tuple:
        """Candidates are slices of NaN tensors with different row strides."""

        def candidate(j: int) -> torch.Tensor:
            scale = 10.0 ** (self.spread * (j % 3 - 1))
            kind = dict(fill=self.fill, seed=self.seed + j, dtype=self.dtype, device=device, scale=scale)
            return strided(make(self.rows, self.width, **kind), before=8 * j)

        bank = [candidate(j) for j in range(self.bank)]
        score_weight = make(self.width, seed=self.seed + 90, dtype=FP32, device=device, scale=self.score_scale)
        norm_weight = make(self.width, seed=self.seed + 91, dtype=self.dtype, device=device)
        return candidate(self.bank), bank, score_weight, norm_weight, 1e-5


cases = st.builds(
    Case,
    rows=rows,
    bank=st.integers(1, 9),
    width=st.sampled_from((8, 40, 160, 1100)),
    spread=st.integers(0, 2),
    score_scale=st.sampled_from((0.1, 1.0, 10.0)),
    fill=fills,
    seed=seeds,
    dtype=act_dtypes,
)


@given(cases)
@example(Case(rows=1, bank=8, width=7168))
@example(Case(rows=2, bank=8, width=160, spread=2))
def test_equals_the_reference(device, case):
    """Fault N31 with spread: rounding the normed value, or mixing normed rows, leaves the bound."""
    check_op("attn_res_norm", attn_res_norm, *case.args(device))


@given(seed=seeds, dtype=act_dtypes)
def test_an_empty_bank_is_the_plain_norm(device, seed, dtype):
    prefix, _, score_weight, norm_weight, eps = Case(seed=seed, dtype=dtype).args(device)
    check_op("rms_norm", lambda x, w, eps: attn_res_norm(x, [], score_weight, w, eps), prefix, norm_weight, eps)


@pytest.mark.parametrize("bank", (1, 2, 4, 8))
@pytest.mark.parametrize("score", (500.0, -500.0))
def test_equal_candidates_give_their_norm(device, bank, score):
    """Fault N33: weights are 1/(N+1); padded candidates that score 0 would take all or half of the weight."""
    x = make(3, 160, fill="ones", dtype=FP32, device=device) * torch.tensor([[1.0], [2.0], [-3.0]], device=device)
    score_weight = torch.full((160,), score / 160, dtype=FP32, device=device)
    norm_weight = make(160, dtype=FP32, device=device)
    mixed = lambda x, w, eps: attn_res_norm(x, [x] * bank, score_weight, w, eps)  # noqa: E731
    check_op("rms_norm", mixed, x, norm_weight, 1e-5)


def test_the_largest_score_takes_all(device):
    """Row j of the bank alone scores high: the result is its norm, for each j and for the prefix."""
    candidates = list(make(9, 1, 64, seed=5, dtype=FP32, device=device))
    norm_weight, score_weight = torch.ones(64, device=device), torch.zeros(64, device=device)
    score_weight[0] = 1e4
    for winner in range(9):
        rows = [c.clone() for c in candidates]
        for j, c in enumerate(rows):
            c[:, 0] = 1.0 if j == winner else -1.0
        mixed = lambda x, w, eps, rows=rows: attn_res_norm(rows[8], rows[:8], score_weight, w, eps)  # noqa: E731
        check_op("rms_norm", mixed, rows[winner], norm_weight, 1e-5)


@pytest.mark.parametrize("keep", (0, 1, 4, 16))
def test_rows_loaded_again_give_the_same_bits(device, keep):
    args = Case(bank=5).args(device)
    assert_same_bits(_launch(AttnResNormConfig(1, keep), *args), attn_res_norm(*args))


def test_inputs_keep_their_bits_and_may_alias(device):
    """Fault S07: no candidate is overwritten, also where one tensor is passed twice."""
    prefix, bank, *weights = Case(bank=4).args(device)
    before = [t.clone() for t in (prefix, *bank)]
    aliased = attn_res_norm(prefix, [bank[0], prefix, bank[0]], *weights)
    copied = attn_res_norm(prefix.clone(), [bank[0].clone(), prefix.clone(), bank[0].clone()], *weights)
    assert_same_bits(aliased, copied)
    for tensor, kept in zip((prefix, *bank), before, strict=True):
        assert_same_bits(tensor, kept)


def test_rows_are_independent(device):
    """Fault I20, with a NaN row among them; views equal copies (fault I11)."""
    prefix, bank, *weights = Case(rows=5, bank=3).args(device)
    bank[1][2] = NAN
    h = attn_res_norm(prefix, bank, *weights)
    for r in range(5):
        alone = attn_res_norm(prefix[r : r + 1].contiguous(), [b[r : r + 1].contiguous() for b in bank], *weights)
        assert_same_bits(alone[0], h[r])
    assert h[2].isnan().all() and h[[1, 3]].isfinite().all()


def test_no_rows_give_an_empty_result(device):
    """Fault I19."""
    prefix, bank, *weights = Case().args(device)
    h = attn_res_norm(prefix[:0], [b[:0] for b in bank], *weights)
    assert h.shape == (0, 40) and h.dtype == BF16


def test_results_are_fresh_tensors(device):
    """Fault S06."""
    prefix, bank, *weights = Case().args(device)
    first = attn_res_norm(prefix, bank, *weights)
    kept = first.clone()
    attn_res_norm(-prefix, bank, *weights)
    assert_same_bits(first, kept)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", (1, 8, 32))
@pytest.mark.parametrize("bank", range(1, 9))
def test_k3_shapes(device, bank, rows):
    check_op("attn_res_norm", attn_res_norm, *Case(rows=rows, bank=bank, width=7168, score_scale=0.02).args(device))
