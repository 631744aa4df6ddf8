"""Sizes and numbers that are known only when the model runs, and the nodes that compute them.

While a model is traced, `x.shape[0]` is a `torch.SymInt`, and so is what Python computes from it. When such a number
reaches an operator, the graph needs a node for it: a size of an input, an `.item()`, or arithmetic on these.
"""

from __future__ import annotations

import math
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from fxspeed.errors import Untraceable

Sym = Any  # torch.SymInt, torch.SymFloat or torch.SymBool
SYMS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class _Analysis(PythonReferenceAnalysis):
    """Python arithmetic that also runs on the proxies of a graph."""

    @staticmethod
    def int_truediv(a: Any, b: Any) -> Any:
        return a / b

    @staticmethod
    def truediv(a: Any, b: Any) -> Any:
        return a / b

    @staticmethod
    def trunc_to_int(a: Any, dtype: Any = None) -> Any:
        return _call(math.trunc, a)

    @staticmethod
    def floor_to_int(a: Any, dtype: Any = None) -> Any:
        return _call(math.floor, a)

    @staticmethod
    def ceil_to_int(a: Any, dtype: Any = None) -> Any:
        return _call(math.ceil, a)

    @staticmethod
    def round_to_int(a: Any, dtype: Any = None) -> Any:
        return _call(round, a)

    @staticmethod
    def sqrt(a: Any) -> Any:
        return _call(math.sqrt, a)

    @staticmethod
    def log2(a: Any) -> Any:
        return _call(math.log2, a)


def _call(function: Any, value: Any) -> Any:
    return (
        value.tracer.create_proxy("call_function", function, (value,), {})
        if isinstance(value, fx.Proxy)
        else function(value)
    )


class Symbols:
    """The nodes of a graph that hold symbolic numbers, made when first used."""

    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self.tracer = GraphAppendingTracer(graph)
        self.nodes: dict[sympy.Basic, fx.Node] = {}
        self.origins: dict[sympy.Symbol, tuple[fx.Node, int]] = {}  # dimension of a tensor that holds the symbol

    def found(self, node: fx.Node, tensor: torch.Tensor) -> None:
        """Remember `node` as the origin of symbols that appear in its shape for the first time."""
        for dim, size in enumerate(tensor.shape):
            expr = size.node.expr if isinstance(size, torch.SymInt) else None
            if isinstance(expr, sympy.Symbol):
                self.origins.setdefault(expr, (node, dim))

    def bind(self, value: Sym, node: fx.Node) -> None:
        """`node` computes `value`, a number read from a tensor."""
        self.nodes[value.node.expr] = node

    def forget(self, erased: set[fx.Node]) -> None:
        self.nodes = {e: n for e, n in self.nodes.items() if n not in erased}
        self.origins = {s: o for s, o in self.origins.items() if o[0] not in erased}

    def node(self, value: Sym) -> fx.Node | int | float | bool:
        """The node that holds `value`, or a plain number where it has turned out constant."""
        expr = value.node.expr
        if isinstance(expr, sympy.Basic) and not expr.free_symbols:
            return value.node.pytype(expr)
        if (known := self.nodes.get(expr)) is not None:
            return known
        env: dict[sympy.Symbol, Any] = {s: fx.Proxy(self._symbol(s), self.tracer) for s in expr.free_symbols}
        made = sympy_interp(_Analysis, env, expr)
        if not isinstance(made, fx.Proxy):
            return made
        made.node.meta.setdefault("val", value)
        self.nodes[expr] = made.node
        return made.node

    def _symbol(self, symbol: sympy.Symbol) -> fx.Node:
        if (known := self.nodes.get(symbol)) is not None:
            return known
        if symbol not in self.origins:
            raise Untraceable(f"the number {symbol} comes from no tensor of the graph")
        tensor, dim = self.origins[symbol]
        after = tensor
        if tensor.op == "placeholder":
            after = [n for n in self.graph.nodes if n.op == "placeholder"][-1]
        with self.graph.inserting_after(after):
            node = self.graph.create_node("call_method", "size", (tensor, dim), {})
        node.meta["val"] = tensor.meta["val"].shape[dim]
        self.nodes[symbol] = node
        return node
