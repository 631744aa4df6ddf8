"""Checking rewritten graphs against the graphs before them.

Both run on the example inputs under one seed, on copies of the module, in float64: outputs, gradients of every
parameter and of inputs that take one, buffers, inputs written in place; in train and in eval mode. Compiled regions run
as the operations they are made of in that comparison and are held, each once, against the same in their own dtype. Low
precision is judged against float64: its error may be at most `FACTOR` times that of plain autocast.

Cost of `verify=True` over all: two forward-and-backward runs in float64, two forwards in eval mode, two forwards of
the captured graphs against eager; with low precision two forwards more. Under four forward-and-backward runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from fxspeed.graph import runtime
from fxspeed.graph.clone import plain_copy, without_hooks
from fxspeed.graph.regions import Region, bind, hint
from fxspeed.graph.state import preserved_rng
from fxspeed.graph.structure import map_tensors, tensors_in
from fxspeed.graph.trace import Trace
from fxspeed.passes.base import Captured

#: The error of the rewritten model in low precision may be this many times that of plain autocast.
FACTOR = 2.0
_RTOL = 1e-7  # graphs may hold float32 constants
_REDUCED = (torch.float32, torch.float16, torch.bfloat16)


@dataclasses.dataclass
class Outcome:
    """What one run gave."""

    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    written: dict[int, torch.Tensor]  # inputs changed in place, by number


def captured_equals_eager(trace: Trace, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> str:
    """Empty if the captured graph gives what the model gives, within float rounding; else what differs."""
    with preserved_rng():
        copied = _Copy(model, double=False)
        eager = copied.run(lambda *a: copied.module(*a[0], **a[1]), (args, kwargs), False)
        graph = bind(trace.graph, trace.constants, copied.module, "plain").forward
        got = copied.run(graph, tuple(t.value for t in trace.spec.tensors), False)
    return _difference(eager, got, rtol=1e-4 if _lowest(eager) else 1e-6)


def same_in_float64(before: Captured, after: Captured, backward: bool = True) -> str:
    """Empty if the graphs of `after` compute what those of `before` do, else the first difference, in words."""
    with preserved_rng():
        copied = _Copy(before.root, double=True)
        for double, rtol in ((True, _RTOL), (False, 1e-3)):
            if not double:  # an operation has no float64
                copied = _Copy(before.root, double=False)
            try:
                return _compare(copied, before, after, backward, rtol)
            except (RuntimeError, NotImplementedError, TypeError) as error:
                if not double or ("type" not in str(error) and "implemented" not in str(error)):
                    raise
    return ""


def _compare(copied: _Copy, before: Captured, after: Captured, backward: bool, rtol: float) -> str:
    wanted: dict[str, Outcome] = {}
    for captured, edits in ((before, before.edits), (after, after.edits[len(before.edits) :])):
        copied.edit(edits)
        for mode, trace in captured.traces.items():
            if len(after.edits) == len(before.edits) and _same_code(before.traces[mode], after.traces[mode]):
                continue
            outcome = copied.graph(trace, backward and mode == "train")
            if captured is before:
                wanted[mode] = outcome
            elif difference := _difference(wanted[mode], outcome, rtol, (before.edits, after.edits)):
                return f"in {mode} mode {difference}"
    return ""


def _same_code(old: Trace, new: Trace) -> bool:
    code = [str(t.graph.python_code("self").src) for t in (old, new)]
    return code[0] == code[1] and old.constants.keys() == new.constants.keys()


def low_precision_error(before: Captured, after: Captured, device: torch.device, dtype: torch.dtype) -> str:
    """Empty if the error in low precision is at most `FACTOR` times plain autocast's, both against float64."""
    mode = "train" if "train" in before.traces else next(iter(before.traces))
    old, new = before.traces[mode], after.traces[mode]
    with preserved_rng():
        precise = _Copy(before.root, double=True)
        precise.edit(before.edits)
        exact = precise.graph(old, False)
        del precise
        copied = _Copy(before.root, double=False)
        copied.edit(before.edits)
        with torch.autocast(device.type, dtype):
            try:
                plain = copied.graph(old, False)
            except RuntimeError:
                plain = None  # autocast refuses the model as it is: the bound below is all there is
        copied.edit(after.edits[len(before.edits) :])
        got = copied.graph(new, False)
    bound = 8 * torch.finfo(dtype).eps
    for i, (reference, mine) in enumerate(zip(exact.outputs, got.outputs, strict=True)):
        if not reference.is_floating_point() or not reference.numel():
            continue
        scale = reference.abs().max().clamp_min(1e-12)
        mine_error = float((mine.double() - reference).abs().max() / scale)
        theirs = float((plain.outputs[i].double() - reference).abs().max() / scale) if plain else bound
        if not mine_error <= max(FACTOR * theirs, bound):
            return f"output {i} is off by {mine_error:.1e} in {dtype}, plain autocast by {theirs:.1e}"
    return ""


