"""Operations whose results outlive a recomputed region, so that recomputation does not run them again.

Inside a region of `checkpoint`, a kept operation is written as one of the functions below. In the forward it computes
and its result is put aside; when backward runs the region again, the result is taken from there and only what the
operation's backward needs is handed to autograd. Anywhere else the functions compute as usual.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.utils import parametrize

from fxspeed.graph.ops import module_of, name_of


class Results:
    """The results put aside by one forward of a region, in order."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor | None] = []
        self.replay = False
        self.next = 0


class _Current(threading.local):
    results: Results | None = None


_current = _Current()


@contextlib.contextmanager
def keeping(results: Results) -> Iterator[None]:
    """Operations inside put their results into `results`; the second time around they take them from there."""
    before, _current.results = _current.results, results
    results.next = 0
    try:
        yield
    finally:
        _current.results = before
        results.replay = True


def kept_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int,
) -> torch.Tensor:  # fmt: skip
    """`torch.convolution`, kept."""
    options = (stride, padding, dilation, transposed, output_padding, groups)
    return _kept(_Convolution, lambda *t: torch.convolution(*t, *options), (x, weight, bias), options)


def kept_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear`, kept."""
    return _kept(_Linear, F.linear, (x, weight, bias), ())


def kept_addmm(bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`torch.addmm` with a vector in front, as transformers writes linear layers, kept."""
    return _kept(_Linear, F.linear, (x, weight.t(), bias), ())


def _kept(function: Any, compute: Callable, tensors: tuple, options: tuple) -> torch.Tensor:
    results = _current.results
    kind = tensors[0].device.type
    if torch.is_autocast_enabled(kind):  # as autocast would, but where autograd sees the cast
        low = torch.get_autocast_dtype(kind)
        tensors = tuple(t.to(low) if t is not None and t.dtype is torch.float32 else t for t in tensors)
    if results is None:
        with torch.autocast(kind, enabled=False):
            return compute(*tensors)
    known = None
    if results.replay and results.next < len(results.values):
        known, results.values[results.next] = results.values[results.next], None
    results.next += 1
    with torch.autocast(kind, enabled=False):
        out = function.apply(compute, known, options, *tensors)
    if not results.replay:
        results.values.append(out.detach())
    return out


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Callable, known: torch.Tensor | None, options: tuple, x, weight, bias) -> Any:
        ctx.options, ctx.bias = options, None if bias is None else list(bias.shape)
        ctx.save_for_backward(x, weight)
        return compute(x, weight, bias) if known is None else known

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        mask = [bool(n) for n in ctx.needs_input_grad[3:]]
        return None, None, None, *torch.ops.aten.convolution_backward(grad, x, weight, ctx.bias, *ctx.options, mask)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Callable, known: torch.Tensor | None, options: tuple, x, weight, bias) -> Any:
        ctx.save_for_backward(x, weight)
        return compute(x, weight, bias) if known is None else known

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        need_x, need_weight, need_bias = ctx.needs_input_grad[3:]
        return (
            None, None, None,
            grad.matmul(weight) if need_x else None,
            flat.t().mm(x.reshape(-1, x.shape[-1])) if need_weight else None,
            flat.sum(0) if need_bias else None,
        )  # fmt: skip


def can_keep(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node is an operation that `keep` knows."""
    if node.meta.get("opaque") or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    module = module_of(node, root)
    if module is not None:
        plain = not parametrize.is_parametrized(module) and len(node.args) == 1 and not node.kwargs
        if isinstance(module, nn.modules.conv._ConvNd):
            batched = node.meta["val"].dim() == len(module.kernel_size) + 2
            return plain and batched and module.padding_mode == "zeros" and not isinstance(module.padding, str)
        return plain and type(module) is nn.Linear
    name = name_of(node)
    if name == "linear":
        return not node.kwargs and all(a is None or isinstance(a, fx.Node) for a in node.args)
    if name == "addmm" and not node.kwargs and len(node.args) == 3:
        return node.args[0].meta["val"].dim() == 1
    return False


def keep(graph: fx.Graph, node: fx.Node, root: nn.Module) -> None:
    """Write `node`, which `can_keep` accepts, as the function that keeps its result."""
    module = module_of(node, root)
    if module is None:
        node.target = kept_addmm if name_of(node) == "addmm" else kept_linear
        node.op = "call_function"
        return
    path = str(node.target)
    with graph.inserting_before(node):
        weight = graph.create_node("get_attr", f"{path}.weight")
        bias = graph.create_node("get_attr", f"{path}.bias") if module.bias is not None else None
    for attribute, value in ((weight, module.weight), (bias, module.bias)):
        if attribute is not None:
            attribute.meta.update(val=value, source="", path=path)
    node.op = "call_function"
    if isinstance(module, nn.Linear):
        node.target, node.args = kept_linear, (node.args[0], weight, bias)
    else:
        options = (
            module.stride,
            module.padding,
            module.dilation,
            module.transposed,
            module.output_padding,
            module.groups,
        )
        node.target, node.args = kept_convolution, (node.args[0], weight, bias, *options)
