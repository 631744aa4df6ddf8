"""The measured peak of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fxspeed.cost.measure import measured_peak
from fxspeed.graph.structure import tensors_in


def step_peak(model: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None) -> int:
    """Peak of live allocator bytes above the start over one forward and backward, gradients allocated before (CPU)."""

    def step() -> None:
        torch.stack([t.sum() for t in tensors_in(model(*args, **(kwargs or {}))) if t.requires_grad]).sum().backward()

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step()
    return measured_peak(step, torch.device("cpu"))
