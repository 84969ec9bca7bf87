"""A number type that carries its own float32 rounding-error bound: running error analysis of the reference formulas.

`Bounded(value, err)` is a float64 tensor with, per element, a bound on how far a float32 evaluation of the same
formula may
lie from it. The ops of `reference.py` run on it unchanged, so every op's error bound is computed from the inputs at
hand:

    a + b      err_a + err_b + u |a + b|                              u = 2^-24, half a float32 ulp
    a * b      |a| err_b + |b| err_a + err_a err_b + u |a b|
    sum of n   sum err + depth(n) u sum |terms|                       depth(n) = 8 + sqrt(n), any blocked order
    f(x)       first-order propagation of err + a declared constant per function (`APPROX`)

`depth` is below the worst case n - 1 on purpose: kernels add in blocks and trees, and the errors of a long sum grow
like
sqrt(n); for n = 128 it is 19. Products of bfloat16 values are exact in float32. What a kernel rounds on output (half
an ulp of
the output dtype) is added by `compare.py`.

Source   running error analysis: N. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.3.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
U = 2.0**-24
TINY = 2.0**-126  # results below this may be subnormal: absolute error of one smallest subnormal

# declared error of one evaluation in units of u, relative to the result: exp2.approx after a product with log2(e),
# rsqrt.approx, tanh and softplus through exp, division through reciprocal
APPROX = {"exp": 8, "rsqrt": 4, "div": 3, "tanh": 4, "softplus": 8}


def depth(n: int) -> float:
    """Rounding errors, in units of u of the sum of absolute terms, that adding n terms may make."""
    return 8 + math.sqrt(n)


class Bounded:
    """A float64 tensor and a bound on the error of its float32 evaluation, both of one shape."""

    __array_priority__ = 1000
    dtype = torch.float64

    def __init__(self, value: Tensor, err: Tensor | None = None):
        self.value = value
        self.err = torch.zeros((), dtype=value.dtype, device=value.device).expand(value.shape) if err is None else err

    @property
    def exact(self) -> bool:
        """True where no element has an error; cheap for tensors that came in as exact inputs."""
        return not any(self.err.stride()) or not bool(self.err.any())

    # shape and data movement

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    @property
    def ndim(self) -> int:
        return self.value.ndim

    @property
    def device(self) -> torch.device:
        return self.value.device

    @property
    def T(self) -> "Bounded":
        return self._move(lambda t: t.T)

    def _move(self, f: Callable[[Tensor], Tensor]) -> "Bounded":
        return Bounded(f(self.value), f(self.err))

    def __getitem__(self, index) -> "Bounded":
        return self._move(lambda t: t[index])

    def __getattr__(self, name: str):
        if name not in _MOVES:
            raise AttributeError(f"Bounded has no {name}: add its error rule to error_bound.py")
        return lambda *args, **kwargs: self._move(lambda t: getattr(t, name)(*args, **kwargs))

    def to(self, *_args) -> "Bounded":
        return self

    def chunk(self, n: int, dim: int = 0) -> list["Bounded"]:
        return [Bounded(v, e) for v, e in zip(self.value.chunk(n, dim), self.err.chunk(n, dim), strict=True)]

    # arithmetic

    def __add__(self, other) -> "Bounded":
        other = bounded(other)
        value = self.value + other.value
        return Bounded(value, self.err + other.err + U * value.abs())

    def __neg__(self) -> "Bounded":
        return Bounded(-self.value, self.err)

    def __sub__(self, other) -> "Bounded":
        return self + -bounded(other)

    def __rsub__(self, other) -> "Bounded":
        return -self + other

    def __mul__(self, other) -> "Bounded":
        other = bounded(other)
        a, b = self.value.abs(), other.value.abs()
        value = self.value * other.value
        return Bounded(value, _zero_safe(a, other.err) + _zero_safe(self.err, b + other.err) + U * value.abs())

    def __truediv__(self, other) -> "Bounded":
        other = bounded(other)
        value = self.value / other.value
        floor = (other.value.abs() - other.err).clamp(min=torch.finfo(torch.float64).tiny)
        return Bounded(value, (self.err + value.abs() * other.err) / floor + APPROX["div"] * U * value.abs())

    __radd__ = __add__
    __rmul__ = __mul__

    def square(self) -> "Bounded":
        return self * self

    def sum(self, dim: int, keepdim: bool = False) -> "Bounded":
        terms = self.value.abs().sum(dim, keepdim=keepdim)
        err = self.err.sum(dim, keepdim=keepdim) + depth(self.shape[dim]) * U * terms
        return Bounded(self.value.sum(dim, keepdim=keepdim), err)

    def mean(self, dim: int, keepdim: bool = False) -> "Bounded":
        return self.sum(dim, keepdim) * (1.0 / self.shape[dim])

    def clamp(self, max: float) -> "Bounded":
        return Bounded(self.value.clamp(max=max), torch.where(self.value > max, 0.0, self.err))

    def amax(self, dim: int, keepdim: bool = False) -> Tensor:
        """Exact: used as a shift only (softmax), or on exact values (argmax)."""
        return self.value.amax(dim, keepdim=keepdim)

    def __eq__(self, other) -> Tensor:  # type: ignore[override]
        return self.value == bounded(other).value

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func, _types, args=(), kwargs=None):
        name = func.__name__.strip("_")
        if name not in _FUNCTIONS:
            raise NotImplementedError(f"Bounded does not know torch.{name}: add its error rule to error_bound.py")
        return _FUNCTIONS[name](*args, **(kwargs or {}))


# what only moves data applies to value and err alike
_MOVES = ("unsqueeze", "reshape", "flatten", "unflatten", "gather", "expand")


def bounded(x) -> Bounded:
    """x as an exact Bounded; a Python float is a float32 constant, so it carries its own rounding."""
    if isinstance(x, Bounded):
        return x
    if isinstance(x, Tensor):
        return Bounded(x.double())
    value = torch.tensor(float(x), dtype=torch.float64)
    return Bounded(value, (value - value.float().double()).abs())


def _zero_safe(a: Tensor, b: Tensor) -> Tensor:
    """a * b with 0 * inf = 0: an exact zero has no error to amplify."""
    return torch.where((a == 0) | (b == 0), 0.0, a * b)


def _exp(x: Bounded) -> Bounded:
    value = torch.exp(x.value)
    relative = torch.expm1(x.err.clamp(max=700.0)) + (APPROX["exp"] + x.value.abs().clamp(max=104.0)) * U
    return Bounded(value, _zero_safe(value, relative) + TINY)


def _sigmoid(x: Bounded) -> Bounded:
    value = torch.sigmoid(x.value)
    slope = torch.minimum(
        torch.full_like(value, 0.25), _zero_safe(value * (1 - value), torch.exp(x.err.clamp(max=700.0)))
    )
    own = value * (4 + (APPROX["exp"] + x.value.abs().clamp(max=104.0)) * (1 - value)) * U
    return Bounded(value, torch.clamp(_zero_safe(slope, x.err), max=1.0) + own + TINY)


def _tanh(x: Bounded) -> Bounded:
    value = torch.tanh(x.value)
    slope = torch.clamp((1 - value.square()) * torch.exp(2 * x.err.clamp(max=300.0)), max=1.0)
    return Bounded(value, torch.clamp(_zero_safe(slope, x.err), max=2.0) + APPROX["tanh"] * U)


def _rsqrt(x: Bounded) -> Bounded:
    value = torch.rsqrt(x.value)
    floor = (x.value - x.err).clamp(min=torch.finfo(torch.float64).tiny)
    return Bounded(value, 0.5 * value * x.err / floor + APPROX["rsqrt"] * U * value)


def _softplus(x: Bounded) -> Bounded:
    value = F.softplus(x.value, threshold=50)
    return Bounded(value, x.err + APPROX["softplus"] * U * (1 + value) + torch.exp(-x.value.abs()) * (x.value > 16))


def _einsum(equation: str, a, b) -> Bounded:
    a, b = bounded(a), bounded(b)
    inputs, output = equation.split("->")
    left, right = inputs.split(",")
    contracted = math.prod(a.shape[left.index(i)] for i in left if i in right and i not in output)
    magnitude = torch.einsum(equation, a.value.abs(), b.value.abs())
    err = depth(contracted) * U * magnitude
    if not a.exact:
        err = err + torch.einsum(equation, a.err, b.value.abs() + b.err)
    if not b.exact:
        err = err + torch.einsum(equation, a.value.abs(), b.err)
    return Bounded(torch.einsum(equation, a.value, b.value), err)


def _join(func: Callable) -> Callable:
    def join(tensors, dim: int = 0) -> Bounded:
        parts = [bounded(t) for t in tensors]
        return Bounded(func([p.value for p in parts], dim), func([p.err for p in parts], dim))

    return join


def _where(condition: Tensor, a, b) -> Bounded:
    a, b = bounded(a), bounded(b)
    return Bounded(torch.where(condition, a.value, b.value), torch.where(condition, a.err, b.err))


def _nan_to_num(x: Bounded, nan: float) -> Bounded:
    return Bounded(torch.nan_to_num(x.value, nan=nan), torch.nan_to_num(x.err, nan=0.0))


_FUNCTIONS: dict[str, Callable] = {
    "add": lambda a, b: bounded(a) + b,
    "radd": lambda a, b: bounded(b) + a,
    "sub": lambda a, b: bounded(a) - b,
    "rsub": lambda a, b: bounded(b) - a,
    "mul": lambda a, b: bounded(a) * b,
    "rmul": lambda a, b: bounded(b) * a,
    "truediv": lambda a, b: bounded(a) / b,
    "div": lambda a, b: bounded(a) / b,
    "eq": lambda a, b: bounded(a).value == bounded(b).value,
    "exp": _exp,
    "sigmoid": _sigmoid,
    "tanh": _tanh,
    "rsqrt": _rsqrt,
    "softplus": _softplus,
    "einsum": _einsum,
    "stack": _join(torch.stack),
    "cat": _join(torch.cat),
    "where": _where,
    "nan_to_num": _nan_to_num,
    "isnan": lambda x: torch.isnan(x.value),
    "zeros_like": lambda x: torch.zeros_like(x.value),
    "full_like": lambda x, fill: torch.full_like(x.value, fill),
    "argsort": lambda x, **kwargs: torch.argsort(x.value, **kwargs),
}
