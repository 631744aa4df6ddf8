"""Gradient scaling for float16, all on the device."""

from __future__ import annotations

from typing import Any

import torch


class Scaler:
    """Scales the loss, takes the scale out of gradients, skips steps with non-finite ones, adapts the scale.

    The rule is that of torch.amp.GradScaler (factor 2 up after `interval` good steps, 1/2 down after a bad one), but
    nothing is read by the host: the decision to skip is made on the device.

    Attributes:
        scale: 0-dim float32.
        found: 0-dim float32, 1 where the last step's gradients were not finite.
        skipped: 0-dim int64, steps skipped so far.
    """

    def __init__(self, device: torch.device, init_scale: float = 2.0**16, interval: int = 2000):
        self.scale = torch.tensor(init_scale, device=device)
        self.tracker = torch.zeros((), dtype=torch.int32, device=device)
        self.found = torch.zeros((), device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self.interval = interval

    def unscale(self, gradients: list[torch.Tensor]) -> None:
        """Divide the gradients by the scale, in place, and look for values that are not finite."""
        self.found.zero_()
        inverse = self.scale.double().reciprocal().float()
        for dtype in {g.dtype for g in gradients}:
            same = [g for g in gradients if g.dtype is dtype]
            if dtype is torch.float64:  # the fused check has no float64
                for g in same:
                    self.found.copy_(torch.maximum(self.found, torch.isfinite(g).all().logical_not().float()))
                torch._foreach_mul_(same, inverse)
            else:
                torch._amp_foreach_non_finite_check_and_unscale_(same, self.found, inverse)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer, unless a gradient was not finite; then adapt the scale."""
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.grad_scale, optimizer.found_inf = None, self.found
            try:
                optimizer.step()
            finally:
                del optimizer.grad_scale, optimizer.found_inf
        else:
            self._step_and_undo(optimizer)
        self.skipped += self.found.to(torch.int64)
        torch._amp_update_scale_(self.scale, self.tracker, self.found, 2.0, 0.5, self.interval)

    def _step_and_undo(self, optimizer: torch.optim.Optimizer) -> None:
        """For optimizers that cannot skip on the device: step, and take the step back where it must not count."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        before = {key: tensor.detach().clone() for key, tensor in _tensors(optimizer, parameters).items()}
        optimizer.step()
        bad = self.found.bool()
        with torch.no_grad():
            for key, tensor in _tensors(optimizer, parameters).items():
                old = before.get(key, torch.zeros_like(tensor))  # zero: state that this very step made
                tensor.copy_(torch.where(bad.to(tensor.device), old, tensor))

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "tracker": self.tracker, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("scale", "tracker", "skipped"):
            getattr(self, name).copy_(state[name])


class Flag:
    """A flag on the device that the host asks for later: the copy is begun now, beside the work that follows."""

    def __init__(self, flag: torch.Tensor):
        cuda = torch.cuda.is_available()
        self.host = torch.empty((), dtype=flag.dtype, pin_memory=cuda)
        self.host.copy_(flag, non_blocking=True)
        self.arrived = torch.cuda.Event() if cuda else None
        if self.arrived is not None:
            self.arrived.record()

    def __bool__(self) -> bool:
        if self.arrived is not None:
            self.arrived.synchronize()  # for the work before the copy, not for what was launched since
        return bool(self.host)


def _tensors(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> dict[tuple, torch.Tensor]:
    """The parameters and the optimizer's state of them."""
    found: dict[tuple, torch.Tensor] = {(i,): p for i, p in enumerate(parameters)}
    for i, parameter in enumerate(parameters):
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                found[i, name] = value
    return found