def region_matches(region: Region, root: nn.Module) -> str:
    """Empty if a compiled region gives, on random inputs, what its operations give one by one; else what differs."""
    sample = []
    generator = torch.Generator().manual_seed(0)
    for node in region.graph.nodes:
        if node.op == "placeholder":
            value = node.meta["val"]
            if not isinstance(value, torch.Tensor):
                return ""
            shape = [hint(s) for s in value.shape]
            if value.is_floating_point():
                made = torch.randn(shape, generator=generator).to(value.device, value.dtype)
            else:
                made = torch.ones(shape, dtype=value.dtype, device=value.device)
            sample.append(made.requires_grad_(value.requires_grad))
    plain = bind(region.graph, region.constants, root, "plain").forward
    results = []
    try:
        for run in (plain, region.bind(root, plain)):
            with preserved_rng():
                torch.manual_seed(0)
                inputs = [t.detach().requires_grad_(t.requires_grad) for t in sample]
                outputs = tensors_in(run(*inputs))
                loss = [(t.float() * _weights(t)).sum() for t in outputs if t.requires_grad]
                if loss:
                    torch.stack(loss).sum().backward()
                results.append([*outputs, *(i.grad for i in inputs if i.grad is not None)])
    except Exception as error:
        return f"it does not compile ({type(error).__name__}: {str(error).strip().splitlines()[0][:120]})"
    for want, got in zip(*results, strict=True):
        rtol = 4 * torch.finfo(want.dtype).eps ** 0.75 if want.is_floating_point() else 0
        try:
            torch.testing.assert_close(got, want, rtol=rtol, atol=rtol, equal_nan=True)
        except AssertionError as error:
            return f"compiled and plain results differ ({str(error).splitlines()[0]})"
    return ""


# ---------------------------------------------------------------------- runs
class _Copy:
    """A private copy of a module that graphs run on one after the other, each from the same buffers."""

    def __init__(self, root: nn.Module, double: bool):
        self.module, self.double = without_hooks(plain_copy(root, {})), double
        if double:
            self.module = self.module.double()
        self._remember()

    def _remember(self) -> None:
        self.buffers = {name: b.detach().clone() for name, b in self.module.named_buffers()}

    def edit(self, edits: list[Any]) -> None:
        """Change the module's own parameters and buffers."""
        for edit in edits:
            edit.apply(self.module)
        self._remember()

    def graph(self, trace: Trace, backward: bool) -> Outcome:
        """One run of a graph, in float64 if the copy is."""
        leaves = tuple(t.value for t in trace.spec.tensors)
        how = "simulate" if backward else "plain"  # what is recomputed in backward is recomputed here too
        if self.double:
            bound = bind(_raised(trace.graph), _raised_constants(trace.constants), self.module, how)
            leaves = tuple(map(_double, leaves))
        else:
            bound = bind(trace.graph, trace.constants, self.module, how)
        with runtime.unwinding():
            return self.run(bound.forward, leaves, backward)

    def run(self, call: Callable, inputs: tuple, backward: bool) -> Outcome:
        """Outputs, gradients and buffers after one call; the copy is as before then."""
        try:
            return _run(self.module, call, inputs, backward)
        finally:
            for name, buffer in self.module.named_buffers():
                if name in self.buffers:
                    buffer.copy_(self.buffers[name])
            for parameter in self.module.parameters():
                parameter.grad = None


