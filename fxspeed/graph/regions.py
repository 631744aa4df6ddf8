"""Regions: convex sets of nodes moved into a graph of their own, and graphs bound to the modules they run on."""

from __future__ import annotations

import abc
import dataclasses
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import fx, nn
from torch.fx import graph_module

from fxspeed.graph.pickling import pack, unpack
from fxspeed.graph.trace import Trace


@dataclasses.dataclass(eq=False)
class Region(abc.ABC):
    """A part of a graph that runs in a way of its own (recomputed in backward, compiled, ...).

    It stands in `Trace.constants` under the name that its `call_module` node targets.

    Attributes:
        graph: the nodes; placeholders are the region's inputs; the output is a tensor, or a tuple of several.
        constants: what the graph reads beside the model's own parameters, buffers and modules.
        note: one line for the reader of the printed graph.
    """

    graph: fx.Graph
    constants: dict[str, Any]
    note: str = ""

    decorator: ClassVar[str] = ""

    @property
    def options(self) -> str:
        """What the decorator is called with, where it is called."""
        return ""

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self), graph=pack(self.graph))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, graph=unpack(state["graph"]))

    @abc.abstractmethod
    def bind(self, root: nn.Module, body: Callable) -> Callable:
        """The function that runs the region, given `body`, which runs its graph plainly on `root`."""

    def simulate(self, root: nn.Module, body: Callable) -> Callable:
        """Like `bind`, without compiled code and on fake tensors too: keeps for backward what the region keeps."""
        return self.bind(root, body)


def bind(graph: fx.Graph, constants: dict[str, Any], root: nn.Module, regions: str = "run") -> fx.GraphModule:
    """A GraphModule that runs `graph` on the modules and tensors of `root`, which it shares and does not copy.

    Args:
        regions: "run" as they are, "plain" as the nodes they are made of, or "simulate": uncompiled, on any tensors.
    """
    module = fx.GraphModule(nn.Module(), fx.Graph())
    module.__dict__["training"] = root.training
    for name, value in constants.items():
        if isinstance(value, Region):
            body = bind(value.graph, value.constants, root, regions).forward
            value = body if regions == "plain" else (value.bind if regions == "run" else value.simulate)(root, body)
        module.__dict__[name] = value
    module.graph = graph
    _look_up_directly(module, root)
    taken = set(dir(module)) - set(dir(nn.Module)) - constants.keys()
    for kind in ("_parameters", "_buffers", "_modules"):
        own = module.__dict__[kind] = root.__dict__[kind]  # the same dictionaries: assignments to root are seen here
        for name in taken.intersection(own):  # a user's child may be called `graph` or `code`: here too, then
            setattr(type(module), name, property(partial(_entry, kind, name)))
    return module


def _look_up_directly(module: fx.GraphModule, root: nn.Module) -> None:
    """Make `module.forward` read children from their parents' `_modules`, as live as `getattr` and 0.4 us faster each.

    The code that fx writes goes through `nn.Module.__getattr__` for every step of every path in every call.
    """
    paths = {str(n.target) for n in module.graph.nodes if n.op in ("call_module", "get_attr")}
    direct: dict[str, str] = {}
    for path in paths:
        written, fast, at = "self", "self", root
        for name in path.split("."):
            known = vars(at).get("_modules")
            if type(known) is not dict or name not in known or hasattr(type(at), name):
                break
            written = f"{written}.{name}" if name.isidentifier() else f'getattr({written}, "{name}")'
            fast, at = f"{fast}._modules[{name!r}]", known[name]
            direct[written] = fast
    if not direct:
        return
    longest = "|".join(re.escape(written) for written in sorted(direct, key=len, reverse=True))
    forward = type(module).forward
    source = re.sub(rf"(?<== )(?:{longest})(?![\w\"])", lambda match: direct[match[0]], module.code)
    type(module).forward = graph_module._forward_from_src(source, forward.__globals__)


def _entry(kind: str, name: str, module: nn.Module) -> Any:
    return module.__dict__[kind][name]


