"""The memory of a training step: how many bytes are alive at each moment of a forward and a backward.

The step is not modelled but run, on fake tensors: autograd, views, in-place writes and recomputation do what they
do in a real step, only nothing is computed and nothing allocated. A dispatch mode watches every storage be made and
released. What convolutions take and give back inside themselves is added (`fxspeed.cost.workspace`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fxspeed.cost.workspace import convolution_workspace, product_workspace
from fxspeed.graph.clone import FakeClone
from fxspeed.graph.regions import bind, bytes_of
from fxspeed.graph.state import preserved_rng
from fxspeed.graph.structure import tensors_in
from fxspeed.graph.trace import Trace


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Bytes alive above the level at the start, after each allocation and release of a step.

    Attributes:
        live: bytes, in order of events.
        peak: the largest of them.
        held: bytes alive between forward and backward.
        flops: matrix products and convolutions of the whole step, forward, recomputation and backward.
    """

    live: tuple[int, ...]
    peak: int
    held: int
    flops: int


_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.live, self.events, self.flops = 0, [0], 0
        self.known: dict[int, int] = {}

    def known_before(self, tensors: Any) -> None:
        for tensor in tensors:
            self.known[tensor.untyped_storage()._cdata] = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func.overloadpacket)) is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=output)
        for value in tree_leaves(output):
            if isinstance(value, torch.Tensor):
                self.see(value)
        if func in _CONVOLUTIONS:
            backward = func is _CONVOLUTIONS[1]
            source, weight, out = (args[1], args[2], args[0]) if backward else (args[0], args[1], output)
            sizes = (bytes_of(source), bytes_of(weight), bytes_of(out))
            taken = convolution_workspace(source, weight, out, sizes, backward)
            self.events += [self.live + taken, self.live]
        elif func in _PRODUCTS:
            taken = product_workspace(args)
            self.events += [self.live + taken, self.live] if taken else []
        return output

    def see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known:
            return
        size = int(storage.nbytes())
        self.known[key] = size
        self._change(size)
        weakref.finalize(storage, self._released, key).atexit = False

    def _released(self, key: int) -> None:
        self._change(-self.known.pop(key, 0))

    def _change(self, size: int) -> None:
        if size:
            self.live += size
            self.events.append(self.live)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage in cycles stays for the time being."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def step_timeline(
    trace: Trace, root: nn.Module, plain: bool = False, inputs: Sequence[torch.Tensor] | None = None
) -> Timeline:
    """The memory of one forward and backward of a captured graph, gradients of parameters allocated before.

    Args:
        trace: a training graph.
        root: the module it runs on. Not touched.
        plain: run regions as the plain nodes they hold.
        inputs: tensors in the order of the graph's inputs; default those of the call it was captured from.
    """
    with preserved_rng(), contextlib.ExitStack() as stack:
        stack.enter_context(_no_collection())  # the same in every run, and never too little
        mode = FakeTensorMode(shape_env=ShapeEnv(allow_scalar_outputs=True), allow_non_fake_inputs=True)
        clone = FakeClone(root, mode).module
        real = inputs if inputs is not None else [t.value for t in trace.spec.tensors]
        fakes = [mode.from_tensor(t.detach(), static_shapes=True) for t in real]
        for fake, tensor in zip(fakes, real, strict=True):
            fake.requires_grad_(tensor.requires_grad)
        module = bind(trace.graph, trace.constants, clone, "plain" if plain else "simulate")
        stack.enter_context(mode)
        for parameter in clone.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        watch = _Watch()
        gradients = [p.grad for p in clone.parameters() if p.grad is not None]
        watch.known_before([*clone.parameters(), *clone.buffers(), *fakes, *gradients])
        stack.enter_context(watch)
        stack.enter_context(torch.enable_grad())
        output = module.forward(*fakes)
        loss = [t.sum() for t in tensors_in(output) if t.requires_grad]
        held = watch.live
        if loss:
            total = loss[0]
            for term in loss[1:]:
                total = total + term
            del loss, output
            total.backward()
        return Timeline(tuple(watch.events), max(watch.events), held, watch.flops)


def resident_bytes(root: nn.Module) -> int:
    """Parameters, their gradients and buffers: what a step holds beside its own tensors."""
    parameters = {id(p): p for p in root.parameters()}.values()
    return sum(bytes_of(p) * (2 if p.requires_grad else 1) for p in parameters) + sum(map(bytes_of, root.buffers()))


def largest(trace: Trace, count: int = 10) -> list[tuple[int, str, str]]:
    """The `count` largest tensors that autograd keeps: (bytes, "module path: node", "file:line")."""
    found: dict[int, tuple[int, str, str]] = {}
    owner = {id(t): n for n in trace.graph.nodes for t in [n.meta.get("val")] if isinstance(t, torch.Tensor)}
    storages = {t.untyped_storage()._cdata: n for t, n in ((n.meta["val"], n) for n in owner.values())}
    for node in trace.graph.nodes:
        for tensor in node.meta.get("saved", ()):
            key = tensor.untyped_storage()._cdata
            at = storages.get(key, node)
            if at.op not in ("get_attr", "placeholder"):
                label = f"{at.meta.get('path') or 'the model'}: {at.name}"
                found[key] = (bytes_of(tensor), label, at.meta.get("source", ""))
    return sorted(found.values(), reverse=True)[:count]
