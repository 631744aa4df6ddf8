"""checkpoint: the measured peak stays within the budget, and recomputation leaves no second trace."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

import fxspeed
from fxspeed.passes.checkpoint import parse_bytes
from tests.compare import assert_same, doubled
from tests.peak import step_peak


class Deep(nn.Module):
    def __init__(self, depth=10, width=8, drop=0.2, inplace=False):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(depth))
        self.act, self.drop, self.head = nn.ReLU(inplace=inplace), nn.Dropout(drop), nn.Linear(width, 3)

    def forward(self, x):
        x = self.stem(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + self.drop(self.act(norm(conv(x))))
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("inplace", [False, True])
def test_same_numbers_and_statistics_once(inplace):
    model, (x,) = doubled(Deep(inplace=inplace), (torch.randn(4, 3, 12, 12),))
    result = assert_same(model, (x,), memory_budget=0.6)
    assert any(c.pass_name == "checkpoint" for c in result.changes)
    result.module.train()
    before = int(result.module.norms[0].num_batches_tracked)
    result.module(x).sum().backward()
    assert int(result.module.norms[0].num_batches_tracked) == before + 1


def test_budgets_are_kept_and_never_grow():
    model, x = Deep(depth=12, width=16, drop=0.0), torch.randn(8, 3, 32, 32)
    plain = step_peak(model, (x,))
    peaks = []
    for budget in (0.9, 0.75, 0.6, 0.5):
        result = fxspeed.optimize(model, x, memory_budget=budget, precision="fp32", verify=False)
        peaks.append(step_peak(result.module, (x,)))
        assert peaks[-1] <= budget * plain * 1.01, budget
    assert all(b <= a * 1.01 for a, b in itertools.pairwise(peaks))


def test_predicted_peak_is_the_measured_one():
    model, x = Deep(depth=6, width=16, drop=0.0), torch.randn(8, 3, 32, 32)
    result = fxspeed.optimize(model, x, memory_budget=0.6, precision="fp32", verify=False)
    memory = result.report.to_dict()["memory"]
    assert memory["plain"]["peak"] == pytest.approx(step_peak(model, (x,)), rel=0.07)
    assert memory["planned"]["peak"] == pytest.approx(step_peak(result.module, (x,)), rel=0.1)
    assert memory["planned"]["flops"] > memory["plain"]["flops"]


def test_accumulation_double_use_and_eval():
    model, (x,) = doubled(Deep(drop=0.0), (torch.randn(4, 3, 8, 8),))
    reference = copy.deepcopy(model)
    module = fxspeed.optimize(model, x, memory_budget=0.6).module
    for m in (reference, module):
        (m(x).sum() + m(x * 2).square().sum()).backward()
        m(x).sum().backward()
    for p, q in zip(
        (p for n, p in reference.named_parameters() if n in dict(module.named_parameters())),
        module.parameters(),
        strict=True,
    ):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        module(x)


def test_double_backward():
    model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(32, 32), nn.Tanh())]).double()
    x = torch.randn(64, 32).double()
    reference = copy.deepcopy(model)
    module = fxspeed.optimize(model, x, memory_budget=0.7, passes=["checkpoint"]).module
    found = []
    for m in (reference, module):
        y = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(m(y).square().sum(), y, create_graph=True)
        g.square().sum().backward()
        found.append([p.grad for p in m.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_errors_say_what_can_be_had():
    x = torch.randn(4, 3, 12, 12)
    with pytest.raises(fxspeed.BudgetError, match=r"smallest peak .* of the plain step's.*add_8"):
        fxspeed.optimize(Deep(), x, memory_budget=0.001)
    with pytest.raises(fxspeed.BudgetError, match="share"):
        fxspeed.optimize(Deep(), x, memory_budget=1.5)
    with pytest.raises(fxspeed.BudgetError, match="size"):
        fxspeed.optimize(Deep(), x, memory_budget="6 apples")


def test_bytes():
    assert parse_bytes("6GiB") == 6 << 30 and parse_bytes("500 MB") == 500_000_000 and parse_bytes(7) == 7


def test_golden(golden):
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())])
    golden("checkpoint.diff", fxspeed.optimize(model, torch.randn(128, 64), passes=["checkpoint{budget=0.7}"]).diff())
