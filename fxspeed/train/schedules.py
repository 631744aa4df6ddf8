"""Learning-rate schedules, stepped once an optimizer step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR

from fxspeed.errors import Error

Schedule = str | Callable[[torch.optim.Optimizer], LRScheduler] | None


def build(
    schedule: Schedule, optimizer: torch.optim.Optimizer, lr: float, total_steps: int | None
) -> LRScheduler | None:
    """A scheduler for `schedule`.

    "1cycle": Smith and Topin, "Super-Convergence", 2018; `lr` is the peak, `total_steps` optimizer steps long.
    "cyclic": Smith, "Cyclical Learning Rates", 2017; between lr/10 and lr, a half cycle of `total_steps`/10 or 2000.

    Raises:
        Error: an unknown name, or "1cycle" without `total_steps`.
    """
    if schedule is None:
        return None
    if schedule == "1cycle":
        if not total_steps or total_steps < 1:
            raise Error('schedule="1cycle" needs total_steps=, the number of optimizer steps of the whole training')
        return OneCycleLR(optimizer, max_lr=lr, total_steps=total_steps, cycle_momentum=_has_momentum(optimizer))
    if schedule == "cyclic":
        half = max(total_steps // 10, 1) if total_steps else 2000
        momentum = _has_momentum(optimizer)
        return CyclicLR(optimizer, base_lr=lr / 10, max_lr=lr, step_size_up=half, cycle_momentum=momentum)
    if callable(schedule):
        made = schedule(optimizer)
        if not isinstance(made, LRScheduler):
            raise Error(f"schedule returned a {type(made).__name__}; it must return a torch LRScheduler")
        return made
    raise Error(f'schedule {schedule!r} is unknown; use "1cycle", "cyclic" or a function of the optimizer')


def _has_momentum(optimizer: torch.optim.Optimizer) -> bool:
    return any(group.get("momentum") or "betas" in group for group in optimizer.param_groups)
