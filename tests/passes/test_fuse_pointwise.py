"""fuse_pointwise: regions compiled by Inductor equal the operations one by one."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxspeed
from fxspeed.passes import fuse_pointwise
from fxspeed.passes.fuse_pointwise import FusePointwise
from tests.compare import assert_same

ALWAYS = {"passes": [FusePointwise(min_saved=0, min_ops=2)]}


class Net(nn.Module):
    def __init__(self, forward, **parts):
        super().__init__()
        self.a, self.body = nn.Linear(8, 8), forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args):
        return self.body(self, *args)


def gelu(y):
    return 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))


def test_equal_blocks_share_one_kernel():
    blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = x + gelu(block(x))
        return x

    result = assert_same(Net(forward, blocks=blocks), (torch.randn(4, 8),), tol=1e-5, **ALWAYS)
    regions = [v for v in result.program.entries[0].trace.constants.values()]
    assert len([c for c in result.changes]) == 4 and len(regions) == 1


def test_dropout_draws_eagers_mask():
    model = Net(lambda s, x: s.d(gelu(s.a(x))) + x, d=nn.Dropout(0.4))
    assert_same(model, (torch.randn(4, 8),), tol=1e-5, **ALWAYS)


def test_promotion_writes_and_later_readers():
    def forward(self, x, i):
        y = self.a(x)
        z = (y * i + (i > 1) * 2.0) / 3
        y.mul_(2)
        return torch.relu(y + z) * (i // 2), (i + 1) * (i > 0)

    model = Net(forward)
    assert_same(model, (torch.randn(4, 8), torch.randint(0, 5, (4, 8))), tol=1e-5, **ALWAYS)


def test_small_tensors_are_left_alone():
    result = fxspeed.optimize(Net(lambda s, x: gelu(s.a(x))), torch.randn(4, 8), passes=["fuse_pointwise"])
    assert not result.changes and any("less than its call costs" in s.why for s in result.skipped)


def test_without_a_compiler_it_says_so(monkeypatch):
    monkeypatch.setattr(fuse_pointwise, "_no_compiler", lambda device: "no C++ compiler was found")
    result = fxspeed.optimize(Net(lambda s, x: gelu(s.a(x))), torch.randn(4, 8), **ALWAYS)
    assert not result.changes and any("compiler" in s.why for s in result.skipped)


def test_a_region_that_is_wrong_is_rolled_back(monkeypatch):
    monkeypatch.setattr(fuse_pointwise.FusedRegion, "bind", lambda self, root, body: lambda *a: body(*a) * 1.01)
    model = Net(lambda s, x: gelu(s.a(x)))
    result = fxspeed.optimize(model, torch.randn(4, 8), **ALWAYS)
    assert result.broken == ("fuse_pointwise",) and not result.changes
    x = torch.randn(4, 8)
    torch.testing.assert_close(model(x), result.module(x))


@pytest.mark.parametrize("function", [F.silu, F.hardswish, F.softplus])
def test_groups_are_convex(function):
    def forward(self, x):
        y = self.a(x)
        inner = self.a(function(y) * 2)
        return function(inner) + y * inner + 1

    assert_same(Net(forward).double(), (torch.randn(4, 8).double(),), tol=1e-9, **ALWAYS)


def test_golden(golden):
    golden("fuse_pointwise.diff", fxspeed.optimize(Net(lambda s, x: gelu(s.a(x))), torch.randn(4, 8), **ALWAYS).diff())
