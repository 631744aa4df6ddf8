"""Running an optimized model beside the one it came from."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from torch import nn

import fxspeed
from fxspeed.graph.structure import map_tensors, tensors_in


def run(model: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None) -> Any:
    """One forward under a fixed seed, on copies of the inputs."""
    torch.manual_seed(0)
    random.seed(0)
    return model(*copy.deepcopy(args), **copy.deepcopy(kwargs or {}))


def loss_of(output: Any) -> torch.Tensor:
    """A scalar that depends on every output that requires a gradient."""
    terms = [
        (t * torch.linspace(-1, 2, t.numel(), dtype=t.dtype).view_as(t)).sum()
        for t in tensors_in(output)
        if t.requires_grad
    ]
    return torch.stack([t.double() for t in terms]).sum()


def close(a: Any, b: Any, tol: float) -> None:
    want, got = tensors_in(a), tensors_in(b)
    assert len(want) == len(got)
    for w, g in zip(want, got, strict=True):
        torch.testing.assert_close(g, w, rtol=tol, atol=tol, equal_nan=True)


def larger(tree: Any) -> Any:
    """The inputs with a batch one larger."""
    return map_tensors(tree, lambda t: torch.cat([t, t[:1]]) if t.dim() else t, torch.Tensor)


def doubled(model: nn.Module, args: tuple) -> tuple[nn.Module, tuple]:
    """Model and inputs in float64."""
    return model.double(), map_tensors(args, lambda t: t.double() if t.is_floating_point() else t, torch.Tensor)


def assert_same(
    model: nn.Module,
    args: tuple,
    kwargs: dict[str, Any] | None = None,
    *,
    tol: float = 1e-9,
    steps: int = 2,
    other_batch: bool = True,
    **options: Any,
) -> fxspeed.Optimized:
    """Optimize and compare: training steps, buffers, eval mode, another batch size, the state dict's way back."""
    kwargs = kwargs or {}
    reference, untouched = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    result = fxspeed.optimize(model, args, kwargs, **{"precision": "fp32", **options})
    for name, value in model.state_dict().items():
        assert torch.equal(value, untouched[name]), f"optimize() changed {name}"
    module = result.module
    sets = [(args, kwargs), larger((args, kwargs))] if other_batch else [(args, kwargs)]
    for a, k in sets:
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.02) for m in (reference, module)]
        for _ in range(steps):
            outputs = [run(m, a, k) for m in (reference, module)]
            close(*outputs, tol)
            for output, optimizer in zip(outputs, optimizers, strict=True):
                optimizer.zero_grad()
                if any(t.requires_grad for t in tensors_in(output)):
                    loss_of(output).backward()
            new = dict(module.named_parameters())
            scale = max((float(p.grad.abs().max()) for p in reference.parameters() if p.grad is not None), default=1.0)
            for name, p in reference.named_parameters():
                if name in new and p.grad is not None:
                    torch.testing.assert_close(new[name].grad, p.grad, rtol=10 * tol, atol=10 * tol * max(scale, 1))
            for optimizer in optimizers:
                optimizer.step()
        back = result.original_state_dict()
        assert list(back) == list(reference.state_dict())
        for name, buffer in reference.named_buffers():
            if name in back:
                torch.testing.assert_close(back[name], buffer, rtol=100 * tol, atol=100 * tol)
        flags = [{n: m.training for n, m in each.named_modules()} for each in (reference, module)]
        reference.eval(), module.eval()
        with torch.no_grad():
            close(run(reference, a, k), run(module, a, k), 100 * tol)
        for each, flag in zip((reference, module), flags, strict=True):
            for name, m in each.named_modules():
                m.training = flag[name]
    return result
