"""Keep numbers on the device: no reads of tensor values by the host, no constants built in every forward.

Rule, each with its own conditions:
- `.item()`, `float(t)`, `int(t)`: where every use of the number is arithmetic with tensors, it stays a 0-dim tensor
  (detached: to autograd a Python number is a constant), in float64 or int64 as Python has it, cast where the result's
  dtype would differ from eager's. A number that decides a shape, an index or an output stays, and is reported.
- `torch.tensor(...)`, `torch.arange(...)` and the like, with all that is computed from them alone: built once.
  Not when something writes into the result or returns it. They are no parameters or buffers: no new keys in the state
  dict.
- Tensors made on the host and then moved are made on the device. Random ones are not: their generator would change.
- A copy to the host and back is left out.

Saves: host reads, each of which makes the host wait for the device; on a CPU a little time only.

Source: PyTorch performance tuning guide, "Avoid unnecessary CPU-GPU synchronization", "Create tensors directly on the
target device"; dtype promotion as in torch.result_type.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import fx

from fxspeed.graph.ops import FACTORIES, is_random, name_of, storage_of
from fxspeed.graph.regions import bytes_of, free_name
from fxspeed.graph.trace import Trace, is_kept
from fxspeed.passes.base import Captured, Change, Pass, Skip

_ARITHMETIC = frozenset(
    """add sub mul div true_divide floor_divide remainder fmod pow lt le gt ge eq ne maximum minimum where masked_fill
    clamp clamp_min clamp_max clip lerp""".split()
)
_NUMBER_OPS: dict[Any, Callable] = {
    operator.add: torch.add,
    operator.sub: torch.sub,
    operator.mul: torch.mul,
    operator.truediv: torch.true_divide,
    operator.pow: torch.pow,
    operator.neg: torch.neg,
    operator.floordiv: torch.floor_divide,
    operator.mod: torch.remainder,
}


@dataclasses.dataclass(frozen=True)
class RemoveSyncs(Pass):
    """Remove host reads and constants rebuilt in every forward.

    Options: `max_constant_bytes`, the largest constant that is kept from one forward to the next.
    """

    name: ClassVar[str] = "remove_syncs"
    max_constant_bytes: int = 1 << 20

    def run(self, captured: Captured) -> list[Change | Skip]:
        records: dict[tuple[str, str, str], Change | Skip] = {}
        for trace in captured.traces.values():
            for record in (
                *self._reads(trace),
                *self._moves(trace),
                *self._constants(trace, captured),
            ):
                records.setdefault((type(record).__name__, record.target, record.what), record)
        return list(records.values())

    # ------------------------------------------------------------------ .item()
    def _reads(self, trace: Trace) -> list[Change | Skip]:
        records: list[Change | Skip] = []
        for node in list(trace.graph.nodes):
            name = name_of(node)
            if name in ("nonzero", "unique", "masked_select", "unique_consecutive") and node.op != "get_attr":
                records.append(self._stays(node, name, f"the shape of {name}() depends on values"))
            if node.op != "call_method" or node.target != "item":
                continue
            numbers, reason = _number_uses(node)
            plan = {} if reason else {n: _as_tensor_dtype(n, numbers) for n in numbers}
            reason = reason or next((r for r in plan.values() if isinstance(r, str)), "")
            if reason:
                records.append(self._stays(node, "item", reason))
                continue
            _keep_on_device(trace, node, numbers, plan)
            records.append(
                Change(
                    self.name,
                    node.name,
                    ".item() stays on the device",
                    "its uses are arithmetic with tensors",
                    {"host_reads": 1},
                )
            )
        return records

    def _stays(self, node: fx.Node, name: str, reason: str) -> Skip:
        return Skip(
            self.name, node.name, f"{name} read by the host", reason, {"host_reads": 1}, node.meta.get("source", "")
        )

    # ------------------------------------------------------------------ made or moved on the wrong device
    def _moves(self, trace: Trace) -> list[Change | Skip]:
        records: list[Change | Skip] = []
        for node in list(trace.graph.nodes):
            if name_of(node) not in ("to", "cuda", "cpu") or not node.all_input_nodes:
                continue
            source = node.all_input_nodes[0]
            here, there = source.meta.get("val"), node.meta["val"]
            if not isinstance(here, torch.Tensor) or here.dtype != there.dtype or _escapes(trace, node):
                continue
            if (
                here.device != there.device
                and name_of(source) in FACTORIES - {"as_tensor", "from_numpy"}
                and len(source.users) == 1
            ):
                source.update_kwarg("device", there.device)
                source.meta["val"] = there
                what, why = f"made on {there.device}", f"it was made on {here.device} and copied"
            elif (
                name_of(source) in ("to", "cuda", "cpu")
                and isinstance(origin := source.args[0], fx.Node)
                and origin.meta["val"].device == there.device != here.device
                and origin.meta["val"].dtype == there.dtype
            ):
                source = origin
                what, why = (
                    "copy to the host and back left out",
                    f"it went from {there.device} to {here.device} and back",
                )
            else:
                continue
            node.replace_all_uses_with(source)
            trace.graph.erase_node(node)
            records.append(Change(self.name, source.name, what, why, {"host_reads": 1, "bytes": bytes_of(there)}))
        return records

    # ------------------------------------------------------------------ constants
    def _constants(self, trace: Trace, captured: Captured) -> list[Change | Skip]:
        records: list[Change | Skip] = []
        constant: set[fx.Node] = set()
        for node in trace.graph.nodes:
            value = node.meta.get("val")
            if node.op not in ("call_function", "call_method") or not isinstance(value, torch.Tensor) or is_kept(node):
                continue
            inputs = node.all_input_nodes
            made = not inputs and name_of(node) in FACTORIES and node.op == "call_function"
            derived = bool(inputs) and all(i in constant for i in inputs)
            if (made or derived) and not is_random(node, captured.root) and not value.requires_grad:
                constant.add(node)
        for node in list(trace.graph.nodes):
            if node not in constant or all(u in constant for u in node.users):
                continue
            origin = _first(node, constant)
            if bytes_of(node.meta["val"]) > self.max_constant_bytes:
                continue  # cheap to make, dear to keep
            if _escapes(trace, node):
                records.append(
                    Skip(
                        self.name,
                        node.name,
                        f"{name_of(origin)}() built once",
                        "it is written into or returned",
                        source=node.meta.get("source", ""),
                    )
                )
                continue
            name = free_name(trace, "constant")
            with torch.inference_mode(False), torch.no_grad():
                trace.constants[name] = _evaluate(node, {})
            with trace.graph.inserting_before(node):
                attribute = trace.graph.create_node("get_attr", name)
            attribute.meta = {k: v for k, v in node.meta.items() if k in ("val", "source", "path")}
            node.replace_all_uses_with(attribute)
            what = f"torch.{name_of(origin)}() built once"
            records.append(Change(self.name, node.name, what, "the same in every forward", {"host_reads": 1}))
        for node in reversed(list(trace.graph.nodes)):
            if node in constant and not node.users:
                trace.graph.erase_node(node)
        return records


def _number_uses(item: fx.Node) -> tuple[list[fx.Node], str]:
    """The nodes that hold numbers computed from `item`, itself first, or a reason why they cannot be tensors."""
    numbers, reason = [item], ""
    for node in numbers:
        for user in node.users:
            if user.op == "output" or user.meta.get("constructs"):
                return numbers, "the model returns it"
            if user.target in _NUMBER_OPS and not isinstance(user.meta.get("val"), torch.Tensor):
                if user not in numbers:
                    numbers.append(user)
            elif user.target in (torch.sym_float, float) and user not in numbers:
                numbers.append(user)
            elif (
                name_of(user) not in _ARITHMETIC
                or user.meta.get("writes")
                or not isinstance(user.meta.get("val"), torch.Tensor)
            ):
                return numbers, f"{name_of(user) or user.target} needs it on the host"
    return numbers, reason


def _as_tensor_dtype(number: fx.Node, numbers: list[fx.Node]) -> dict[fx.Node, torch.dtype | None] | str:
    """For each tensor operation on `number`, the dtype to cast it to so that the result's dtype stays eager's."""
    casts: dict[fx.Node, torch.dtype | None] = {}
    for user in number.users:
        if user in numbers:
            continue
        want = user.meta["val"].dtype
        others = [n.meta["val"] for n in user.all_input_nodes if n not in numbers]
        own = _python_dtype(number)
        for dtype in (None, want, torch.get_default_dtype()):
            stand_in = torch.empty((), dtype=dtype or own)
            tensors = [torch.empty((1,) * t.dim(), dtype=t.dtype) for t in others] + [stand_in]
            got = tensors[0]
            for t in tensors[1:]:
                got = torch.empty((1,) * max(got.dim(), t.dim()), dtype=torch.result_type(got, t))
            result = got.dtype
            if name_of(user) in ("div", "true_divide") and not result.is_floating_point and not user.kwargs:
                result = torch.get_default_dtype()
            if name_of(user) in ("lt", "le", "gt", "ge", "eq", "ne"):
                result = torch.bool
            if name_of(user) in ("masked_fill", "lerp", "where", "clamp", "clip", "clamp_min", "clamp_max"):
                if dtype != want:
                    continue
            if result == want:
                casts[user] = dtype
                break
        else:
            return f"{name_of(user)} would give another dtype"
    return casts


def _python_dtype(number: fx.Node) -> torch.dtype:
    value = number.meta.get("val")
    return torch.int64 if isinstance(value, torch.SymInt) else torch.float64


def _keep_on_device(trace: Trace, item: fx.Node, numbers: list[fx.Node], plan: dict[fx.Node, Any]) -> None:
    graph = trace.graph
    tensors: dict[fx.Node, fx.Node] = {}

    def make(op: str, target: Any, args: tuple, like: fx.Node, dtype: torch.dtype) -> fx.Node:
        node = graph.create_node(op, target, args)
        node.meta = {k: v for k, v in like.meta.items() if k in ("source", "path")}
        node.meta["val"] = torch.empty((), dtype=dtype, device="meta")
        return node

    for number in numbers:
        dtype = _python_dtype(number)
        with graph.inserting_after(number):
            if number is item:
                source = item.args[0]
                made = make("call_method", "detach", (source,), item, source.meta["val"].dtype)
                if source.meta["val"].dim():
                    with graph.inserting_after(made):
                        made = make("call_method", "reshape", (made, ()), item, source.meta["val"].dtype)
                with graph.inserting_after(made):
                    made = make("call_method", "to", (made, dtype), item, dtype)
            elif number.target in (torch.sym_float, float):
                made = make("call_method", "to", (tensors[number.args[0]], torch.float64), number, torch.float64)
            else:
                args = tuple(tensors.get(a, a) for a in number.args)
                for i, arg in enumerate(args):
                    if isinstance(arg, fx.Node) and arg.meta["val"].dtype != dtype:  # torch divides int64 in float32
                        with graph.inserting_before(number):
                            arg = make("call_method", "to", (arg, dtype), number, dtype)
                        args = (*args[:i], arg, *args[i + 1 :])
                if not isinstance(args[0], fx.Node):  # 2 - t: the number first
                    with graph.inserting_after(number):
                        first = make("call_function", torch.full_like, (args[1], args[0]), number, dtype)
                    args = (first, *args[1:])
                    with graph.inserting_after(first):
                        made = make("call_function", _NUMBER_OPS[number.target], args, number, dtype)
                else:
                    made = make("call_function", _NUMBER_OPS[number.target], args, number, dtype)
        tensors[number] = made
    for number in numbers:
        for user, dtype in plan[number].items():
            tensor = tensors[number]
            if dtype is not None:
                with graph.inserting_before(user):
                    tensor = make("call_method", "to", (tensor, dtype), number, dtype)
            user.replace_input_with(number, tensor)
            if user.op == "call_method" and user.args[0] is tensor:
                raise AssertionError(f"{user} is a method of a number")
    for number in reversed(numbers):
        graph.erase_node(number)


def _escapes(trace: Trace, node: fx.Node) -> bool:
    """Whether anything writes into the node's memory or returns it from the graph."""
    memory = storage_of(node)
    for other in trace.graph.nodes:
        if any(storage_of(m) == memory for m in other.meta.get("mutates", ())):
            return True
        if (other.op == "output" or other.meta.get("constructs") or other.meta.get("opaque")) and any(
            storage_of(i) == memory for i in other.all_input_nodes
        ):
            return True
    return False


def _first(node: fx.Node, constant: set[fx.Node]) -> fx.Node:
    while node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _evaluate(node: fx.Node, done: dict[fx.Node, Any]) -> Any:
    if node not in done:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _evaluate(n, done))
        done[node] = (
            getattr(args[0], node.target)(*args[1:], **kwargs)
            if node.op == "call_method"
            else node.target(*args, **kwargs)
        )
    return done[node]
