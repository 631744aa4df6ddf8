"""Graphs as readable Python."""

from __future__ import annotations

import functools
import inspect
import operator
import re
from typing import Any

import sympy
import torch
from torch import fx, nn

from fxspeed.graph import runtime
from fxspeed.graph.regions import Region
from fxspeed.graph.structure import Build, Constant

_INFIX = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.pow: "**",
    operator.matmul: "@",
    operator.and_: "&",
    operator.or_: "|",
    operator.xor: "^",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.eq: "==",
    operator.ne: "!=",
    operator.lshift: "<<",
    operator.rshift: ">>",
}
_PREFIX = {operator.neg: "-", operator.invert: "~"}
_INPLACE = {
    getattr(operator, f"i{n}"): s
    for n, s in (
        ("add", "+="),
        ("sub", "-="),
        ("mul", "*="),
        ("truediv", "/="),
        ("pow", "**="),
        ("and", "&="),
        ("or", "|="),
    )
}
_METHODS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "true_divide": "/",
    "pow": "**",
    "matmul": "@",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "eq": "==",
    "ne": "!=",
}
_DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


def render(
    graph: fx.Graph,
    constants: dict[str, Any],
    root: nn.Module,
    name: str = "forward",
    note: str = "",
    runnable: bool = False,
) -> str:
    """The Python that `graph` runs: one function, behind it one for each region, shapes and modules as comments.

    Args:
        runnable: write what a reader can do without: when values are let go, and how a region is recomputed.
    """
    dead = _last_uses(graph) if runnable else {}
    sizes: dict[str, str] = {}
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    lines = [f"def {name}({', '.join(['self', *(n.name for n in inputs)])}):" + (f"  # {note}" if note else "")]
    typed = [f"{n.name}: {described}" for n in inputs if (described := describe(n.meta.get("val"), sizes))]
    lines += [f"    # {line}" for line in typed]
    depth = 1
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            continue
        text, comment, depth, at = _statement(node, root, constants, sizes, depth, settings=not runnable)
        if text:
            lines.append("    " * at + text + (f"  # {comment}" if comment else ""))
            if text.endswith(":"):
                depth = at + 1
        if node in dead:
            lines.append("    " * depth + f"del {', '.join(dead[node])}")
    parts = ["\n".join(lines) + "\n"]
    for key, value in constants.items():
        if isinstance(value, Region):
            decorator = f"@{value.decorator}{value.options if runnable else ''}\n" if value.decorator else ""
            parts.append(decorator + render(value.graph, value.constants, root, key, value.note, runnable))
    return "\n".join(parts)


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[str]]:
    """Node -> the names that nothing reads after it."""
    found: dict[fx.Node, list[str]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        for each in (*node.all_input_nodes, node):
            unnamed = each.op in ("get_attr", "output") or not (each.users or each.op == "placeholder")
            if each not in seen and not unnamed and node.op != "output":
                found.setdefault(node, []).append(each.name)
            seen.add(each)
    return found


def _statement(node: fx.Node, root, constants, sizes, depth, settings: bool) -> tuple[str, str, int, int]:
    """Text and comment of a node, the depth behind it, and the depth it stands at."""
    if node.op == "output":
        return f"return {expression(node.args[0])}", "", depth, depth
    if node.target in (runtime.enter_autocast, runtime.enter_inference_mode):
        if node.target is runtime.enter_inference_mode:
            return f"with torch.inference_mode({node.args[0]}):", "", depth, depth
        device, dtype, enabled, *_ = node.args
        inside = f"{device!r}, {dtype}" if enabled else f"{device!r}, enabled=False"
        return f"with torch.autocast({inside}):", "", depth, depth
    if node.target in (runtime.exit_autocast, runtime.exit_inference_mode):
        return "", "", max(depth - 1, 1), depth
    if node.target is torch._C._set_grad_enabled:
        return f"torch.set_grad_enabled({node.args[0]})", "", depth, depth
    value = _value(node, root, constants)
    comment = describe(node.meta.get("val"), sizes)
    if settings and node.op == "call_module" and node.target not in constants:
        module = root.get_submodule(str(node.target))
        comment = f"{type(module).__name__}({module.extra_repr()})" + (f" -> {comment}" if comment else "")
    if node.target is operator.setitem:
        target, key, new = node.args
        return f"{expression(target)}[{_index(key)}] = {expression(new)}", comment, depth, depth
    if (
        node.target in _INPLACE
        and len(node.args) == 2
        and isinstance(node.args[0], fx.Node)
        and node.args[0].op != "get_attr"
    ):
        left, right = map(expression, node.args)
        return f"{left} {_INPLACE[node.target]} {right}; {node.name} = {left}", comment, depth, depth
    if not node.users and node.meta.get("writes"):
        return value, comment, depth, depth
    return f"{node.name} = {value}", comment, depth, depth


def _value(node: fx.Node, root: nn.Module, constants: dict[str, Any]) -> str:
    args, kwargs = node.args, node.kwargs
    if node.op == "call_method":
        if node.target in _METHODS and len(args) == 2 and not kwargs:
            return f"{expression(args[0])} {_METHODS[str(node.target)]} {expression(args[1])}"
        kwargs = _telling(getattr(torch.Tensor, str(node.target), None), kwargs)
        return f"{expression(args[0])}.{node.target}({_arguments(args[1:], kwargs)})"
    if node.op == "call_module":
        return f"{path(str(node.target), root)}({_arguments(args, kwargs)})"
    target = node.target
    if target in _INFIX and len(args) == 2:
        return f"{expression(args[0])} {_INFIX[target]} {expression(args[1])}"
    if target is operator.getitem:
        return f"{expression(args[0])}[{_index(args[1])}]"
    if target in _PREFIX:
        return f"{_PREFIX[target]}{expression(args[0])}"
    if target is getattr:
        return f"{expression(args[0])}.{args[1]}"
    if isinstance(target, runtime.FunctionApply):
        return f"{target.cls.__name__}.apply({_arguments(args, kwargs)})"
    return f"{function_name(target)}({_arguments(args, _telling(target, kwargs))})"


def function_name(target: Any) -> str:
    """How a function is written: `F.relu`, `torch.cat`, `operator.add`."""
    if isinstance(target, (Build, Constant)):
        return target.__name__
    module, name = getattr(target, "__module__", None) or "", getattr(target, "__name__", str(target))
    if getattr(torch.nn.functional, name, None) is target:
        return f"F.{name}"
    if getattr(torch, name, None) is target:
        return f"torch.{name}"
    if module == "_operator":
        return f"operator.{name}"
    if module == "torch.return_types":
        return f"{module}.{name}"
    for space in ("linalg", "special", "fft"):
        short = name.removeprefix(f"{space}_")
        if getattr(getattr(torch, space), short, None) is target:
            return f"torch.{space}.{short}"
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops.{target}"
    if module.startswith("torch._C._nn"):
        return f"F.{name}"
    return f"torch.{name}" if module.startswith("torch") else name


def expression(value: Any) -> str:
    """An argument of a node as Python."""
    if isinstance(value, fx.Node):
        if value.op == "get_attr":
            return attribute(str(value.target))
        return value.name
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return f"{type(value).__name__}({', '.join(map(expression, value))})"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(expression, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, list):
        return "[" + ", ".join(map(expression, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {expression(v)}" for k, v in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice({', '.join(expression(v) for v in (value.start, value.stop, value.step))})"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f'float("{value}")'
    return repr(value)


@functools.cache
def _defaults(target: Any) -> dict[str, Any]:
    """The keyword defaults of a Python function."""
    try:
        return {k: p.default for k, p in inspect.signature(target).parameters.items() if p.default is not p.empty}
    except (TypeError, ValueError):
        return {}


def _telling(target: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments that differ from the function's defaults."""
    defaults = _defaults(target)
    same = lambda k, v: k in defaults and type(v) is type(defaults[k]) and v == defaults[k]
    return {k: v for k, v in kwargs.items() if not same(k, v)}


def _arguments(args: Any, kwargs: dict[str, Any]) -> str:
    return ", ".join([*map(expression, args), *(f"{k}={expression(v)}" for k, v in kwargs.items())])


def _index(key: Any) -> str:
    def one(k: Any) -> str:
        if isinstance(k, slice):
            start, stop, step = ("" if v is None else expression(v) for v in (k.start, k.stop, k.step))
            return f"{start}:{stop}" + (f":{step}" if step else "")
        return "..." if k is Ellipsis else expression(k)

    return ", ".join(map(one, key)) if isinstance(key, tuple) and key else one(key)


def path(target: str, root: nn.Module) -> str:
    """`layer1.0.conv` as `self.layer1[0].conv`."""
    text, module = "self", root
    for name in target.split("."):
        indexed = isinstance(module, (nn.Sequential, nn.ModuleList)) and name.isdigit()
        text += f"[{name}]" if indexed else (f".{name}" if name.isidentifier() else f".get_submodule({name!r})")
        module = getattr(module, name, module)
    return text


def attribute(target: str) -> str:
    """`layer1.0.weight` as `self.layer1[0].weight`."""
    text = "self"
    for name in target.split("."):
        if name.isdigit():
            text += f"[{name}]"
        else:
            text = f"{text}.{name}" if name.isidentifier() else f"getattr({text}, {name!r})"
    return text


def describe(value: Any, sizes: dict[str, str] | None = None) -> str:
    """`f32[batch, 64, 56, 56]` for a fake tensor; several for a tuple; nothing for what is no tensor."""
    sizes = {} if sizes is None else sizes
    if isinstance(value, str):
        return value
    if isinstance(value, torch.Tensor):
        shape = ", ".join(_size(s, sizes) for s in value.shape)
        return f"{_DTYPES.get(value.dtype, str(value.dtype).removeprefix('torch.'))}[{shape}]"
    if isinstance(value, (tuple, list)):
        return ", ".join(filter(None, (describe(v, sizes) for v in value)))
    return ""


def _size(size: Any, names: dict[str, str]) -> str:
    if not isinstance(size, torch.SymInt):
        return str(size)
    expr = size.node.expr
    for symbol in sorted(expr.free_symbols, key=str) if isinstance(expr, sympy.Basic) else ():
        names.setdefault(str(symbol), "batch" if not names else f"n{len(names)}")
    return re.sub(r"\b[szu]\w*\d+\b", lambda m: names.get(m[0], m[0]), str(expr))
