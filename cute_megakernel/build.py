"""What an instance needs before its first launch: the kernel of its shape, and the proof of its schedule. Both come
from the cache where they were made before.

    kernel = on_device(shape, torch.device("cuda", 0))
    prove(schedule)                                         ScheduleError, or nothing
"""

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import os
import pickle
import tempfile
from dataclasses import asdict

import torch

from cute_megakernel import cache
from cute_megakernel.launch import ADDRESSES, NUMBERS, DeviceKernel
from cute_megakernel.schedule import Schedule
from cute_megakernel.shape import KernelShape
from cute_megakernel.validate import validate

PACKAGE = "nvidia-cutlass-dsl"


@functools.cache
def on_device(shape: KernelShape, device: torch.device) -> DeviceKernel:
    """The kernel of `shape`; loaded once a process and device."""
    with torch.cuda.device(device):
        return DeviceKernel(machine_code(shape, architecture(device)), shape)


def architecture(device: torch.device | int = 0) -> str:
    """As compilers call it, features of exactly this architecture included: sm_90a."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}a"


@functools.cache
def machine_code(shape: KernelShape, arch: str) -> bytes:
    """The kernel of `shape` as a cubin. Raises ImportError naming the package that is missing."""
    key = kernel_key(shape, arch)
    code = cache.load(key)
    if code is None:
        code = compile_kernel(shape, arch).__cubin__
        cache.store(key, code)
    return code


def kernel_key(shape: KernelShape, arch: str) -> str:
    """All that the machine code depends on; the DSL has settings of its own in the environment."""
    settings = {name: value for name, value in os.environ.items() if name.startswith("CUTE_DSL_")}
    return cache.key_of("kernel", shape=asdict(shape), arch=arch, dsl=_version(), settings=settings)


def _version() -> str:
    for name in (PACKAGE, f"{PACKAGE}-libs-base"):  # the second holds the compiler
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    raise ImportError(f"the megakernel needs the package {PACKAGE}")


def compile_kernel(shape: KernelShape, arch: str):
    """What the DSL makes of `kernel.py` for a shape, with its machine code in `__cubin__`; needs no GPU."""
    try:
        cute = importlib.import_module("cutlass.cute")
    except ImportError as error:
        raise ImportError(f"the megakernel needs the package {PACKAGE}: {error}") from error
    cutlass = importlib.import_module("cutlass")
    stream = importlib.import_module("cuda.bindings.driver").CUstream(0)
    kernel = importlib.import_module("cute_megakernel.kernel")
    addresses, numbers = [cutlass.Int64(0)] * len(ADDRESSES), [cutlass.Int32(0)] * len(NUMBERS)
    with tempfile.TemporaryDirectory() as folder:  # the DSL gives machine code away only where it writes a file too
        options = f"--gpu-arch {arch} --keep-cubin --dump-dir {folder}"
        return cute.compile(kernel.launcher(shape), *addresses, *numbers, cutlass.Int64(0), stream, options=options)


def prove(schedule: Schedule) -> None:
    """`validate`, unless a schedule of the same bytes was proved before."""
    key = cache.key_of("proof", schedule=hashlib.sha256(pickle.dumps(schedule)).hexdigest())
    if cache.load(key) is None:
        validate(schedule)
        cache.store(key, b"")
