"""linear: cases against the reference for every launch config, and the rows it must keep apart."""

from dataclasses import dataclass

import pytest
import torch
from cases import act_dtypes, far_pool, fills, make, seeds, strided
from hypothesis import example, given
from hypothesis import strategies as st

from kimi_kernels.compare import assert_same_bits, check_op
from triton_ops.linear import ONE_ROW, ROWS, OneRowConfig, RowsConfig, launch_linear, linear, pick_linear_config

FP32, BF16 = torch.float32, torch.bfloat16
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    rows: int = 2
    outputs: int = 20
    inputs: int = 40
    fill: str = "normal"
    seed: int = 0
    dtype: torch.dtype = BF16

    def args(self, device: str) -> tuple:
        """x and weight are slices of NaN tensors: a read past a row or past the last one shows."""
        kind = dict(fill=self.fill, dtype=self.dtype, device=device)
        x = make(self.rows, self.inputs, seed=self.seed, **kind)
        weight = make(self.outputs, self.inputs, seed=self.seed + 1, **kind)
        fence = torch.full((self.outputs + 8, self.inputs), NAN, dtype=self.dtype, device=device)
        fence[: self.outputs] = weight
        return strided(x), strided(fence)[: self.outputs]


cases = st.builds(
    Case,
    rows=st.sampled_from((1, 2, 3, 7, 8, 9, 16, 17, 33)),
    outputs=st.sampled_from((1, 8, 20, 300)),
    inputs=st.sampled_from((1, 40, 128, 256, 300)),
    fill=fills,
    seed=seeds,
    dtype=act_dtypes,
)
configs = st.one_of(
    st.builds(OneRowConfig, st.sampled_from((8, 32)), st.sampled_from((64, 256)), st.just(1), st.sampled_from((1, 2))),
    st.builds(RowsConfig, st.sampled_from((16, 32)), st.sampled_from((64, 128)), st.just(4), st.sampled_from((1, 3))),
)


@given(cases)
@example(Case(rows=1, outputs=320, inputs=160))
@example(Case(rows=32, outputs=8, inputs=7168))
def test_equals_the_reference(device, case):
    check_op("linear", linear, *case.args(device))


@given(cases, configs)
def test_any_config_equals_the_reference(device, case, config):
    """Launch choices change the time, not the meaning; few outputs, because a program costs the interpreter 30 ms."""
    x, weight = case.args(device)
    run = lambda x, w: launch_linear(x, w, torch.empty(len(x), len(w), dtype=x.dtype, device=device), config)  # noqa: E731
    check_op("linear", run, x, weight[:20])


@pytest.mark.parametrize("config", [config for *_, config in ONE_ROW + ROWS], ids=str)
def test_listed_configs_equal_the_reference(device, config):
    x, weight = Case(rows=13, outputs=3, inputs=1100).args(device)
    run = lambda x, w: launch_linear(x, w, torch.empty(len(x), len(w), dtype=x.dtype, device=device), config)  # noqa: E731
    check_op("linear", run, x, weight)


@pytest.mark.parametrize("inputs", (128, 768, 1536, 4224, 7168))
@pytest.mark.parametrize("outputs", (1, 140, 268, 896, 1024, 1025, 1536, 2048, 2049, 4096, 4097, 6284, 7168, 20480))
def test_loads_ahead_fit_shared_memory(outputs, inputs):
    for rows in (2, 16, 17, 100):
        config = pick_linear_config(rows, outputs, inputs)
        tile_bytes = (config.block_n + (16 if rows <= 16 else 32)) * config.block_c * 2
        assert (config.num_stages - 1) * tile_bytes <= 227 * 1024
        assert isinstance(pick_linear_config(1, outputs, inputs), OneRowConfig)


def test_no_rows_give_an_empty_result(device):
    """Fault I19."""
    x, weight = Case().args(device)
    y = linear(x[:0], weight)
    assert y.shape == (0, 20) and y.dtype == BF16


