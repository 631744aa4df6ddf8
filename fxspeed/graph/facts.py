"""What is known of each node's value, found out anew after a rewrite."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher

from fxspeed.graph import runtime
from fxspeed.graph.clone import FakeClone
from fxspeed.graph.regions import Region, bind
from fxspeed.graph.standins import grouped_mm_of_any_dtype
from fxspeed.graph.state import preserved_rng
from fxspeed.graph.trace import Trace


class _Propagate(fx.Interpreter):
    """Runs a graph on fake values and writes each node's result into `meta["val"]`."""

    def __init__(self, graph: fx.Graph, constants: dict[str, Any], root: nn.Module):
        super().__init__(bind(graph, constants, root, "plain"), graph=graph)
        self.constants, self.root = constants, root

    def run_node(self, n: fx.Node) -> Any:
        if n.meta.get("opaque") or n.target in runtime.EXPECTATIONS:
            return n.meta["val"]  # known from a real run
        value = super().run_node(n)
        if n.op not in ("output", "placeholder"):
            n.meta["val"] = value
        return value

    def call_module(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        region = self.constants.get(target)
        if isinstance(region, Region):
            return _Propagate(region.graph, region.constants, self.root).run(*args)
        return super().call_module(target, args, kwargs)


def refresh(trace: Trace, root: nn.Module) -> None:
    """Compute `meta["val"]` of every node of `trace` again; dtypes may have changed, values of inputs have not."""
    mode = trace.fake_mode
    assert mode is not None
    inputs = [n.meta["val"] for n in trace.graph.nodes if n.op == "placeholder"]
    with (
        preserved_rng(),
        mode,
        enable_python_dispatcher(),
        torch.enable_grad(),
        runtime.unwinding(),
        grouped_mm_of_any_dtype(),
    ):
        clone = FakeClone(root, mode).module
        clone.train(trace.training)
        for path, flag in trace.flags.items():
            clone.get_submodule(path).training = flag
        _Propagate(trace.graph, trace.constants, clone).run(
            *(i.detach() if isinstance(i, torch.Tensor) else i for i in inputs)
        )
