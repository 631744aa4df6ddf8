"""An exponential moving average of the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


class Average:
    """`average = decay * average + (1 - decay) * weights` after each optimizer step, on the device; buffers are copied.

    Source: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992; torch.optim.swa_utils
    has the same rule, with a read of its counter by the host.
    """

    def __init__(self, module: nn.Module, decay: float):
        self.module, self.decay = module, decay
        self.weights = {n: p.detach().clone() for n, p in module.named_parameters()}

    @torch.no_grad()
    def update(self, skipped: torch.Tensor | None) -> None:
        """Take the weights in. `skipped` is 1 on the device where the step did not count."""
        new = [p for _, p in self.module.named_parameters()]
        old = list(self.weights.values())
        if skipped is None:
            torch._foreach_lerp_(old, new, 1 - self.decay)
        else:
            step = torch._foreach_sub(new, old)
            torch._foreach_mul_(step, (1 - skipped) * (1 - self.decay))
            torch._foreach_add_(old, step)

    @contextlib.contextmanager
    @torch.no_grad()
    def in_place(self) -> Iterator[None]:
        """The module has the average weights inside, its own again afterwards."""
        parameters = dict(self.module.named_parameters())
        own = {n: p.detach().clone() for n, p in parameters.items()}
        try:
            for name, value in self.weights.items():
                parameters[name].copy_(value)
            yield
        finally:
            for name, value in own.items():
                parameters[name].copy_(value)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.weights)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in self.weights.items():
            value.copy_(state[name])
