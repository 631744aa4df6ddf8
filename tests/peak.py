"""The measured peak of a step."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn

from fxspeed.graph.structure import tensors_in


def step_peak(model: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None) -> int:
    """Peak of live allocator bytes above the start over one forward and backward, gradients allocated before (CPU)."""

    def step() -> None:
        torch.stack([t.sum() for t in tensors_in(model(*args, **(kwargs or {}))) if t.requires_grad]).sum().backward()

    gc.collect()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    now = peak = 0
    events = [(e.start_ns(), e.nbytes()) for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for _, size in sorted(events, key=lambda e: e[0]):
        now += size
        peak = max(peak, now)
    return peak
