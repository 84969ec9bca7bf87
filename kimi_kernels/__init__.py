"""What the model is: config, the op table, the reference, the decode step, state, weights. Runs on a CPU, needs torch
only."""

from kimi_kernels.config import CONFIGS, K3, K3_MINI, KIMI_LINEAR_48B, KIMI_LINEAR_MINI, KimiConfig
from kimi_kernels.decode_step import StepOutput, decode_step
from kimi_kernels.decoder import Decoder
from kimi_kernels.op_specs import OPS
from kimi_kernels.state import Batch, State

__all__ = [
    "CONFIGS",
    "K3",
    "K3_MINI",
    "KIMI_LINEAR_48B",
    "KIMI_LINEAR_MINI",
    "OPS",
    "Batch",
    "Decoder",
    "KimiConfig",
    "State",
    "StepOutput",
    "decode_step",
]
