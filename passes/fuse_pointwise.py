"""Fuse pointwise operations into one kernel, forward and backward.

Rule: maximal convex sets of elementwise operations (arithmetic, activations, casts, dropout) become regions that
Inductor compiles, once for each distinct region (operations, dtypes, ranks), shared by all that are alike; sizes stay
dynamic. The backward is fused too: a region keeps its inputs instead of every intermediate.

Does not fire when: the region moves too few bytes to pay for the call of a compiled function (about 30 us) and for
compiling it; it writes in place; no C++ compiler (CPU) or Triton (CUDA) is found. Random numbers are eager's, from
the same generator in the same order; dtype promotion is eager's.

Costs: the compiler runs at the first call, seconds for each distinct region, cached on disk by Inductor.

Source: torch.compile; Ansel et al., "PyTorch 2", ASPLOS 2024.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from fxspeed.graph.ops import module_of, pointwise_name, storage_of
from fxspeed.graph.regions import Region, bytes_of, extract, free_name, live_inputs, live_outputs
from fxspeed.graph.trace import Trace
from fxspeed.passes.base import Captured, Change, Pass, Skip


@dataclasses.dataclass(eq=False)
class FusedRegion(Region):
    """Pointwise operations compiled as one. Regions with equal `key` share their compiled code."""

    key: tuple = ()

    decorator: ClassVar[str] = "compiled_by_inductor"
    _shared: ClassVar[dict[tuple, Callable]] = {}

    def bind(self, root: nn.Module, body: Callable) -> Callable:
        if self.key not in self._shared:
            module = fx.GraphModule(nn.Module(), self.graph)  # the region is closed: it reads its inputs alone
            self._shared[self.key] = torch.compile(
                module, fullgraph=True, dynamic=True, options={"fallback_random": True}
            )
        return self._shared[self.key]

    def simulate(self, root: nn.Module, body: Callable) -> Callable:
        def run(*inputs: Any) -> Any:  # the compiled backward recomputes what is cheap: it keeps the inputs
            return checkpoint(body, *inputs, use_reentrant=False, determinism_check="none")

        return run


@dataclasses.dataclass(frozen=True)
class FusePointwise(Pass):
    """Compile regions of pointwise operations with Inductor.

    Options:
        min_saved: bytes of memory traffic that a region must save in a forward.
        min_ops: operations that a region must hold.
    """

    name: ClassVar[str] = "fuse_pointwise"
    min_saved: int = 8 << 20
    min_ops: int = 3

    def run(self, captured: Captured) -> list[Change | Skip]:
        records: dict[tuple, Change | Skip] = {}
        for mode, trace in captured.traces.items():
            for group in _groups(trace, captured.root):
                if len(group) < 2:
                    continue
                saved = _traffic_saved(group)
                label = f"{group[0].name} to {group[-1].name}"
                source = group[0].meta.get("source", "")
                reason = ""
                if len(group) < self.min_ops:
                    reason = f"{len(group)} operations, fewer than {self.min_ops}"
                elif saved < self.min_saved:
                    reason = f"it would save {saved / 2**20:.2f} MiB of traffic, less than its call costs"
                elif _inputs_written(trace, group):
                    reason = "what it reads is written in place later, and its backward may need it"
                elif missing := _no_compiler(group[0].meta["val"].device):
                    reason = missing
                if reason:
                    skip = Skip(self.name, label, f"fuse {len(group)} operations", reason, {"bytes": saved}, source)
                    records.setdefault((label, "skip"), skip)
                    continue
                ops = ", ".join(dict.fromkeys(pointwise_name(n, captured.root) for n in group))
                _fuse(trace, captured.root, group)
                change = Change(
                    self.name,
                    label,
                    f"{len(group)} operations fused ({ops})",
                    f"one kernel reads and writes {saved / 2**20:.1f} MiB less",
                    {"bytes": saved},
                )
                records.setdefault((label, mode if records.get((label, "train")) is None else "train"), change)
        return list(records.values())


def _groups(trace: Trace, root: nn.Module) -> list[list[fx.Node]]:
    """Disjoint convex sets of pointwise nodes, grown in graph order.

    A set keeps the property that everything it reads is made before anything outside reads from it, so that one call
    can stand for it; a write into a tensor ends every set that has begun.
    """
    position = {n: i for i, n in enumerate(trace.graph.nodes)}
    open_groups: list[list[fx.Node]] = []
    closed: list[list[fx.Node]] = []
    member: dict[fx.Node, list[fx.Node]] = {}
    for node in trace.graph.nodes:
        if node.meta.get("mutates"):
            closed += open_groups
            open_groups = []
        if not pointwise_name(node, root) or _reads_number(node):
            continue
        candidates = [
            member[i] for i in node.all_input_nodes if i in member and any(member[i] is g for g in open_groups)
        ]
        joined = next((g for g in candidates if _may_join(g, node, position)), None)
        if joined is None:
            joined = []
            open_groups.append(joined)
        joined.append(node)
        member[node] = joined
        for other in candidates:
            both = sorted({*joined, *other}, key=position.__getitem__)
            if other is not joined and _is_callable_set(both, position):
                joined[:] = both
                open_groups = [g for g in open_groups if g is not other]
                for n in other:
                    member[n] = joined
    return closed + open_groups


def _inputs_written(trace: Trace, group: list[fx.Node]) -> bool:
    """Whether a node behind the group writes into memory that the group reads."""
    read = {storage_of(n) for n in live_inputs(group)} - {None}
    behind = False
    for node in trace.graph.nodes:
        behind = behind or node is group[-1]
        if behind and any(storage_of(m) in read for m in node.meta.get("mutates", ())):
            return True
    return False


def _may_join(group: list[fx.Node], node: fx.Node, position: dict[fx.Node, int]) -> bool:
    return group[0].meta["val"].device == node.meta["val"].device and _is_callable_set([*group, node], position)


def _is_callable_set(nodes: list[fx.Node], position: dict[fx.Node, int]) -> bool:
    inside = set(nodes)
    outside = [position[u] for n in nodes for u in n.users if u not in inside]
    return all(position[n] < first for n in nodes for first in outside) if outside else True


def _reads_number(node: fx.Node) -> bool:
    """Whether the node reads a number that is known at run time only: the compiled code would read it from the host."""
    return any(isinstance(i.meta.get("val"), (torch.SymFloat, torch.SymInt)) for i in node.all_input_nodes)


def _traffic_saved(group: list[fx.Node]) -> int:
    """Bytes that one kernel reads and writes less than one kernel an operation."""
    each = sum(bytes_of(n.meta["val"]) + sum(bytes_of(i.meta.get("val")) for i in n.all_input_nodes) for n in group)
    return each - sum(bytes_of(n.meta["val"]) for n in (*live_inputs(group), *live_outputs(group)))


def _fuse(trace: Trace, root: nn.Module, group: list[fx.Node]) -> None:
    for node in group:
        _as_function(node, trace, root)

    def make(graph: fx.Graph, constants: dict[str, Any]) -> FusedRegion:
        return FusedRegion(graph, constants, f"{len(group)} operations in one kernel", _key(graph))

    call = extract(trace, group, free_name(trace, "fused"), make, closed=True)
    inputs = (n.meta.get("val") for n in call.all_input_nodes)
    made = trace.constants[str(call.target)]
    for name, other in trace.constants.items():  # one region serves all that are alike
        if other is not made and isinstance(other, FusedRegion) and other.key == made.key:
            del trace.constants[str(call.target)]
            call.target = name
            break
    call.meta["saved"] = tuple(v for v in inputs if isinstance(v, torch.Tensor) and v.is_floating_point())


def _as_function(node: fx.Node, trace: Trace, root: nn.Module) -> None:
    """Write the call of a built-in module as that of its function, so that the region needs no module."""
    module = module_of(node, root)
    if module is None:
        return
    function, options = _FUNCTIONS[type(module)]
    values = {option: getattr(module, attribute) for option, attribute in options.items()}
    if isinstance(module, nn.Dropout):
        values["training"] = trace.flags.get(str(node.target), module.training)
    node.op, node.target = "call_function", function
    node.kwargs = {**node.kwargs, **values}


#: Class -> function, and the function's options with the attributes that hold them.
_FUNCTIONS: dict[type[nn.Module], tuple[Callable, dict[str, str]]] = {
    nn.ReLU: (F.relu, {}),
    nn.ReLU6: (F.relu6, {}),
    nn.GELU: (F.gelu, {"approximate": "approximate"}),
    nn.SiLU: (F.silu, {}),
    nn.Mish: (F.mish, {}),
    nn.Hardswish: (F.hardswish, {}),
    nn.Hardsigmoid: (F.hardsigmoid, {}),
    nn.Hardtanh: (F.hardtanh, {"min_val": "min_val", "max_val": "max_val"}),
    nn.LeakyReLU: (F.leaky_relu, {"negative_slope": "negative_slope"}),
    nn.ELU: (F.elu, {"alpha": "alpha"}),
    nn.CELU: (F.celu, {"alpha": "alpha"}),
    nn.SELU: (F.selu, {}),
    nn.Softplus: (F.softplus, {"beta": "beta", "threshold": "threshold"}),
    nn.Softsign: (F.softsign, {}),
    nn.LogSigmoid: (F.logsigmoid, {}),
    nn.Tanh: (torch.tanh, {}),
    nn.Sigmoid: (torch.sigmoid, {}),
    nn.Tanhshrink: (F.tanhshrink, {}),
    nn.Dropout: (F.dropout, {"p": "p"}),
}


def _key(graph: fx.Graph) -> tuple:
    """Equal for regions of the same operations on inputs of the same dtypes, ranks and devices."""
    order = {n: f"v{i}" for i, n in enumerate(graph.nodes)}
    code = []
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            facts = (value.dtype, value.dim(), str(value.device)) if isinstance(value, torch.Tensor) else (type(value),)
            code.append(("input", *map(str, facts)))
        else:
            arguments = fx.map_arg((node.args, node.kwargs), lambda n: order[n])
            code.append((node.op, str(node.target), str(arguments)))
    return tuple(code)


@functools.cache
def _no_compiler(device: torch.device) -> str:
    """Why nothing can be compiled for a device; empty where it can."""
    if device.type == "cpu":
        try:
            from torch._inductor.cpp_builder import get_cpp_compiler

            get_cpp_compiler()
        except Exception:
            return "no C++ compiler was found (install g++ or set CXX)"
        return (
            "" if shutil.which("g++") or shutil.which("clang++") or shutil.which("c++") else "no C++ compiler was found"
        )
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return "" if has_triton() else "Triton was not found (pip install triton)"
    return f"Inductor does not compile for {device.type} here"
