"""validate: one form of error for all ops, raised before anything runs."""

import pytest
import torch

from kimi_kernels.checks import validate

BF16 = torch.bfloat16


def rms(**change):
    args = {"x": torch.zeros(2, 8, dtype=BF16), "weight": torch.zeros(8, dtype=BF16), "eps": 1e-5}
    return validate("rms_norm", **{**args, **change})


def mxfp4(inputs: int = 64):
    return validate(
        "moe_gate_up_mxfp4",
        x=torch.zeros(2, inputs, dtype=BF16),
        topk_ids=torch.zeros(2, 3, dtype=torch.int32),
        w13_packed=torch.zeros(5, 6, 32, dtype=torch.uint8),
        w13_scale=torch.zeros(5, 6, 2, dtype=torch.uint8),
    )


def gates(rows: int, sequences: int):
    return validate(
        "causal_conv1d",
        x=torch.zeros(rows, 6, dtype=BF16),
        weight=torch.zeros(6, 4),
        conv_window=torch.zeros(3, 3, 6, dtype=BF16),
        slots=torch.zeros(sequences, dtype=torch.int32),
        is_new=torch.zeros(sequences, dtype=torch.bool),
        first_valid_slot=0,
    )


def test_dims_are_bound_by_name():
    assert rms() == {"R": 2, "D": 8}
    assert mxfp4()["I"] == 3 and mxfp4()["Z"] == 64
    assert gates(4, 2)["W"] == 4
    assert gates(0, 0)["R"] == 0


BAD = {
    r"rms_norm: weight must be \[D=8\], got \[7\]": lambda: rms(weight=torch.zeros(7, dtype=BF16)),
    r"rms_norm: x must be \[R, D\], got \[8\]": lambda: rms(x=torch.zeros(8, dtype=BF16)),
    "rms_norm: x must be contiguous in its last dim": lambda: rms(x=torch.zeros(8, 8, dtype=BF16).T),
    "rms_norm: x must be a tensor": lambda: rms(x=[1.0]),
    "rms_norm: eps must be float, got 'small'": lambda: rms(eps="small"),
    "rms_norm: eps must be float, got True": lambda: rms(eps=True),
    "rms_norm: weight must be on cpu": lambda: rms(weight=torch.zeros(8, dtype=BF16, device="meta")),
    "rms_norm: only rows may be empty, got D=0": lambda: rms(
        x=torch.zeros(2, 0, dtype=BF16), weight=torch.zeros(0, dtype=BF16)
    ),
    r"w13_packed must be \[E=5, 2\*I=6, Z/2=32\], got": lambda: mxfp4(65),
    "rows R=5 must be a positive multiple of sequences B=2": lambda: gates(5, 2),
    "rows R=0 must be a positive multiple of sequences B=2": lambda: gates(0, 2),
    "rows R=2 must be a positive multiple of sequences B=0": lambda: gates(2, 0),
}


@pytest.mark.parametrize("message", BAD)
def test_errors_name_op_argument_expected_and_got(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()


@pytest.mark.parametrize("dtype", (torch.float16, torch.float64, torch.int32))
def test_a_wrong_dtype_is_a_type_error(dtype):
    """S13: float16 is refused, not read as bfloat16."""
    with pytest.raises(TypeError, match="rms_norm: x must be bfloat16 or float32"):
        rms(x=torch.zeros(2, 8, dtype=dtype))
    with pytest.raises(TypeError, match="rms_norm: weight must be bfloat16, got float32"):
        rms(weight=torch.zeros(8))
