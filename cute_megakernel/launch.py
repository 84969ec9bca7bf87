"""The kernel on a device, launched through the driver: the same way whether it was compiled now or long ago.

kernel = DeviceKernel(code, shape)
kernel(addresses, numbers, limit_ns, stream)       one cooperative launch; waits for nothing, may be captured
"""

import ctypes
import importlib
import re

from cute_megakernel.shape import THREADS, KernelShape, SharedLayout
from kimi_kernels.backends import BackendError

# arguments of the kernel, in this order: addresses in 64 bits, numbers in 32, then `limit_ns` in 64
ADDRESSES = (
    "fields", "work", "words", "control", "tokens", "slots", "is_new", "seq_lens", "page_table", "next_tokens",
    "next_values", "trace",
)  # fmt: skip
NUMBERS = (
    "rows", "first_row", "end_row", "first_moe", "max_pages", "first_valid_slot", "poll_ns", "delay_seed",
)  # fmt: skip
TYPES = (ctypes.c_int64,) * len(ADDRESSES) + (ctypes.c_int32,) * len(NUMBERS) + (ctypes.c_int64,)
TAGS_A_LAUNCH = 32  # a launch may tag words with its number times this, plus a small `sub`
OVERLAP = 1 << 30  # error: a launch met another one on the same instance


class DeviceKernel:
    """Machine code on the current device. Raises BackendError for what the driver refuses."""

    def __init__(self, code: bytes, shape: KernelShape):
        self._driver = importlib.import_module("cuda.bindings.driver")
        self._sms, self._shared = shape.sms, SharedLayout.of(shape).end
        self._module = self._ask("cuModuleLoadData", code)
        self._kernel = self._ask("cuModuleGetFunction", self._module, kernel_name(code).encode())
        limit = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._ask("cuFuncSetAttribute", self._kernel, limit, self._shared)

    def __call__(self, addresses: tuple[int, ...], numbers: tuple[int, ...], limit_ns: int, stream: int) -> None:
        """A grid that cannot be resident at once is refused here."""
        grid, block = (self._sms, 1, 1), (THREADS, 1, 1)
        arguments = (*addresses, *numbers, limit_ns), TYPES
        self._ask("cuLaunchCooperativeKernel", self._kernel, *grid, *block, self._shared, stream, arguments)

    def _ask(self, function: str, *args):
        error, *results = getattr(self._driver, function)(*args)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise BackendError(f"the megakernel cannot be launched: {function} says {error.name}")
        return results[0] if results else None


def kernel_name(code: bytes) -> str:
    """Of the one kernel in a cubin: its section."""
    (name,) = set(re.findall(rb"\.text\.(\w+)", code))
    return name.decode()
