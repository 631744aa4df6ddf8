"""One model of a zoo: optimized, and compared with itself."""

from __future__ import annotations

import copy
import dataclasses
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import torch
from torch import nn

import fxspeed
from fxspeed.graph.structure import map_tensors, tensors_in
from fxspeed.module import OptimizedMixin

Inputs = tuple[tuple, dict[str, Any]]
#: How a model is made, and example inputs for it.
Example = tuple[Callable[[], nn.Module], Callable[[nn.Module], Inputs]]

#: Largest relative difference that float32 kernels of other shapes may leave.
TOLERANCE = 2e-3


class Unfit(Exception):
    """A model that this machine cannot run or that its own library cannot build."""


@dataclasses.dataclass
class Row:
    """What came of one model."""

    name: str
    status: str  # "whole", "part", "eager", "wrong", "error" or "skipped"
    why: str = ""
    nodes: int = 0
    seconds: float = 0.0
    forwards: float = 0.0
    difference: float = 0.0

    def __str__(self) -> str:
        figures = f"{self.nodes:6} nodes {self.seconds:6.1f} s {self.forwards:6.1f} forwards {self.difference:8.1e}"
        return f"{self.status:8}{self.name:52}{figures} {self.why}"


PASSES = ("drop_bias", "remove_syncs")


def check(name: str, example: Example, sizes: bool = False, passes: Sequence[str] = PASSES) -> Row:
    """Optimize one model and compare it with itself.

    Compared are outputs, gradients and buffers in train mode, and outputs in eval mode with another batch size (with
    `sizes` another height and width too, where the model takes them; they are captured as dynamic then).
    """
    make, inputs = example
    torch.manual_seed(0)
    try:
        model = make().train()
        args, kwargs = inputs(model)
        begin = time.perf_counter()
        wanted = _train(copy.deepcopy(model), args, kwargs)
        forward = (time.perf_counter() - begin) / 3
    except Unfit as error:
        return Row(name, "skipped", str(error))
    except Exception as error:
        return Row(name, "skipped", f"does not run in eager: {type(error).__name__}: {str(error)[:80]}")
    begin = time.perf_counter()
    dynamic = ("batch", "height", "width") if sizes else ("batch",)
    result = fxspeed.optimize(model, args, kwargs, passes=passes, verify=False, precision="fp32", dynamic=dynamic)
    seconds = time.perf_counter() - begin
    worst, where = 0.0, ""
    found = _train(result.module, args, kwargs)
    found.buffers = {n: t for n, t in result.original_state_dict().items() if n in wanted.buffers}
    for label, got in [
        *_differences(wanted, found),
        ("eval output of another size", _eval(model, result.module, args, kwargs, sizes)),
    ]:
        if not got <= worst:
            worst, where = got, label
    programs = [m._fxspeed for m in result.module.modules() if isinstance(m, OptimizedMixin)]
    graphs = [e.trace.graph for p in programs for e in p.entries]
    nodes = max((len(g.nodes) for g in graphs), default=0)
    leaves = [s for s in result.skipped if s.pass_name == "capture" and "dynamic" not in s.what]
    status, why = "whole", ""
    if leaves:
        status = "part" if graphs else "eager"
        why = f"{leaves[0].target}: {leaves[0].why} [{leaves[0].source}]"
    if not worst <= TOLERANCE:
        status, why = "wrong", f"{where} off by {worst:.1e}"
    return Row(name, status, why, nodes, seconds, seconds / max(forward, 1e-9), worst)


@dataclasses.dataclass
class _Run:
    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]


def _train(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> _Run:
    """A forward and backward; the module is left without gradients."""
    outputs = _run(module, args, kwargs)
    terms = [
        (t * torch.cos(torch.arange(t.numel(), dtype=t.dtype)).view_as(t)).mean() for t in outputs if t.requires_grad
    ]
    if terms:
        torch.stack([t.float() for t in terms]).sum().backward()
    gradients = {n: p.grad for n, p in module.named_parameters()}
    for p in module.parameters():
        p.grad = None
    return _Run(outputs, gradients, {n: b.clone() for n, b in module.named_buffers()})


def _differences(want: _Run, got: _Run) -> Iterator[tuple[str, float]]:
    yield "train output", _off(want.outputs, got.outputs)
    pairs = [(want.gradients[n], g) for n, g in got.gradients.items()]
    if any((w is None) != (g is None) for w, g in pairs):
        yield "presence of a gradient", float("inf")
        return
    present = [(w, g) for w, g in pairs if w is not None and g is not None and w.numel()]
    scale = max((float(w.abs().max()) for w, _ in present), default=0.0) + 1e-12
    yield "gradient", max((float((w - g).abs().max()) for w, g in present), default=0.0) / scale
    yield "buffer", _off([want.buffers[n] for n in got.buffers], list(got.buffers.values()), 1e-3)  # means may be zero


def _eval(model: nn.Module, module: nn.Module, args: tuple, kwargs: dict[str, Any], sizes: bool) -> float:
    module.load_state_dict(model.state_dict())
    model.eval(), module.eval()
    for grow in (_grown, _longer) if sizes else (_longer,):
        other, others = map_tensors((args, kwargs), grow, torch.Tensor)
        with torch.no_grad():
            try:
                want = _run(model, other, others)
            except Exception:  # the model itself takes no such size
                continue
            return _off(want, _run(module, other, others))
    with torch.no_grad():
        try:
            want = _run(model, args, kwargs)
        except Exception as error:
            raise Unfit(f"does not run in eval mode: {type(error).__name__}: {str(error)[:80]}") from error
        return _off(want, _run(module, args, kwargs))


def _longer(t: torch.Tensor) -> torch.Tensor:
    """One more in the batch."""
    return torch.cat([t, t[:1]]) if t.dim() else t


def _grown(t: torch.Tensor) -> torch.Tensor:
    """One more in the batch, and images half as large again."""
    t = _longer(t)
    return torch.nn.functional.interpolate(t, scale_factor=1.5) if t.dim() == 4 and t.is_floating_point() else t


def _run(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    return tensors_in(model(*args, **kwargs))


def _off(want: Any, got: Any, least: float = 1e-9) -> float:
    """Largest difference over the largest value, which counts as `least` where it is smaller."""
    if [(t.shape, t.dtype) for t in want] != [(t.shape, t.dtype) for t in got]:
        return float("inf")
    worst = 0.0
    for w, g in zip(want, got, strict=True):
        if not w.numel():
            continue
        w, g = w.detach().double(), g.detach().double()
        if not torch.equal(w.isnan(), g.isnan()):
            return float("inf")
        w, g = w.nan_to_num(), g.nan_to_num()
        worst = max(worst, float((w - g).abs().max() / max(float(w.abs().max()), least)))
    return worst
