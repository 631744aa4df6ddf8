"""Assertions on tensor values: the graph raises what the model raises. (PYTEST_DONT_REWRITE: they stay as written.)"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxspeed


def text(x):
    assert (x < 100).all(), "too large"


def negated(x):
    assert not torch.isnan(x).any()


def number(x):
    assert x.abs().max().item() <= 100


def both(x):
    with torch.no_grad():
        assert (x < 100).all() and torch.isfinite(x).all(), "one of two"


def read(x):
    assert torch.all(x < 100).item()


def raised(x):
    if torch.isnan(x).any() or x.max() > 1e6:
        raise ValueError("not a number")


def computed(x):
    largest = x.max()
    assert largest < 100, f"largest is {largest}"


class Caught(nn.Module):
    def forward(self, x):
        try:
            text(x)
        except AssertionError:
            x = x * 2
        return x


class Demanding(nn.Module):
    def __init__(self, demand):
        super().__init__()
        self.demand, self.layer = demand, nn.Linear(4, 4)

    def forward(self, x):
        self.demand(x)
        return self.layer(x)


def outcome(module, x):
    try:
        return module(x)
    except Exception as error:
        return error


@pytest.mark.parametrize("demand", [text, negated, number, both, read, raised, computed])
def test_same_errors(demand):
    model = Demanding(demand)
    result = fxspeed.optimize(model, torch.randn(2, 4))
    assert not [s for s in result.skipped if s.pass_name == "capture"]
    failed = 0
    for x in (torch.randn(3, 4), torch.full((2, 4), 1e9), torch.full((2, 4), float("nan"))):
        want, got = outcome(model, x), outcome(result.module, x)
        assert type(want) is type(got)
        if isinstance(want, Exception):
            failed += 1
            if demand is computed:
                assert "assert largest < 100" in str(got)  # the text would need the values
            else:
                assert str(want) == str(got)
        else:
            torch.testing.assert_close(want, got)
    assert failed


def test_handled_assertions_stay_python():
    model = nn.Sequential(nn.Linear(4, 4), Caught(), nn.Linear(4, 4))
    result = fxspeed.optimize(model, torch.randn(2, 4))
    assert [s.target for s in result.skipped if s.pass_name == "capture"] == ["1 (Caught)"]
    for x in (torch.randn(2, 4), torch.randn(2, 4) * 1e6):
        torch.testing.assert_close(result.module(x), model(x))


def test_real_branches_stay_python():
    class Branch(nn.Module):
        def forward(self, x):
            if x.sum() > 0:
                x = x + 1
            return x

    model = nn.Sequential(nn.Linear(4, 4), Branch())
    result = fxspeed.optimize(model, torch.randn(2, 4))
    assert [s.target for s in result.skipped if s.pass_name == "capture"] == ["1 (Branch)"]
    for x in (torch.randn(2, 4), torch.randn(2, 4)):
        torch.testing.assert_close(result.module(x), model(x))
