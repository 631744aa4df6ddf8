"""The inputs of one call: their structure, the tensors in them, and the guard that recognizes calls of the same kind.

A captured graph is right only for calls that look like the one it was captured from. `describe` writes down what
was assumed (containers, Python values, dtypes, devices, sizes that are not dynamic); `InputSpec.guard` turns that
into one Python function that answers a call with its tensors, or with None when an assumption does not hold.
"""

from __future__ import annotations

import collections
import enum
import inspect
import keyword
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import sympy
import torch
from torch.utils._sympy.printers import PythonPrinter

from fxspeed.errors import Untraceable

#: Values that are part of what a graph was captured for: another value is another capture.
CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, enum.Enum)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
#: The file name of the code of guards.
GUARD = "<fxspeed guard>"
#: A dimension that may change: by name, by index, or of one tensor by the tensor's number and an index.
Dim = str | int | tuple[int, int]


class TensorInput:
    """One tensor of a call: its name in the graph and the Python expression that reaches it."""

    def __init__(self, index: int, name: str, access: str, value: torch.Tensor):
        self.index, self.name, self.access, self.value = index, name, access, value

    def dynamic_dims(self, dynamic: Iterable[Dim]) -> set[int]:
        """The dimensions that `dynamic` lets change, as indices.

        "batch" is dimension 0; "sequence" (or "length") dimension 1 of integer matrices and of 3-d tensors;
        "height" and "width" the last two of tensors with four or more dimensions. An int names a dimension itself, a
        pair of ints that dimension of one tensor, counted from 0.
        """
        rank = self.value.dim()
        known: dict[str | int, int | None] = {
            "batch": 0 if rank else None,
            "sequence": 1 if rank in (2, 3) and (rank == 3 or not self.value.is_floating_point()) else None,
            "height": rank - 2 if rank >= 4 else None,
            "width": rank - 1 if rank >= 4 else None,
        }
        known["length"] = known["sequence"]
        own = (d[1] if isinstance(d, tuple) else d for d in dynamic if not isinstance(d, tuple) or d[0] == self.index)
        dims = (d if isinstance(d, int) else known[d] for d in own)
        return {d % rank for d in dims if d is not None and -rank <= d < rank}


class InputSpec:
    """What the inputs of one call look like. Built by `describe`.

    Attributes: `tensors`, the tensor leaves in order; `checks`, Python expressions over `args` and `kwargs` that hold
    for every call of this kind; `constants`, the values those expressions name as `c[i]`.
    """

    def __init__(self) -> None:
        self.tensors: list[TensorInput] = []
        self.checks: list[str] = []
        self.constants: list[Any] = []

    def const(self, value: Any) -> str:
        self.constants.append(value)
        return f"c[{len(self.constants) - 1}]"

    def guard(
        self,
        shapes: list[tuple[int | sympy.Expr, ...]],
        relations: Iterable[sympy.Basic],
        reads_requires_grad: bool,
    ) -> tuple[Callable[[tuple, dict], tuple | None], str]:
        """The function `(args, kwargs) -> tensors or None`, and its source.

        Args:
            shapes: for each tensor its sizes, an int where it must match, a sympy symbol where it may change.
            relations: sympy conditions over those symbols.
            reads_requires_grad: whether the graph depends on which inputs require gradients.
        """
        lines = [f"if not ({check}): return None" for check in self.checks]
        bound: set[str] = set()
        for i, (tensor, shape) in enumerate(zip(self.tensors, shapes, strict=True)):
            t, value = f"t{i}", tensor.value
            lines.append(f"{t} = {tensor.access}")
            tests = [
                f"type({t}) in plain",
                f"{t}.dtype is {self.const(value.dtype)}",
                f"{t}.device == {self.const(value.device)}",
                f"{t}.layout is {self.const(value.layout)}",
            ]
            if reads_requires_grad:
                tests.append(f"{t}.requires_grad is {value.requires_grad}")
            lines.append(f"if not ({' and '.join(tests)}): return None")
            lines.append(f"n = {t}.shape")
            sizes = [f"len(n) == {len(shape)}"]
            for d, size in enumerate(shape):
                if isinstance(size, int):
                    sizes.append(f"n[{d}] == {size}")
                elif isinstance(size, sympy.Symbol) and str(size) not in bound:
                    bound.add(str(size))
                    sizes.append(f"((({size} := n[{d}]) or 1))")
                else:
                    sizes.append(f"n[{d}] == {_python(size)}")
            lines.append(f"if not ({' and '.join(sizes)}): return None")
        lines += [f"if not ({_python(r)}): return None" for r in relations]
        lines.append(f"return ({''.join(f't{i}, ' for i in range(len(self.tensors)))})")
        source = "def guard(args, kwargs):\n    " + "\n    ".join(lines) + "\n"
        return compile_guard(source, self.constants), source

    def __getstate__(self) -> dict[str, Any]:
        return {"tensors": [], "checks": self.checks, "constants": self.constants}