def live_inputs(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes outside `nodes` that they read, in the order of first use."""
    inside = set(nodes)
    return list(dict.fromkeys(i for n in nodes for i in n.all_input_nodes if i not in inside))


def live_outputs(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes of `nodes` that others read."""
    inside = set(nodes)
    return [n for n in nodes if any(u not in inside for u in n.users)]


def extract(
    trace: Trace, nodes: Sequence[fx.Node], name: str, make: Callable[[fx.Graph, dict], Region], closed: bool = False
) -> fx.Node:
    """Move `nodes` (convex, in graph order) of `trace` into a region and call it where the last of them stood.

    Every reader of the region's results must stand behind the last of `nodes`. Parameters that they read are read
    inside the region, or with `closed` are its inputs. Returns the call.
    """
    inputs = [n for n in live_inputs(nodes) if closed or n.op != "get_attr"]
    attributes = [n for n in live_inputs(nodes) if not closed and n.op == "get_attr"]
    outputs = live_outputs(nodes)
    body = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        values[node] = body.placeholder(node.name)
        values[node].meta = {k: v for k, v in node.meta.items() if k in ("val", "source", "path")}
    for node in (*attributes, *nodes):
        values[node] = body.node_copy(node, values.__getitem__)
        values[node].meta["mutates"] = tuple(values[m] for m in node.meta.get("mutates", ()) if m in values)
    body.output(values[outputs[0]] if len(outputs) == 1 else tuple(values[n] for n in outputs))
    constants = {
        n.target: trace.constants[n.target]
        for n in body.nodes
        if n.op in ("get_attr", "call_module") and n.target in trace.constants
    }
    trace.constants[name] = make(body, constants)
    graph = trace.graph
    last = nodes[-1]
    with graph.inserting_after(last):
        call = graph.create_node("call_module", name, tuple(inputs))
    call.meta.update(source=nodes[0].meta.get("source", ""), path=nodes[0].meta.get("path", ""), region=True)
    call.meta["val"] = outputs[0].meta["val"] if len(outputs) == 1 else tuple(n.meta["val"] for n in outputs)
    call.meta["saved"] = tuple(t for n in nodes for t in n.meta.get("saved", ()))
    call.meta["mutates"] = tuple(
        m for n in nodes for m in n.meta.get("mutates", ()) if m not in nodes and m.op != "get_attr"
    )
    after = call
    for i, node in enumerate(outputs):
        if len(outputs) == 1:
            item = call
        else:
            with graph.inserting_after(after):
                item = graph.create_node("call_function", operator.getitem, (call, i))
            item.meta = {k: v for k, v in node.meta.items() if k in ("val", "source", "path")}
            after = item
        node.replace_all_uses_with(item, lambda user, inside=set(nodes): user not in inside)
    for node in graph.nodes:  # metadata of others may name what has moved
        if moved := node.meta.get("mutates"):
            node.meta["mutates"] = tuple(m for m in moved if m not in nodes)
    for node in reversed(nodes):
        graph.erase_node(node)
    for node in attributes:
        if not node.users:
            graph.erase_node(node)
    for constant in constants:
        if constant != name and not any(n.target == constant for n in graph.nodes):
            del trace.constants[constant]
    return call


def free_name(trace: Trace, stem: str) -> str:
    """`stem_0`, `stem_1`, ... whichever neither a constant of the trace has nor a child of the model that it reads."""
    taken = {str(n.target).partition(".")[0] for n in trace.graph.nodes if n.op in ("get_attr", "call_module")}
    taken |= trace.constants.keys()
    return next(f"{stem}_{i}" for i in range(len(taken) + 1) if f"{stem}_{i}" not in taken)


def bytes_of(value: Any) -> int:
    """Bytes of a fake tensor, or of all in a nested value, symbolic sizes at their example values."""
    if isinstance(value, torch.Tensor):
        count = 1
        for size in value.shape:
            count *= hint(size)
        return count * value.element_size()
    if isinstance(value, (tuple, list)):
        return sum(map(bytes_of, value))
    if isinstance(value, dict):
        return sum(map(bytes_of, value.values()))
    return 0


def hint(size: Any) -> int:
    """A size as the example inputs have it (1 where it is known only at run time)."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.has_hint() else 1
    return int(size)


def model_nodes(graph: fx.Graph, constants: dict[str, Any]) -> Iterator[fx.Node]:
    """The nodes of a graph and of its regions, but those that stand for one of `constants`."""
    for node in graph.nodes:
        known = constants.get(str(node.target)) if node.op in ("call_module", "get_attr") else None
        if isinstance(known, Region):
            yield from model_nodes(known.graph, known.constants)
        elif known is None:
            yield node


def used_parameters(graph: fx.Graph, constants: dict[str, Any], root: nn.Module) -> set[int]:
    """The `id` of each parameter that a graph and its regions read."""
    found: set[int] = set()
    for node in model_nodes(graph, constants):
        if node.op == "call_module":
            found |= {id(p) for p in root.get_submodule(str(node.target)).parameters()}
        elif node.op == "get_attr":
            found.add(id(operator.attrgetter(str(node.target))(root)))
    return found
