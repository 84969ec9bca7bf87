"""The megakernel behind the runner's interface: an instance for each number of rows, all over one set of weight images.

An instance holds addresses of the pools and is compiled, so it is made at the first step of its rows. Engines run each
batch size once before they capture its graph, and that is when; a capture that meets a new row count raises.

A launch that gives up leaves its reason in a word on the device. Behind each launch that word is copied to the host, in
the graph too, and `check` reads the copy: nothing waits, and whoever waits for the results of a step has it as well.
"""

import importlib
import importlib.util
from typing import Any

import torch

from cute_megakernel.recording import weight_paths
from cute_megakernel.schedule_error import ScheduleError
from kimi_kernels.config import KimiConfig
from kimi_kernels.state import Batch, State
from kimi_kernels.weights import ModelWeights

MODULE = "cute_megakernel.megakernel"
PACKAGES = ("cutlass", "cuda.bindings")
CAPABILITY = (9, 0)
# of the device's memory, for caches, activations and graphs beside weights and copies of them
RESERVE = 0.08
PAGE_SIZE = 64
ERROR = slice(2, 3)  # of `Megakernel.control`


def unsupported(config: KimiConfig, weights: ModelWeights, device: torch.device) -> str | None:
    """Why the megakernel cannot run this model here, in words; None where it can."""
    if device.type != "cuda":
        return f"device {device.type}"
    if missing := [name for name in PACKAGES if not _installed(name)]:
        return f"the package {missing[0]} is not installed (nvidia-cutlass-dsl)"
    if torch.cuda.get_device_capability(device) != CAPABILITY:
        return f"compute capability {torch.cuda.get_device_capability(device)}, not {CAPABILITY}"
    if config.dtype != torch.bfloat16:
        return f"activations are {config.dtype}, not torch.bfloat16"
    free, total = torch.cuda.mem_get_info(device)
    needed = copied_bytes(weights)
    if needed + RESERVE * total > free:
        return f"its copies of weights need {needed / 2**30:.1f} GiB beside SGLang's own, {free / 2**30:.1f} are free"
    return None


def copied_bytes(weights: ModelWeights) -> int:
    """What the megakernel reads in another layout than SGLang: MXFP4 experts, and both halves of kv_b."""
    paths = weight_paths(weights)
    return sum(tensor.nbytes for path, tensor in paths if tensor.dtype == torch.uint8 or path.endswith("kv_b"))


class MegakernelRunner:
    """Takes up to `max_rows` rows, or as many as have a schedule; `limit` says why not more. Raises ScheduleError where
    none has, and what else the megakernel raises for a config or weights that it cannot hold."""

    name = "megakernel"

    def __init__(self, config: KimiConfig, weights: ModelWeights, max_rows: int):
        self.config, self.limit = config, ""
        self._module = importlib.import_module(MODULE)
        self._images = self._module.Images(weights)
        self._made: dict[int, Any] = {}
        self._errors: dict[int, torch.Tensor] = {}  # host copies of the word, by rows
        # makes the images now: SGLang sizes its caches from the memory that is left after this
        layers = [layer.index for layer in weights.layers]
        pools = State.zeros(config, 2, 2, PAGE_SIZE, weights.embed.device, layers)
        for rows in range(max_rows, 0, -1):
            try:
                self._module.Megakernel(config, self._images, pools, rows)
            except ScheduleError as error:
                self.limit = str(error)
                continue
            self.max_rows = rows
            return
        raise ScheduleError(self.limit)

    def step(self, state: State, batch: Batch, tokens: torch.Tensor) -> torch.Tensor:
        """Runs rows of `tokens` [R] in one launch; the logits [R, VOCAB] are valid until the next step of R rows."""
        rows = len(tokens)
        if rows not in self._made:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"kimi-kernels: a graph of {rows} rows is captured before a step of {rows} rows ran")
            self._made[rows] = self._module.Megakernel(self.config, self._images, state, rows)
            self._errors[rows] = torch.zeros(1, dtype=torch.int32, pin_memory=torch.cuda.is_available())
        kernel = self._made[rows]
        logits = kernel.step(tokens.to(torch.int64), batch).logits
        self._errors[rows].copy_(kernel.control[ERROR], non_blocking=True)
        return logits

    def check(self) -> None:
        """Raises MegakernelError, with row and SM, where a launch gave up."""
        for rows, error in self._errors.items():
            if int(error):
                self._made[rows].check()


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # the parent package is missing
        return False
