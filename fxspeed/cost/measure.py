"""The measured peak of what a function allocates."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch


def measured_peak(run: Callable[[], Any], device: torch.device) -> int:
    """Peak of live allocator bytes above the start while `run` runs.

    On CUDA the allocator's own statistics; elsewhere the profiler's memory events in the order of time.

    Source: torch.cuda.max_memory_allocated; torch.profiler with `profile_memory`.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    now = peak = 0
    events = [(e.start_ns(), e.nbytes()) for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for _, size in sorted(events, key=lambda e: e[0]):
        now += size
        peak = max(peak, now)
    return peak