def _run(module: nn.Module, call: Callable, inputs: tuple, backward: bool) -> Outcome:
    torch.manual_seed(0)
    with torch.set_grad_enabled(backward), torch.random.fork_rng(devices=[]):
        inputs = _detached(inputs)
        given = tensors_in(inputs)
        versions = [t._version for t in given]
        outputs = tensors_in(call(*inputs))
        terms = [(t * _weights(t)).sum() for t in outputs if t.requires_grad]
        if backward and terms:
            total = terms[0]
            for term in terms[1:]:
                total = total + term.to(total)
            total.backward()
    gradients = {n: p.grad for n, p in module.named_parameters()} if backward else {}
    gradients |= {f"input {i}": t.grad for i, t in enumerate(given) if backward and t.is_leaf and t.requires_grad}
    buffers = {n: b.detach().clone() for n, b in module.named_buffers()}
    written = {i: t.detach() for i, (t, v) in enumerate(zip(given, versions, strict=True)) if t._version != v}
    return Outcome([t.detach() for t in outputs], gradients, buffers, written)


def _weights(tensor: torch.Tensor) -> torch.Tensor:
    """Fixed numbers of both signs, so that errors do not cancel in the loss."""
    count = torch.arange(tensor.numel(), device=tensor.device, dtype=torch.float64)
    return torch.cos(count * 0.7 + 0.3).to(tensor.dtype).view(tensor.shape)


def _difference(want: Outcome, got: Outcome, rtol: float, edits: tuple[list, list] = ([], [])) -> str:
    if len(want.outputs) != len(got.outputs):
        return f"there are {len(got.outputs)} outputs instead of {len(want.outputs)}"
    wanted, buffers = dict(want.buffers), dict(got.buffers)
    for values, done in ((wanted, edits[0]), (buffers, edits[1])):
        for edit in done:
            edit.restore(values)
    pairs = [(f"output {i}", w, g) for i, (w, g) in enumerate(zip(want.outputs, got.outputs, strict=True))]
    pairs += [
        (f"the gradient of {n}", w, got.gradients.get(n)) for n, w in want.gradients.items() if n in got.gradients
    ]
    pairs += [(f"buffer {n}", w, buffers.get(n)) for n, w in wanted.items()]
    pairs += [(f"input {i}", want.written.get(i), got.written.get(i)) for i in want.written.keys() | got.written.keys()]
    for name, w, g in pairs:
        if w is None or g is None:
            other = w if w is not None else g
            if other is not None and float(other.abs().max()) > rtol:
                return f"{name} is missing on one side"
            continue
        if w.shape != g.shape or w.dtype != g.dtype:
            return f"{name} is {tuple(g.shape)} {g.dtype} instead of {tuple(w.shape)} {w.dtype}"
        if not w.is_floating_point():
            if not torch.equal(w, g):
                return f"{name} differs"
            continue
        if not w.numel():
            continue
        off, scale = float((w - g).abs().max()), float(w.abs().max())
        if not off <= rtol * max(scale, 1e-3):  # also where there are infinities and NaNs, which must agree
            if torch.allclose(w, g, rtol=rtol, atol=rtol * 1e-3, equal_nan=True):
                continue
            off = torch.nan_to_num(w - g).abs().max().item()
            return f"{name} is off by {off:.2e} (largest value {scale:.2e})"
    return ""


def _lowest(outcome: Outcome) -> bool:
    return any(t.dtype in (torch.float16, torch.bfloat16) for t in outcome.outputs)


# ---------------------------------------------------------------------- float64
def _raised(graph: fx.Graph) -> fx.Graph:
    """The graph with float64 wherever it names a smaller float dtype."""
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    raise_dtype = lambda a: torch.float64 if isinstance(a, torch.dtype) and a in _REDUCED else a
    for node in copied.nodes:
        node.args = map_aggregate(node.args, raise_dtype)
        node.kwargs = map_aggregate(node.kwargs, raise_dtype)
        if node.op == "call_method" and node.target in ("float", "half", "bfloat16"):
            node.target = "double"
        if node.target is runtime.enter_autocast:
            node.args = (node.args[0], None, False, *node.args[3:])
    return copied


def _raised_constants(constants: dict[str, Any]) -> dict[str, Any]:
    return {
        name: dataclasses.replace(value, graph=_raised(value.graph), constants=_raised_constants(value.constants))
        if isinstance(value, Region)
        else (_double(value) if isinstance(value, torch.Tensor) else value)
        for name, value in constants.items()
    }


def _double(value: torch.Tensor) -> torch.Tensor:
    return value.detach().double().requires_grad_(value.requires_grad) if value.is_floating_point() else value


def _detached(tree: Any) -> Any:
    def leaf(t: torch.Tensor) -> torch.Tensor:
        return t.detach().clone().requires_grad_(t.requires_grad)

    return map_tensors(tree, leaf, torch.Tensor)
