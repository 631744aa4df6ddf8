"""Stand-ins for Python's `len`, `float`, `int`, `math.sqrt` while a model is traced, and how they are put in place."""

from __future__ import annotations

import builtins
import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._meta_registrations
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxspeed.graph.symbols import SYMS


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if before is missing else setattr(owner, name, before)


@contextlib.contextmanager
def named(space: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    if name in space:
        yield
        return
    space[name] = value
    try:
        yield
    finally:
        del space[name]


def traced_len(value: Any) -> Any:
    """`len` that keeps the size of a tensor symbolic."""
    return value.shape[0] if isinstance(value, FakeTensor) and value.dim() else builtins.len(value)


def _of_sizes(function: Callable, symbolic: Callable) -> Callable:
    """A function of `math` that keeps symbolic numbers symbolic."""
    return lambda x: symbolic(x) if isinstance(x, (torch.SymInt, torch.SymFloat)) else function(x)


#: Functions of `math` that models apply to sizes, by name: what to call in their place while a model is traced.
MATH = {"sqrt": _of_sizes(math.sqrt, torch.sym_sqrt), "log2": _of_sizes(math.log2, torch._sym_log2)}


@contextlib.contextmanager
def grouped_mm_of_any_dtype() -> Iterator[None]:
    """Let `grouped_mm` run on fake tensors of any floating type, as its kernels do; its meta kernel takes bfloat16."""
    name = "_meta_grouped_mm_common"
    original = getattr(torch._meta_registrations, name, None)
    if original is None:
        yield
        return

    def meta(a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not {a.dtype, b.dtype} <= {torch.float32, torch.float16}:
            return original(a, b, *args, **kwargs)
        return original(a.to(torch.bfloat16), b.to(torch.bfloat16), *args, **kwargs).to(a.dtype)

    with replaced(torch._meta_registrations, name, meta):
        yield


@contextlib.contextmanager
def convolutions_of_any_batch(shape_env: ShapeEnv) -> Iterator[None]:
    """Keep the choice of a convolution's kernel, which looks at the batch size, from becoming a guard."""
    original = torch._C._select_conv_backend

    def select(*args: Any, **kwargs: Any) -> Any:
        with shape_env.suppress_guards():
            return original(*args, **kwargs)

    with replaced(torch._C, "_select_conv_backend", select):
        yield


class _NumberMeta(type):
    base: type

    def __call__(cls, *args):
        value = args[0] if args else 0
        if isinstance(value, FakeTensor):
            if cls.base is int and value.is_floating_point():
                value = value.to(torch.int64)  # cuts off towards zero, as int() does
            value = value.item()
            args = (value,)
        if isinstance(value, SYMS):
            if cls.base is float:
                return value if isinstance(value, torch.SymFloat) else torch.sym_float(value)
            return torch.sym_int(value) if isinstance(value, torch.SymFloat) else value
        return cls.base(*args)

    def __instancecheck__(cls, value):
        return isinstance(value, cls.base)


class _Float(metaclass=_NumberMeta):
    base = float


class _Int(metaclass=_NumberMeta):
    base = int


NUMBERS = {"float": _Float, "int": _Int}
#: Types as arguments of torch's functions mean dtypes.
NUMBER_TYPES: dict[Any, torch.dtype] = {
    _Float: torch.float64, float: torch.float64, _Int: torch.int64, int: torch.int64, bool: torch.bool,
}  # fmt: skip
