"""Operations kept inside a recomputed region: run once, and right in every derivative."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxspeed
from fxspeed.graph.recompute import Results, keeping, kept_addmm, kept_convolution, kept_linear
from fxspeed.graph.regions import bind
from fxspeed.graph.trace import trace
from fxspeed.passes import Checkpoint
from fxspeed.passes.checkpoint import _extract


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def region(model: nn.Module, x: torch.Tensor, kept: list[str]):
    """The model with all its nodes in one region that keeps those named."""
    found = trace(model, (x,), {})
    nodes = [n for n in found.graph.nodes if n.op not in ("placeholder", "output")]
    _extract(found, model, nodes, {n for n in nodes if str(n.target) in kept})
    return bind(found.graph, found.constants, model).forward


MODELS = {
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, 2, 1, groups=2), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 3, 2, 2), nn.Tanh()
        ),
        (3, 2, 6, 6), ["0", "3"],
    ),
    "linear": (
        lambda: nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 4, bias=False), nn.Tanh()), (3, 7, 5), ["0", "2"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_no_second_run(name):
    make, shape, kept = MODELS[name]
    model, x = make().double(), torch.randn(shape).double()
    other = copy.deepcopy(model)
    forward = region(other, x, kept)
    found = []
    for run in (model, forward):
        y = x.clone().requires_grad_()
        with Count() as count:
            run(y).square().sum().backward()
        found.append((y.grad, [n for n in count.names if n in ("convolution", "addmm", "mm")]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-10, atol=1e-10)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-10)
    assert found[1][1].count("convolution") == found[0][1].count("convolution")


def test_retained_graphs_and_double_backward():
    make, shape, kept = MODELS["linear"]
    model, x = make().double(), torch.randn(shape).double()
    other = copy.deepcopy(model)
    forward = region(other, x, kept)
    found = []
    for run in (model, forward):
        y = x.clone().requires_grad_()
        loss = run(y).square().sum()
        loss.backward(retain_graph=True)
        (g,) = torch.autograd.grad(loss, y, create_graph=True)
        g.square().sum().backward()
        found.append(y.grad)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("low", [None, torch.bfloat16])
def test_the_functions_compute_as_torchs_own(low):
    x, w, b = torch.randn(3, 5), torch.randn(4, 5), torch.randn(4)
    image, kernel = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3)
    with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
        for results in (None, Results()):
            with keeping(results) if results is not None else torch.enable_grad():
                torch.testing.assert_close(kept_linear(x, w, b), nn.functional.linear(x, w, b))
                torch.testing.assert_close(kept_addmm(b, x, w.t()), torch.addmm(b, x, w.t()), rtol=2e-2, atol=2e-2)
                options = ((1, 1), (0, 0), (1, 1), False, (0, 0), 1)
                got = kept_convolution(image, kernel, b, *options)
                torch.testing.assert_close(got, nn.functional.conv2d(image, kernel, b))


def test_gradcheck():
    x, w, b = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (4, 5), (4,)))

    def run(*tensors):
        with keeping(Results()):
            return kept_linear(*tensors)

    assert torch.autograd.gradcheck(run, (x, w, b)) and torch.autograd.gradgradcheck(run, (x, w, b))


def test_plans_keep_what_is_dear():
    model = nn.Sequential(
        *[layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh(), nn.Sigmoid(), nn.Tanh())]
    )
    x = torch.randn(256, 64)
    result = fxspeed.optimize(model, x, passes=[Checkpoint(0.7)])
    memory = result.report.to_dict()["memory"]
    assert memory["planned"]["peak"] <= 0.7 * memory["plain"]["peak"]
    assert memory["planned"]["flops"] <= 1.02 * memory["plain"]["flops"]
    assert "kept_linear" in result.diff()
