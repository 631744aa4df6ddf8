"""remove_syncs: numbers stay on the device, constants are built once, and results are eager's to the bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import fxspeed
from tests.compare import assert_same
from tests.reads import CountReads

ONLY = {"passes": ["remove_syncs"]}


class Net(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.a, self.body = nn.Linear(4, 4), forward

    def forward(self, *args):
        return self.body(self, *args)


def reads(module: nn.Module, *args) -> int:
    with CountReads() as mode:
        module(*args)
    return mode.count


@pytest.mark.parametrize(
    "forward",
    [
        lambda s, x: s.a(x) / x.norm().item(),
        lambda s, x: s.a(x) * float(x.abs().max()) + 1,
        lambda s, x: s.a(x) - (x.mean().item() * 2 + 1),
        lambda s, x: 3.0 - s.a(x) * x.sum().item(),
        lambda s, x: s.a(x) * int(x.abs().sum()),
        lambda s, x: s.a(x).abs() ** (x.abs().max().item() + 1),
        lambda s, x: (x > 0).long() * x.abs().max().item() + s.a(x),
        lambda s, x: s.a(x) * ((x > 0).sum().item() / 3),
        lambda s, x: s.a(x).masked_fill(x > 0, x.min().item()),
        lambda s, x: s.a(x).sum() * x.abs().max().item(),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_reads_go(forward, dtype):
    model, x = Net(forward).to(dtype), torch.randn(3, 4, dtype=dtype)
    tol = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
    result = assert_same(model, (x,), tol=tol, steps=1, **ONLY)
    assert reads(model, x) > 0
    assert reads(result.module, x) == 0, result.report
    assert any(c.saves.get("host_reads") for c in result.changes)


@pytest.mark.parametrize(
    ("forward", "word"),
    [
        (lambda s, x: s.a(x) + torch.ones((x > -9).sum().item()).sum(), "ones"),
        (lambda s, x: (s.a(x), x.max().item()), "returns"),
        (lambda s, x: s.a(x) * torch.full((4,), x.max().item()), "full"),
    ],
)
def test_reads_that_must_stay_are_reported(forward, word):
    result = assert_same(Net(forward).double(), (torch.randn(3, 4).double(),), steps=1, other_batch=False, **ONLY)
    skip = next(s for s in result.skipped if "item" in s.what)
    assert skip.source.startswith(__file__) and word in skip.why


def test_constants_are_built_once_and_are_no_state():
    def forward(self, x):
        mean = torch.tensor([0.1, 0.2, 0.3, 0.4]).view(1, 4).to(x.device)
        return self.a((x - mean) / torch.tensor(0.25)) + torch.arange(4)

    result = assert_same(Net(forward).double(), (torch.randn(3, 4).double(),), **ONLY)
    assert result.module.state_dict().keys() == {"a.weight", "a.bias"}
    text = str(result.train_graph.code)
    assert "torch.tensor" not in text and "arange" not in text


@pytest.mark.parametrize(
    "forward",
    [
        lambda s, x: s.a(x) + torch.zeros(4).add_(1).fill_(2),
        lambda s, x: (s.a(x), torch.tensor([1.0, 2.0])),
        lambda s, x: (s.a(x), torch.arange(6).view(2, 3)[1]),
    ],
)
def test_constants_that_escape_are_built_anew(forward):
    result = fxspeed.optimize(Net(forward), torch.randn(3, 4), **ONLY)
    x = torch.randn(3, 4)
    first, second = result.module(x), result.module(x)
    if isinstance(first, tuple):
        assert first[1].untyped_storage().data_ptr() != second[1].untyped_storage().data_ptr()
    torch.testing.assert_close(first, second)


def test_random_factories_are_left_alone():
    model = Net(lambda s, x: s.a(x) + torch.randn(4))
    result = fxspeed.optimize(model, torch.randn(3, 4), **ONLY)
    x = torch.randn(3, 4)
    assert not torch.equal(result.module(x), result.module(x))


def test_number_arithmetic_is_pythons():
    model = Net(lambda s, x: s.a(x) * (2 / ((x > 0).sum().item() + 1) - math.pi))
    assert_same(model, (torch.randn(3, 4),), tol=1e-6, **ONLY)


def test_golden(golden):
    def forward(self, x):
        y = self.a(x - torch.tensor([0.1, 0.2, 0.3, 0.4]))
        return y / y.norm().item()

    golden("remove_syncs.diff", fxspeed.optimize(Net(forward), torch.randn(3, 4), **ONLY).diff())
