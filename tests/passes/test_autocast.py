"""autocast: low precision with float32 islands, outputs in their own dtype, errors like plain autocast's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxspeed
from fxspeed.passes.autocast import choose


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(16, 32), nn.Linear(32, 4), nn.LayerNorm(32)

    def forward(self, x):
        y = self.norm(F.gelu(self.a(x)))
        return {"p": F.softmax(self.b(y), -1), "y": y, "n": (y > 0).sum()}


def test_outputs_keep_their_dtype_and_errors_are_small():
    model, x = Net(), torch.randn(8, 16)
    result = fxspeed.optimize(model, x, precision="bf16")
    want, got = model(x), result.module(x)
    assert {k: v.dtype for k, v in want.items()} == {k: v.dtype for k, v in got.items()}
    assert 0 < float((want["y"] - got["y"]).abs().max()) < 0.1
    got["p"].square().sum().backward()
    assert all(p.grad.dtype is torch.float32 for p in result.module.parameters())
    assert not torch.is_autocast_enabled("cpu")


def test_losses_that_autocast_refuses():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.loss = nn.Linear(8, 1), nn.BCELoss()

        def forward(self, x, y):
            return self.loss(self.a(x).sigmoid()[:, 0], y)

    model, x, y = Loss(), torch.randn(8, 8), torch.rand(8)
    result = fxspeed.optimize(model, (x, y), precision="bf16")
    torch.testing.assert_close(result.module(x, y), model(x, y), rtol=2e-2, atol=2e-2)
    assert any("outside autocast" in c.what for c in result.changes)


def test_choice():
    cpu = torch.device("cpu")
    assert choose("auto", cpu)[0] is None and choose("bf16", cpu)[0] is torch.bfloat16
    with pytest.raises(fxspeed.Error, match="precision"):
        choose("fp8", cpu)


def test_models_in_another_dtype_are_left_alone():
    result = fxspeed.optimize(Net().double(), torch.randn(4, 16).double(), precision="bf16")
    assert any(s.pass_name == "autocast" and "float64" in s.why for s in result.skipped)


def test_with_recomputation():
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))])
    x = torch.randn(128, 64)
    result = fxspeed.optimize(model, x, precision="bf16", memory_budget=0.6, passes=["checkpoint", "autocast"])
    weights = torch.linspace(-1, 2, 128 * 64).view(128, 64)
    (result.module(x) * weights).sum().backward()
    (model(x) * weights).sum().backward()
    for p, q in zip(model.parameters(), result.module.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0.1, atol=0.1 * float(p.grad.abs().max()))


def test_golden(golden):
    golden("autocast.diff", fxspeed.optimize(Net(), torch.randn(4, 16), precision="bf16", passes=["autocast"]).diff())
