"""Validates the arguments of an op against `op_specs.OPS`: one form of error for all ops, raised before anything
runs."""

import re

import torch

from kimi_kernels.op_specs import DTYPE_CLASSES, OPS


def validate(op: str, **args) -> dict[str, int]:
    """Checks types, ranks, dims, dtypes, devices and strides of `args`; returns the dims by name.

    Raises ValueError (TypeError for a dtype) that names op and argument, what was expected and what came. Reads no
    tensor
    values, so it never synchronises.
    """
    spec = OPS[op]
    dims: dict[str, int] = {name: value for name, value in args.items() if isinstance(value, int)}
    act: dict[str, torch.dtype] = {}
    device: torch.device | None = None
    for name, want in spec.args.items():
        value = args[name]
        if not isinstance(want, str):
            _check_scalar(op, name, want, value)
            continue
        tensors = value if want.startswith("*") else [value]
        if want.startswith("*") and not isinstance(value, list | tuple):
            raise ValueError(f"{op}: {name} must be a list of tensors, got {type(value).__name__}")
        for tensor in tensors:
            _check_tensor(op, name, want.lstrip("*"), tensor, dims, act)
            device = device or tensor.device
            if tensor.device != device:
                raise ValueError(f"{op}: {name} must be on {device} like the other arguments, got {tensor.device}")
    if empty := [name for name, size in dims.items() if size == 0 and name not in ("R", "B") and name not in args]:
        raise ValueError(f"{op}: only rows may be empty, got {', '.join(f'{name}=0' for name in empty)}")
    for relation in spec.relations:
        if not eval(relation, {"__builtins__": {}}, dims):
            sizes = ", ".join(f"{name}={dims[name]}" for name in re.findall(r"[A-Za-z]\w*", relation))
            raise ValueError(f"{op}: {relation} must hold, got {sizes}")
    for name in spec.inplace:
        pool = args[name]
        if any(size > 1 and stride == 0 for size, stride in zip(pool.shape, pool.stride(), strict=True)):
            raise ValueError(
                f"{op}: {name} is changed in place and must not repeat memory, got strides {pool.stride()}"
            )
    rows, sequences = dims.get("R"), dims.get("B")
    if rows and sequences is not None and (sequences == 0 or rows % sequences) or (rows == 0 and sequences):
        raise ValueError(f"{op}: rows R={rows} must be a positive multiple of sequences B={sequences}")
    return dims


def resolve(expression: str, dims: dict[str, int]) -> int:
    """Value of a dim expression such as `2*I` or `L+QD-NOPE` with the bound dims."""
    return int(eval(expression.replace("/", "//"), {"__builtins__": {}}, dims))  # expressions of op_specs only


def _check_scalar(op: str, name: str, want: type, value) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float) if want is float else want):
        raise ValueError(f"{op}: {name} must be {want.__name__}, got {value!r}")


def _check_tensor(op: str, name: str, want: str, value, dims: dict[str, int], act: dict[str, torch.dtype]) -> None:
    *shape, dtype_class = want.split()
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{op}: {name} must be a tensor [{', '.join(shape)}], got {type(value).__name__}")
    allowed = DTYPE_CLASSES[dtype_class]
    if dtype_class == "act":
        allowed = (act.setdefault("act", value.dtype),) if value.dtype in allowed or act else allowed
    if value.dtype not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        got = str(value.dtype).removeprefix("torch.")
        raise TypeError(f"{op}: {name} must be {names}, got {got}")
    if value.dim() != len(shape) or not all(
        _bind(dim, size, dims) for dim, size in zip(shape, value.shape, strict=True)
    ):
        raise ValueError(
            f"{op}: {name} must be [{', '.join(_show(dim, dims) for dim in shape)}], got {list(value.shape)}"
        )
    if len(shape) > 1 and value.numel() and value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ValueError(f"{op}: {name} must be contiguous in its last dim, got strides {value.stride()}")


def _bind(dim: str, size: int, dims: dict[str, int]) -> bool:
    """Binds an unbound dim to `size`, or compares a bound one."""
    whole, _, parts = dim.partition("/")
    if parts:
        return dims[whole] == size * int(parts)
    factor, _, symbol = dim.rpartition("*")
    if symbol.isidentifier() and symbol not in dims:
        dims[symbol], rest = divmod(size, int(factor or 1))
        return rest == 0
    return resolve(dim, dims) == size


def _show(dim: str, dims: dict[str, int]) -> str:
    try:
        return f"{dim}={resolve(dim, dims)}"
    except NameError:
        return dim
