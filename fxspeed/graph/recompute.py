"""What regions of `checkpoint` run on. Needs torch alone: saved packages hold this file as it is.

Operations whose results outlive a recomputed region, so that recomputation does not run them again, are written as one
of the `kept_` functions. In the forward they compute and their result is put aside; when backward runs the region
again, the result is taken from there and only what the operation's backward needs is handed to autograd. Anywhere else
the functions compute as usual.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


def recomputed(
    body: Callable, root: nn.Module, buffers: tuple[str, ...] = (), random: bool = False, keeps: bool = False
) -> Callable:
    """`body` run so that backward computes it again instead of keeping what it computed.

    Args:
        buffers: paths of buffers of `root` that it writes: written once.
        random: whether it draws random numbers: the same ones are drawn again.
        keeps: whether it calls `kept_` functions.
    """
    owners = [(root.get_submodule(b.rpartition(".")[0]), b.rpartition(".")[2]) for b in buffers]

    def contexts() -> tuple[Any, Any]:
        return contextlib.nullcontext(), _StatisticsApart(owners)

    def run(*inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return body(*inputs)
        results = Results()

        def again(*inputs: Any) -> Any:
            with keeping(results):
                return body(*inputs)

        return checkpoint(
            again if keeps else body,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=random,
            context_fn=contexts,
            determinism_check="none",
        )

    return run


def recomputed_in_backward(*, buffers: tuple[str, ...] = (), random: bool = False, keeps: bool = False) -> Callable:
    """`recomputed` for a method of a module."""

    def decorate(method: Callable) -> Callable:
        @functools.wraps(method)
        def run(self: nn.Module, *inputs: Any) -> Any:
            return recomputed(functools.partial(method, self), self, buffers, random, keeps)(*inputs)

        return run

    return decorate


class _StatisticsApart:
    """While it is entered, writes into these buffers go to copies, which are thrown away. Can be entered again."""

    def __init__(self, owners: list[tuple[nn.Module, str]]):
        self.owners = owners
        self.real: list[torch.Tensor | None] = []

    def __enter__(self) -> None:
        self.real = [module._buffers[name] for module, name in self.owners]
        for (module, name), buffer in zip(self.owners, self.real, strict=True):
            module._buffers[name] = None if buffer is None else buffer.clone()

    def __exit__(self, *exc: object) -> None:
        for (module, name), buffer in zip(self.owners, self.real, strict=True):
            module._buffers[name] = buffer


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