def compile_guard(source: str, constants: list[Any]) -> Callable[[tuple, dict], tuple | None]:
    """The guard function of a source that `InputSpec.guard` wrote."""
    namespace: dict[str, Any] = {"c": constants, "plain": _PLAIN, "torch": torch, "math": math}
    exec(compile(source, GUARD, "exec"), namespace)
    return namespace["guard"]


def describe(forward: Callable, args: tuple, kwargs: Mapping[str, Any]) -> InputSpec:
    """Write down the structure of one call of `forward`.

    Raises:
        Untraceable: an input that is neither a plain tensor, a Python value nor a plain container of these.
    """
    spec = InputSpec()
    named = f"kwargs.keys() == {spec.const(frozenset(kwargs))}" if kwargs else "not kwargs"
    spec.checks.append(f"len(args) == {len(args)} and {named}")
    try:
        names = list(inspect.signature(forward).bind_partial(*args).arguments)
    except (TypeError, ValueError):
        names = []
    names += [f"arg{i}" for i in range(len(names), len(args))]
    for i, value in enumerate(args):
        _describe(spec, value, names[i], f"args[{i}]")
    for key, value in kwargs.items():
        _describe(spec, value, key, f"kwargs[{key!r}]")
    return spec


def _describe(spec: InputSpec, value: Any, name: str, access: str) -> None:
    if isinstance(value, torch.Tensor):
        if type(value) not in _PLAIN and not hasattr(value, "fake_mode"):
            raise Untraceable(f"input {name} is a {type(value).__name__}, not a plain tensor")
        if value.layout is not torch.strided:
            raise Untraceable(f"input {name} has layout {value.layout}")
        spec.tensors.append(TensorInput(len(spec.tensors), identifier(name), access, value))
    elif isinstance(value, CONSTANTS):
        kind, same = spec.const(type(value)), spec.const(value)
        nan = isinstance(value, float) and value != value
        spec.checks.append(
            f"type({access}) is {kind} and " + (f"{access} != {access}" if nan else f"{access} == {same}")
        )
    elif type(value) in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        spec.checks.append(f"type({access}) is {spec.const(type(value))} and len({access}) == {len(value)}")
        for i, item in enumerate(value):
            _describe(spec, item, f"{name}_{i}", f"{access}[{i}]")
    elif type(value) in (dict, collections.OrderedDict):
        keys = tuple(value)
        if not all(isinstance(k, (str, int)) for k in keys):
            raise Untraceable(f"input {name} is a dict whose keys are not strings or integers")
        spec.checks.append(f"type({access}) is {spec.const(type(value))} and tuple({access}) == {spec.const(keys)}")
        for key, item in value.items():
            _describe(spec, item, f"{name}_{key}", f"{access}[{key!r}]")
    else:
        raise Untraceable(f"input {name} is a {type(value).__name__}, whose contents are unknown")


def identifier(name: str) -> str:
    """`name` as a Python identifier."""
    name = re.sub(r"\W", "_", name)
    return f"_{name}" if not name or name[0].isdigit() or keyword.iskeyword(name) else name


def _python(expr: int | sympy.Basic) -> str:
    return str(expr) if isinstance(expr, int) else PythonPrinter().doprint(expr)
