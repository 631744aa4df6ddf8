"""The training step around an optimized module."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fxspeed.errors import Error
from fxspeed.example import device_of
from fxspeed.graph.structure import tensors_in
from fxspeed.result import Optimized
from fxspeed.train import optimizers, schedules
from fxspeed.train.precision import Scaler


@dataclasses.dataclass(frozen=True)
class Setting:
    """One thing that the step decided: its name, the value, why."""

    name: str
    value: Any
    why: str


class TrainStep:
    """One optimizer step over `accumulate` micro-batches, without a host read.

    Args:
        result: what `optimize` returned.
        loss_fn: `loss_fn(output, *targets)` -> scalar tensor, the mean over its batch.
        optimizer: a name, a torch class, or an instance over `result.module`'s parameters.
        lr, weight_decay, optimizer_options: passed to the optimizer.
        schedule: None, "1cycle", "cyclic" or a function of the optimizer that returns a torch scheduler.
        total_steps: optimizer steps of the whole training, for schedules that end.
        accumulate: micro-batches for each optimizer step. The step equals one on the micro-batches joined: each
            weighs as much as it has items.
        clip_norm: largest norm of all gradients together, taken after unscaling.
        normalize: (mean, std) for each channel; uint8 inputs are first divided by 255.
        distributed: "auto" wraps in DistributedDataParallel when a process group is up.

    Raises:
        Error: what cannot work, with what to do instead.
    """

    def __init__(
        self,
        result: Optimized,
        loss_fn: Callable[..., torch.Tensor],
        optimizer: Any = "adamw",
        *,
        lr: float = 1e-3,
        weight_decay: float | None = None,
        schedule: schedules.Schedule = None,
        total_steps: int | None = None,
        accumulate: int = 1,
        clip_norm: float | None = None,
        normalize: tuple[Any, Any] | None = None,
        distributed: str | None = "auto",
        tune: bool = False,
        **optimizer_options: Any,
    ):
        if tune:
            raise Error("tune=True is not built yet; leave it out")
        if distributed == "fsdp":
            raise Error('distributed="fsdp" is not built yet; use "auto" for DistributedDataParallel')
        if distributed not in ("auto", None):
            raise Error(f'distributed is {distributed!r}; use "auto" or None')
        if not isinstance(accumulate, int) or accumulate < 1:
            raise Error(f"accumulate is {accumulate!r}; it must be a whole number of micro-batches, at least 1")
        if clip_norm is not None and not clip_norm > 0:
            raise Error(f"clip_norm is {clip_norm!r}; it must be greater than 0")
        self.result, self.module, self.loss_fn = result, result.module, loss_fn
        self.device = device_of(self.module)
        self.accumulate, self.clip_norm, self.total_steps = accumulate, clip_norm, total_steps
        self.optimizer, why = optimizers.build(optimizer, self.module, lr, weight_decay, optimizer_options)
        self.settings: list[Setting] = [Setting("optimizer", type(self.optimizer).__name__, why)]
        self.schedule = schedules.build(schedule, self.optimizer, lr, total_steps)
        if self.schedule is not None:
            self.settings.append(Setting("schedule", type(self.schedule).__name__, "stepped once an optimizer step"))
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.scaler = self._scaler()
        self.model: nn.Module = self._wrapped(distributed)
        self._normalize = self._constants(normalize)
        self.settings.append(Setting("accumulate", accumulate, "micro-batches for each optimizer step"))
        self.settings.append(Setting("clip_norm", clip_norm, "of unscaled gradients, on the device"))
        self.settings.append(Setting("gradients", None, "set to None after each step"))
        self.steps = 0
        self._seen = 0  # micro-batches since the last optimizer step
        self._weight = 0.0  # their items, in units of the first one's
        self._first = 1
        self._pending: torch.Tensor | None = None
        self.optimizer.zero_grad(set_to_none=True)

    # ------------------------------------------------------------------ building
    def _scaler(self) -> Scaler | None:
        dtype = self.result._pipeline.facts.low_precision
        self.settings.append(Setting("precision", str(dtype or "float32").removeprefix("torch."), "the autocast pass"))
        if dtype is not torch.float16:
            return None
        self.settings.append(Setting("scaler", "on the device", "float16 gradients underflow without one"))
        return Scaler(self.device)

    def _wrapped(self, distributed: str | None) -> nn.Module:
        if distributed is None or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return self.module
        from torch.nn.parallel import DistributedDataParallel

        self.settings.append(Setting("distributed", "DDP", "a process group is up"))
        ids = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(self.module, device_ids=ids, gradient_as_bucket_view=True)

    def _constants(self, normalize: tuple[Any, Any] | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        if normalize is None:
            return None
        dtype = next((p.dtype for p in self.module.parameters() if p.is_floating_point()), torch.float32)
        mean, std = (torch.as_tensor(v, dtype=dtype, device=self.device).reshape(-1, 1, 1) for v in normalize)
        self.settings.append(Setting("normalize", "on the device", "images travel as uint8"))
        return mean, std

    # ------------------------------------------------------------------ the step
    def __call__(self, inputs: Any, *targets: Any) -> torch.Tensor:
        """Forward and backward of one micro-batch, and the optimizer step when `accumulate` of them are in.

        Args:
            inputs: a tensor, a tuple (positional) or a dict (keywords).
            targets: passed on to `loss_fn`.

        Returns:
            The detached 0-dim loss, on the device.
        """
        last = self._seen + 1 == self.accumulate
        items = _items(inputs)
        with self._without_sync(not last):
            loss = self._loss(self._forward(self.model, inputs), targets)
            weight = 1.0
            if self.accumulate > 1:
                if self._seen == 0:
                    self._first = items
                weight = items / self._first
            scaled = loss if weight == 1.0 else loss * weight
            if self.scaler is not None:
                scaled = scaled * self.scaler.scale.to(scaled.dtype)
            scaled.backward()
        self._seen += 1
        self._weight += weight
        if last:
            self._step()
        return loss.detach()

    def flush(self) -> None:
        """Step on an incomplete accumulation; gradients are averaged over what was seen. Nothing seen: nothing done."""
        if self._seen:
            if self.model is not self.module:
                self._reduce()
            self._step()

    def evaluate(self, inputs: Any, *targets: Any) -> tuple[torch.Tensor, Any]:
        """Loss and output of the eval graph, in inference mode; every module's training flag is restored."""
        flags = [(m, m.training) for m in self.module.modules()]
        try:
            self.module.eval()
            with torch.inference_mode():
                output = self._forward(self.module, inputs)
                return self._loss(output, targets, training=False), output
        finally:
            for module, flag in flags:
                module.training = flag

    def _forward(self, model: nn.Module, inputs: Any) -> Any:
        if self._normalize is not None:
            inputs = self._normalized(inputs)
        if isinstance(inputs, dict):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, tuple) else model(inputs)

    def _normalized(self, inputs: Any) -> Any:
        assert self._normalize is not None
        mean, std = self._normalize

        def change(image: torch.Tensor) -> torch.Tensor:
            image = image.to(self.device, non_blocking=True)
            scaled = image.to(mean.dtype) / 255 if image.dtype is torch.uint8 else image.to(mean.dtype)
            return (scaled - mean) / std

        if isinstance(inputs, torch.Tensor):
            return change(inputs)
        if isinstance(inputs, tuple):
            return change(inputs[0]), *inputs[1:]
        first = next(iter(inputs))
        return {**inputs, first: change(inputs[first])}

    def _loss(self, output: Any, targets: tuple, training: bool = True) -> torch.Tensor:
        loss = self.loss_fn(output, *targets)
        if not isinstance(loss, torch.Tensor) or loss.dim():
            shape = (
                f"a tensor of shape {tuple(loss.shape)}"
                if isinstance(loss, torch.Tensor)
                else f"a {type(loss).__name__}"
            )
            raise Error(f"loss_fn returned {shape}; it must return a scalar tensor (use .mean())")
        if training and not loss.requires_grad:
            raise Error("the loss does not depend on any trainable parameter; did loss_fn detach it?")
        return loss

    def _step(self) -> None:
        if self.schedule is not None and self.total_steps is not None and self.steps >= self.total_steps:
            raise Error(f"total_steps={self.total_steps} optimizer steps are done; give a larger total_steps")
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if self._weight != 1.0:
            torch._foreach_div_(gradients, self._weight)
        self._advance()
        if self.scaler is not None:
            self.scaler.unscale(gradients)
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        self._seen, self._weight = 0, 0.0
        if self.schedule is not None:
            if self.scaler is None:
                self._schedule_step()
            else:  # whether the step counted is known on the device: asked at the next step, when the answer is there
                self._pending = self.scaler.found.clone()

    def _advance(self) -> None:
        """Advance the schedule for the step before, if it counted."""
        if self._pending is not None:
            counted = not bool(self._pending)
            self._pending = None
            if counted:
                self._schedule_step()

    def _schedule_step(self) -> None:
        assert self.schedule is not None
        if self.total_steps is not None and self.schedule.last_epoch + 1 >= self.total_steps:
            return  # the last step of the schedule has been taken
        self.schedule.step()

    @contextlib.contextmanager
    def _without_sync(self, off: bool) -> Iterator[None]:
        """No gradient traffic on micro-batches that do not step."""
        with self.model.no_sync() if off and self.model is not self.module else contextlib.nullcontext():
            yield

    def _reduce(self) -> None:
        """Average the gradients of an incomplete accumulation over the processes."""
        world = torch.distributed.get_world_size()
        for parameter in self.parameters:
            if parameter.grad is not None:
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= world

    # ------------------------------------------------------------------ state
    @property
    def skipped_steps(self) -> int:
        """Steps that the scaler skipped. Reads from the device."""
        return int(self.scaler.skipped) if self.scaler is not None else 0

    @property
    def source(self) -> str:
        raise Error("step.source is not built yet; print(result.diff()) shows the rewritten graph")

    def state_dict(self) -> dict[str, Any]:
        """Everything that training continues from: module, optimizer, schedule, scaler, counters, half-done gradients.

        Loads with `torch.load(..., weights_only=True)`.
        """
        self._advance()
        gradients = {n: p.grad.clone() for n, p in self.module.named_parameters() if p.grad is not None and self._seen}
        return {
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict() if self.schedule is not None else None,
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
            "counters": {"steps": self.steps, "seen": self._seen, "weight": self._weight, "first": self._first},
            "gradients": gradients,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            Error: the state is of another kind of step or module.
        """
        missing = {"module", "optimizer", "schedule", "scaler", "counters"} - state.keys()
        if missing:
            raise Error(f"this is no state dict of a TrainStep: {', '.join(sorted(missing))} missing")
        for name in ("schedule", "scaler"):
            if (state[name] is None) != (getattr(self, name) is None):
                raise Error(
                    f"the state was taken {'without' if state[name] is None else 'with'} a {name}; build the step alike"
                )
        try:
            self.module.load_state_dict(state["module"])
        except RuntimeError as error:
            raise Error(f"the state is of another module: {error}") from error
        self.optimizer.load_state_dict(state["optimizer"])
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        counters = state["counters"]
        self.steps, self._seen = counters["steps"], counters["seen"]
        self._weight, self._first = counters["weight"], counters["first"]
        self._pending = None
        self.optimizer.zero_grad(set_to_none=True)
        parameters = dict(self.module.named_parameters())
        for name, gradient in state.get("gradients", {}).items():
            parameters[name].grad = gradient.clone().to(parameters[name])

    def __repr__(self) -> str:
        return f"TrainStep({', '.join(f'{s.name}={s.value}' for s in self.settings)})"


def _items(inputs: Any) -> int:
    """Items in a micro-batch: the first dimension of its first tensor."""
    return next((t.shape[0] for t in tensors_in(inputs) if t.dim()), 1)