@pytest.mark.parametrize("dtype", (BF16, FP32))
def test_every_input_meets_its_weight(device, dtype):
    """One-hot rows copy single weights: the renaming of the inputs is the same on both sides."""
    weight = make(9, 300, dtype=dtype, device=device)
    x = torch.zeros(33, 300, dtype=dtype, device=device)
    hot = torch.arange(33, device=device) * 9 % 300
    x[torch.arange(33), hot] = 1
    assert_same_bits(linear(x, weight), weight[:, hot].T)


def test_integers_are_summed_exactly(device):
    """Sums below 2^24 of integers: any lost or doubled product is a whole number off."""
    x = torch.randint(-8, 9, (11, 520), generator=torch.Generator().manual_seed(0)).to(device)
    weight = torch.randint(-8, 9, (17, 520), generator=torch.Generator().manual_seed(1)).to(device)
    want = (x.double() @ weight.double().T).float()
    y = torch.empty(11, 17, dtype=FP32, device=device)
    assert_same_bits(launch_linear(x.to(BF16), weight.to(BF16), y, pick_linear_config(11, 17, 520)), want)


@pytest.mark.parametrize("rows", (2, 9, 33))
def test_rows_are_independent(device, rows):
    """Fault I20, with a NaN row among them."""
    x, weight = Case(rows=rows, inputs=300).args(device)
    y = linear(x, weight)
    x[1] = NAN
    other = linear(x, weight)
    keep = [r for r in range(rows) if r != 1]
    assert_same_bits(other[keep], y[keep])
    assert other[1].isnan().all()


def test_views_equal_copies(device):
    """Fault I11: x as a slice of a fused projection with an odd row stride, rows of an interleaved weight."""
    wide, weight = make(5, 268, device=device), make(40, 128, seed=1, device=device)
    x, w = wide[:, 3:131], weight.unflatten(0, (4, 10))[:, 2]
    assert_same_bits(linear(x, w), linear(x.contiguous(), w.contiguous()))


def test_results_are_fresh_tensors(device):
    """Fault S06."""
    x, weight = Case().args(device)
    first = linear(x, weight)
    kept = first.clone()
    linear(-x, weight)
    assert_same_bits(first, kept)


@pytest.mark.parametrize("rows", (1, 3))
def test_output_times_pitch_overflows_32_bits(device, rows):
    """As fault I02: the pitch of the weights fits 32 bits, output 2 times the pitch does not."""
    x, near = make(rows, 64, device=device), make(3, 64, seed=1, device=device)
    assert_same_bits(linear(x, far_pool(near)), linear(x, near))


K3_TP8 = (
    (6284, 7168),
    (3648, 7168),
    (7168, 1536),
    (1536, 128),
    (2304, 1536),
    (7168, 3584),
    (3584, 7168),
    (1536, 7168),
    (7168, 768),
    (20480, 7168),
    (268, 7168),
)
KIMI_LINEAR = ((12576, 2304), (4096, 128), (2304, 4096), (6720, 2304), (2048, 2304), (2304, 1024))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", (1, 8, 32, 70))
@pytest.mark.parametrize("outputs, inputs", K3_TP8 + KIMI_LINEAR)
def test_model_shapes(device, outputs, inputs, rows):
    check_op("linear", linear, *Case(rows, outputs, inputs).args(device))


@pytest.mark.gpu
@pytest.mark.parametrize("outputs, inputs", ((6284, 7168), (1536, 128), (268, 7168)))
def test_a_row_has_the_bits_it_has_in_any_larger_batch(device, outputs, inputs):
    """Fault I20, bit for bit: from two rows up the order of the sum depends on (N, C) and on 16 or 32 rows a tile
    only."""
    x, weight = Case(256, outputs, inputs).args(device)
    whole = linear(x, weight)
    for rows in (17, 31, 33, 63, 64, 65, 127, 128, 129, 255):
        assert_same_bits(linear(x[:rows], weight), whole[:rows], f"{rows} rows")
