"""Finds, opens and verifies the safetensors files of a checkpoint directory; reads no tensor data.

A directory holds config.json and either `model.safetensors` or `model.safetensors.index.json` with its shards. Every
missing, unknown, mis-shaped or mis-typed tensor is reported in one error.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from kimi_kernels.config import KimiConfig
from kimi_kernels.tensor_names import (
    VISION_PREFIXES,
    TensorSpec,
    accepted_dtypes,
    accepts_shape,
    checkpoint_specs,
    stored_name_aliases,
)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}
SHOWN_PER_KIND = 20


class CheckpointError(ValueError):
    """A checkpoint directory that cannot be loaded as the given config."""


class CheckpointFiles:
    """The open files that hold the tensors of `layers` (all by default), verified. Use as a context manager."""

    def __init__(self, directory: Path | str, config: KimiConfig, layers: Sequence[int] | None = None):
        self.directory, self.config = Path(directory), config
        known = checkpoint_specs(config)
        self.specs = known if layers is None else checkpoint_specs(config, layers)
        self._aliases = stored_name_aliases(config)
        self._handles: dict[str, safe_open] = {}
        self._where: dict[str, tuple[str, str]] = {}  # released name -> file, name as stored
        with ExitStack() as stack:
            names = self._open(stack)
            self._verify(names, known)
            self._stack = stack.pop_all()

    def __enter__(self) -> "CheckpointFiles":
        return self

    def __exit__(self, *exc) -> None:
        self._stack.close()

    def slice(self, name: str):
        """The safetensors slice object of a tensor: indexing it reads that part only."""
        file, stored = self._where[name]
        return self._handles[file].get_slice(stored)

    def _open(self, stack: ExitStack) -> set[tuple[str, str]]:
        """Opens every file with a wanted tensor. -> (file, stored name) of all names seen, by header or by index"""
        if not (self.directory / "config.json").is_file():
            raise CheckpointError(f"{self.directory / 'config.json'}: not found")
        listed = self._listed_files()
        needed = {file for name, file in listed.items() if self._aliases.get(name, name) in self.specs}
        absent = sorted(file for file in needed if not (self.directory / file).is_file())
        if absent:
            shown = _capped(absent, ", ")
            raise CheckpointError(f"{self.directory / INDEX_FILE}: {len(absent)} of its shards not found: {shown}")
        for file in sorted(needed):
            self._handles[file] = stack.enter_context(_open_file(self.directory / file))
        held = {(file, name) for file, handle in self._handles.items() for name in handle.keys()}
        return held | {(file, name) for name, file in listed.items() if file not in needed}

    def _verify(self, names: set[tuple[str, str]], known: Mapping[str, TensorSpec]) -> None:
        problems: dict[str, list[str]] = defaultdict(list)
        for file, stored in sorted(names):
            name = self._aliases.get(stored, stored)
            if name not in known:
                if self.config.family != "k3" or not name.startswith(VISION_PREFIXES):
                    problems["unknown"].append(stored)
            elif name in self._where:
                problems["duplicate"].append(f"{name}: in {self._where[name][0]} and in {file}")
            elif file in self._handles:
                self._where[name] = file, stored
        problems["missing"] = [name for name in self.specs if name not in self._where]
        for name, spec in self.specs.items():
            if name in self._where:
                self._compare(name, spec, problems)
        self._raise_on({kind: found for kind, found in problems.items() if found})

    def _listed_files(self) -> dict[str, str]:
        """Stored name -> file, from the index, or from the header of the single file."""
        single, index = self.directory / SINGLE_FILE, self.directory / INDEX_FILE
        if single.is_file():
            with _open_file(single) as handle:
                return dict.fromkeys(handle.keys(), SINGLE_FILE)
        if not index.is_file():
            raise CheckpointError(f"{self.directory}: neither {SINGLE_FILE} nor {INDEX_FILE} found")
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            if all(isinstance(file, str) for file in weight_map.values()):
                return weight_map
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        raise CheckpointError(f"{index}: expected JSON with a weight_map of tensor names to file names")

    def _compare(self, name: str, spec: TensorSpec, problems: dict[str, list[str]]) -> None:
        stored = self.slice(name)
        shape, code = tuple(stored.get_shape()), stored.get_dtype()
        if not accepts_shape(name, spec, self.config.kda_heads, shape):
            problems["mis-shaped"].append(f"{name}: expected {list(spec.shape)}, got {list(shape)}")
        accepted = accepted_dtypes(name, spec, self.config.family)
        if DTYPES.get(code) not in accepted:
            expected = " or ".join(dtype_name(dtype) for dtype in accepted)
            got = dtype_name(DTYPES[code]) if code in DTYPES else code
            problems["mis-typed"].append(f"{name}: expected {expected}, got {got}")

    def _raise_on(self, problems: dict[str, list[str]]) -> None:
        if not problems:
            return
        counts = ", ".join(f"{len(found)} {kind}" for kind, found in problems.items())
        lines = [f"{self.directory}: {counts} tensors"]
        for kind, found in problems.items():
            lines.append(f"  {kind}:\n    " + _capped(found, "\n    "))
        runtime_names = (".experts.gate_up_proj", ".forget_gate.")
        if any(mark in name for name in problems.get("unknown", ()) for mark in runtime_names):
            lines.append("  these are transformers' runtime names: save with save_original_format=True")
        raise CheckpointError("\n".join(lines))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _open_file(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def _capped(items: list[str], separator: str) -> str:
    rest = len(items) - SHOWN_PER_KIND
    return separator.join([*items[:SHOWN_PER_KIND], *([f"... and {rest} more"] if rest > 0 else [])])
