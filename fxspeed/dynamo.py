"""`torch.compile(model, backend="fxspeed")`: the graph passes on the graphs that Dynamo finds.

Dynamo hands over one graph for each stretch between graph breaks. Parameters and buffers are inputs of such a graph,
and so are sizes where shapes are dynamic; passes that edit parameters therefore have nothing to do here, the others run
as they do in `optimize`. A graph that cannot be captured, or a call that the captured graph is not right for, runs
Dynamo's graph as it is.

Registered under the entry point group `torch_dynamo_backends`. Source: PyTorch docs, "Custom Backends".
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from fxspeed.errors import Error, Untraceable
from fxspeed.example import real_inputs
from fxspeed.graph import runtime
from fxspeed.graph.regions import bind, hint
from fxspeed.graph.state import preserved_rng
from fxspeed.passes import DEFAULT, resolve
from fxspeed.passes.checkpoint import as_budget
from fxspeed.pipeline import Pipeline

_OPTIONS = {"passes": None, "memory_budget": None, "precision": "fp32", "verify": True}
_log = logging.getLogger("fxspeed.dynamo")


class _Sized(nn.Module):
    """Dynamo's graph with each of its numbers given as a size of an empty tensor, as capture wants it."""

    def __init__(self, graph: fx.GraphModule, numbers: frozenset[int]):
        super().__init__()
        self.lifted, self.numbers = graph, numbers

    def forward(self, *inputs):
        return self.lifted(*(t.shape[0] if i in self.numbers else t for i, t in enumerate(inputs)))


def backend(
    graph: fx.GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None, mode: str | None = None
) -> Callable:
    """Rewrite one of Dynamo's graphs; what `torch.compile(model, backend="fxspeed", options=...)` calls.

    Args:
        graph, inputs: as Dynamo gives them: real tensors, and symbolic sizes.
        options: `passes`, `memory_budget`, `precision`, `verify`, with the meaning they have in `optimize`; precision
            is "fp32" unless asked for.
        mode: not used; taken because torch.compile passes it on.

    Raises:
        Error: an unknown option.
    """
    chosen = dict(_OPTIONS)
    for name, value in (options or {}).items():
        if name not in chosen:
            near = difflib.get_close_matches(name, chosen, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(chosen)}"
            raise Error(f"the fxspeed backend has no option {name!r}; {hint}")
        chosen[name] = value
    try:
        return _rewritten(graph, list(inputs), chosen)
    except Untraceable as reason:
        _log.info("a graph is left as it is: %s", reason)
        return graph.forward


def _rewritten(graph: fx.GraphModule, inputs: list[Any], chosen: dict[str, Any]) -> Callable:
    numbers = frozenset(i for i, value in enumerate(inputs) if isinstance(value, (int, torch.SymInt)))
    module = _Sized(graph, numbers)
    module.train(torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in inputs))
    mode = "train" if module.training else "eval"
    passes = tuple(p for p in resolve(chosen["passes"] or DEFAULT) if not p.edits_module)
    device = next((t.device for t in inputs if isinstance(t, torch.Tensor)), torch.device("cpu"))
    asked = {"memory_budget": as_budget(chosen["memory_budget"]), "precision": chosen["precision"], "device": device}
    with preserved_rng(), torch._guards.tracing(None):
        example = [_empty(hint(v)) if i in numbers else v for i, v in enumerate(inputs)]
        args, _ = real_inputs(tuple(example), None, module, device)
        pipeline = Pipeline(passes, asked, tuple(_dynamic(graph)), chosen["verify"])
        captured = pipeline.capture(module, args, {}, [mode])
        captured, records, _ = pipeline.rewrite(captured, passes)
    for record in records:
        _log.info("%s", record)
    trace = captured.traces[mode]
    bound = bind(trace.graph, trace.constants, module)
    run, guard, ambient = bound.forward, trace.guard, trace.ambient

    def call(*values: Any) -> Any:
        given = tuple(_empty(v) if i in numbers else v for i, v in enumerate(values)) if numbers else values
        if runtime.ambient() != ambient or (found := guard(given, {})) is None:
            return graph(*values)
        with runtime.unwinding():
            return run(*found)

    return call


def _dynamic(graph: fx.GraphModule) -> list[tuple[int, int]]:
    """The dimensions that Dynamo holds to be dynamic: (number of the input, dimension)."""
    found = []
    for i, node in enumerate(n for n in graph.graph.nodes if n.op == "placeholder"):
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt):
            found.append((i, 0))
        elif isinstance(value, torch.Tensor):
            found += [(i, d) for d, size in enumerate(value.shape) if isinstance(size, torch.SymInt)]
    return found


def _empty(size: int) -> torch.Tensor:
    return torch.empty(size, 0)
