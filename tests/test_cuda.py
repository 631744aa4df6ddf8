"""What only a GPU can show."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxspeed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU(), nn.Flatten(), nn.Linear(16 * 256, 10)
    ).cuda()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_waits_for_nothing(precision):
    x, y = torch.randn(8, 3, 16, 16, device="cuda"), torch.randint(0, 10, (8,), device="cuda")
    result = fxspeed.optimize(net(), x, precision=precision)
    step = result.train_step(F.cross_entropy, clip_norm=1.0)
    for _ in range(3):
        step(x, y)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            loss = step(x, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loss.isfinite()


def test_equal_to_the_plain_model():
    model, x = net(), torch.randn(8, 3, 16, 16, device="cuda")
    result = fxspeed.optimize(model, x, precision="fp32", memory_budget=0.9)
    reference = copy.deepcopy(model)
    torch.testing.assert_close(result.module(x), reference(x), rtol=1e-3, atol=1e-3)


def test_the_budget_is_the_allocators_peak():
    model = nn.Sequential(*[layer for _ in range(16) for layer in (nn.Linear(1024, 1024), nn.GELU())]).cuda()
    x = torch.randn(4096, 1024, device="cuda")

    def peak(module: nn.Module) -> int:
        for _ in range(2):
            module(x).sum().backward()
        torch.cuda.synchronize()
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        module(x).sum().backward()
        return torch.cuda.max_memory_allocated() - start

    result = fxspeed.optimize(model, x, precision="fp32", memory_budget=0.5, passes=["checkpoint"])
    assert peak(result.module) <= 0.52 * peak(model)


def test_constants_made_on_the_host_are_made_on_the_device():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x + torch.arange(x.shape[0]).to(x.device)[:, None]) / x.abs().max().item()

    model, x = Net().cuda(), torch.randn(3, 4, device="cuda")
    result = fxspeed.optimize(model, x)
    torch.testing.assert_close(result.module(x), model(x))
    torch.cuda.set_sync_debug_mode("error")
    try:
        result.module(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
