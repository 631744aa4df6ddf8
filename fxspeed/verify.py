"""Checking rewritten graphs against the graphs before them.

Both run on the example inputs under one seed, on copies of the module, in float64: outputs, gradients of every
parameter, buffers; in train and in eval mode. Compiled regions run as the operations they are made of in that
comparison and are held, each once, against the same in their own dtype. Low precision is judged against float64: its
error may be at most `FACTOR` times that of plain autocast.

Cost of `verify=True` over all: two forward-and-backward runs in float64, two forwards in eval mode, two forwards of
the captured graphs against eager; with low precision two forwards more. Under four forward-and-backward runs.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from fxspeed.graph.clone import without_hooks
from fxspeed.graph.regions import Region, bind
from fxspeed.graph.structure import tensors_in
from fxspeed.graph.trace import Trace, preserved_rng
from fxspeed.passes.base import Captured

#: The error of the rewritten model in low precision may be this many times that of plain autocast.
FACTOR = 2.0
_RTOL = 1e-8
_REDUCED = (torch.float32, torch.float16, torch.bfloat16)


@dataclasses.dataclass
class Outcome:
    """What one run gave."""

    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]


def captured_equals_eager(trace: Trace, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> str:
    """Empty if the captured graph gives what the model gives, within float rounding; else what differs."""
    with preserved_rng():
        eager = _run(without_hooks(copy.deepcopy(model)), lambda m, a, k: m(*a, **k), (args, kwargs), backward=False)
        graph = without_hooks(copy.deepcopy(model))
        bound = bind(trace.graph, trace.constants, graph, "plain")
        leaves = [t.value for t in trace.spec.tensors]
        got = _run(graph, lambda m, a, k: bound.forward(*a), (tuple(leaves), {}), backward=False)
    return _difference(eager, got, rtol=1e-4 if _lowest(eager) else 1e-6)


def same_in_float64(before: Captured, after: Captured, backward: bool = True) -> str:
    """Empty if the graphs of `after` compute what those of `before` do, else the first difference, in words."""
    for mode, old in before.traces.items():
        new = after.traces[mode]
        train = mode == "train"
        with preserved_rng():
            want = _in_float64(old, before, train and backward)
            got = _in_float64(new, after, train and backward)
        if want is None or got is None:  # an operation without float64
            want = _plainly(old, before, train and backward)
            got = _plainly(new, after, train and backward)
            difference = _difference(want, got, rtol=1e-3, edits=(before.edits, after.edits))
        else:
            difference = _difference(want, got, rtol=_RTOL, edits=(before.edits, after.edits))
        if difference:
            return f"in {mode} mode {difference}"
    return ""


def low_precision_error(before: Captured, after: Captured, device: torch.device, dtype: torch.dtype) -> str:
    """Empty if the error in low precision is at most `FACTOR` times plain autocast's, both against float64."""
    mode = "train" if "train" in before.traces else next(iter(before.traces))
    with preserved_rng():
        exact = _in_float64(before.traces[mode], before, backward=False) or _plainly(before.traces[mode], before, False)
        with torch.autocast(device.type, dtype):
            try:
                plain = _plainly(before.traces[mode], before, False)
            except RuntimeError:
                plain = None  # autocast refuses the model as it is: nothing to compare with but the bound below
        got = _plainly(after.traces[mode], after, False)
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
            shape = [int(s.node.hint) if isinstance(s, torch.SymInt) else s for s in value.shape]
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
def _in_float64(trace: Trace, captured: Captured, backward: bool) -> Outcome | None:
    module = without_hooks(copy.deepcopy(captured.root))
    for edit in captured.edits:
        edit.apply(module)
    module = module.double()
    constants = _raised_constants(trace.constants)
    bound = bind(_raised(trace.graph), constants, module, "plain")
    leaves = tuple(_double(t.value) for t in trace.spec.tensors)
    try:
        return _run(module, lambda m, a, k: bound.forward(*a), (leaves, {}), backward)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        if "not implemented" in str(error) or "dtype" in str(error).lower() or "type" in str(error).lower():
            return None
        raise


def _plainly(trace: Trace, captured: Captured, backward: bool) -> Outcome:
    module = without_hooks(copy.deepcopy(captured.root))
    for edit in captured.edits:
        edit.apply(module)
    bound = bind(trace.graph, trace.constants, module, "plain")
    leaves = tuple(t.value for t in trace.spec.tensors)
    return _run(module, lambda m, a, k: bound.forward(*a), (leaves, {}), backward)


def _run(module: nn.Module, call: Callable, inputs: tuple, backward: bool) -> Outcome:
    torch.manual_seed(0)
    args, kwargs = copy.deepcopy(_detached(inputs))
    with torch.set_grad_enabled(backward), torch.random.fork_rng(devices=[]):
        output = call(module, args, kwargs)
        outputs = tensors_in(output)
        terms = [(t * _weights(t)).sum() for t in outputs if t.requires_grad]
        if backward and terms:
            total = terms[0]
            for term in terms[1:]:
                total = total + term.to(total)
            total.backward()
    gradients = {n: p.grad for n, p in module.named_parameters()} if backward else {}
    return Outcome([t.detach() for t in outputs], gradients, {n: b.detach() for n, b in module.named_buffers()})


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
    scales = [float(w.abs().max()) for _, w, _ in pairs if w is not None and w.is_floating_point() and w.numel()]
    largest = max([s for s in scales if s == s and s != float("inf")], default=1.0)
    for name, w, g in pairs:
        if w is None or g is None:
            other = w if w is not None else g
            if other is not None and float(other.abs().max()) > rtol * max(largest, 1.0):
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
        scale = torch.nan_to_num(w, 0.0, 0.0, 0.0).abs().max().clamp_min(1e-6 * min(largest, 1.0)).item()
        if not torch.allclose(w, g, rtol=rtol, atol=rtol * max(scale, 1e-3), equal_nan=True):
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
        if node.target is fx_enter_autocast():
            node.args = (node.args[0], None, False, *node.args[3:])
    return copied


def fx_enter_autocast() -> Callable:
    from fxspeed.graph.runtime import enter_autocast

    return enter_autocast


def _raised_constants(constants: dict[str, Any]) -> dict[str, Any]:
    return {
        name: dataclasses.replace(value, graph=_raised(value.graph), constants=_raised_constants(value.constants))
        if isinstance(value, Region)
        else (_double(value) if isinstance(value, torch.Tensor) else value)
        for name, value in constants.items()
    }


def _double(value: torch.Tensor) -> torch.Tensor:
    return value.detach().double() if value.is_floating_point() else value


def _detached(tree: Any) -> Any:
    from fxspeed.graph.structure import map_tensors

    def leaf(t: torch.Tensor) -> torch.Tensor:
        return t.detach().clone().requires_grad_(t.requires_grad)

    return map_tensors(tree, leaf, torch.Tensor)
