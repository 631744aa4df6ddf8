"""The memory of a step: run on fake tensors, equal to what the allocator says; and its quick model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxspeed.cost.flops import step_flops
from fxspeed.cost.memory import largest, step_timeline
from fxspeed.cost.segments import StepModel
from fxspeed.graph.trace import trace
from tests.peak import step_peak
from tests.torchvision_import import import_torchvision


def mlp() -> tuple[nn.Module, torch.Tensor]:
    layers = [
        layer for _ in range(6) for layer in (nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64))
    ]
    return nn.Sequential(*layers), torch.randn(256, 64)


def resnet() -> tuple[nn.Module, torch.Tensor]:
    return import_torchvision().models.resnet18(), torch.randn(4, 3, 64, 64)


@pytest.mark.parametrize("make", [mlp, resnet])
def test_the_predicted_peak_is_the_measured_one(make):
    model, x = make()
    found = trace(model, (x,), {})
    measured = step_peak(model, (x,))
    assert step_timeline(found, model).peak == pytest.approx(measured, rel=0.05)
    assert StepModel(found, model).peak([]).peak == pytest.approx(measured, rel=0.06)


@pytest.mark.parametrize("make", [mlp, resnet])
def test_the_quick_model_follows_the_exact_one(make):
    from fxspeed.passes.base import Captured
    from fxspeed.passes.checkpoint import Checkpoint

    model, x = make()
    found = trace(model, (x,), {})
    quick, planner = StepModel(found, model), Checkpoint()
    captured = Captured(model, {"train": found})
    plans = sorted(planner._plans(quick, model), key=lambda p: p[0].peak)
    for estimate, plan in plans[:: max(len(plans) // 5, 1)]:
        exact = planner._exact(captured, quick, plan)
        assert exact.peak == pytest.approx(estimate.peak, rel=0.12)


def test_flops_as_torch_counts_them():
    for make in (mlp, resnet):
        model, x = make()
        found = trace(model, (x,), {})
        counted = step_timeline(found, model).flops
        matrix = step_flops(found.graph, found.constants, model)
        assert matrix == pytest.approx(counted / 3, rel=0.1)


def test_the_largest_tensors_have_names_and_lines():
    model, x = mlp()
    found = largest(trace(model, (x,), {}), 3)
    assert len(found) == 3 and found[0][0] == 256 * 256 * 4 and all(":" in label for _, label, _ in found)
