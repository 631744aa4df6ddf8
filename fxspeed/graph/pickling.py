"""Graphs as plain data, for pickle: nodes by name, targets by reference, no fake tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

_KEPT = ("source", "path", "writes", "opaque", "region", "constructs")


@dataclasses.dataclass(frozen=True)
class _Ref:
    name: str


def pack(graph: fx.Graph) -> list[tuple]:
    """The nodes of `graph` as tuples that pickle takes if it takes their targets and constants."""
    plain = lambda a: _Ref(a.name) if isinstance(a, fx.Node) else a
    return [
        (n.name, n.op, n.target, _mutable(map_aggregate(n.args, plain)), _mutable(map_aggregate(n.kwargs, plain)),
         {k: n.meta[k] for k in _KEPT if k in n.meta})
        for n in graph.nodes
    ]  # fmt: skip


def unpack(nodes: list[tuple]) -> fx.Graph:
    """The graph that `pack` took apart, without what is known of values."""
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}
    node_of = lambda a: made[a.name] if isinstance(a, _Ref) else a
    for name, op, target, args, kwargs, meta in nodes:
        node = graph.create_node(op, target, map_aggregate(args, node_of), map_aggregate(kwargs, node_of), name=name)
        node.meta = dict(meta)
        made[name] = node
    return graph


def _mutable(value: Any) -> Any:
    """fx's immutable lists and dicts as plain ones."""
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(map(_mutable, value))
    if isinstance(value, list):
        return [_mutable(v) for v in value]
    if isinstance(value, dict):
        return {k: _mutable(v) for k, v in value.items()}
    return value
