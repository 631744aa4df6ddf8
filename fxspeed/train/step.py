"""The training step around an optimized module."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fxspeed.errors import Error
from fxspeed.example import device_of
from fxspeed.graph.structure import tensors_in
from fxspeed.result import Optimized
from fxspeed.train import optimizers, schedules
from fxspeed.train.averaging import Average
from fxspeed.train.batch import to_device
from fxspeed.train.debug import debug_apis
from fxspeed.train.distributed import Parallel, wrap
from fxspeed.train.precision import Flag, Scaler
from fxspeed.train.source import step_source


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
        distributed: "auto" wraps in DistributedDataParallel when a process group is up; "fsdp" shards parameters,
            gradients and optimizer state with fully_shard; None leaves the process alone.
        decay_norms: False puts biases and the weights of norms (parameters of one dimension) into a group without
            weight decay.
        ema: factor of an exponential moving average of the weights, in (0, 1); `evaluate(..., averaged=True)` uses it.

    Inputs and targets on another device are copied to the module's, without waiting.

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
        decay_norms: bool = True,
        ema: float | None = None,
        **optimizer_options: Any,
    ):
        if tune:
            raise Error("tune=True is not built yet; leave it out")
        if distributed not in ("auto", "fsdp", None):
            raise Error(f'distributed is {distributed!r}; use "auto", "fsdp" or None')
        if distributed == "fsdp" and isinstance(optimizer, torch.optim.Optimizer):
            raise Error("fully_shard replaces the parameters: give the optimizer's name or class, not an instance")
        if ema is not None and not 0 < ema < 1:
            raise Error(f"ema is {ema!r}; it must be greater than 0 and less than 1, as in 0.999")
        if not isinstance(accumulate, int) or accumulate < 1:
            raise Error(f"accumulate is {accumulate!r}; it must be a whole number of micro-batches, at least 1")
        if clip_norm is not None and not clip_norm > 0:
            raise Error(f"clip_norm is {clip_norm!r}; it must be greater than 0")
        self.result, self.module, self.loss_fn = result, result.module, loss_fn
        self.device = device_of(self.module)
        self.accumulate, self.clip_norm, self.total_steps = accumulate, clip_norm, total_steps
        self.lr, self.given_schedule = lr, schedule
        self.seen_targets: list[tuple[torch.Size, torch.dtype]] | None = None
        self.parallel = wrap(result, distributed, self.device)
        self.model: nn.Module = self.parallel.model
        self.given = isinstance(optimizer, torch.optim.Optimizer)
        self.optimizer, why = optimizers.build(optimizer, self.module, lr, weight_decay, optimizer_options, decay_norms)
        self.settings: list[Setting] = [Setting("optimizer", type(self.optimizer).__name__, why)]
        self.schedule = schedules.build(schedule, self.optimizer, lr, total_steps)
        if self.schedule is not None:
            self.settings.append(Setting("schedule", type(self.schedule).__name__, "stepped once an optimizer step"))
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.scaler = self._scaler()
        self._normalize = self._constants(normalize)
        self.settings.append(Setting("accumulate", accumulate, "micro-batches for each optimizer step"))
        self.settings.append(Setting("clip_norm", clip_norm, "of unscaled gradients, on the device"))
        self.settings.append(Setting("gradients", None, "set to None after each step"))
        self.settings.append(Setting("distributed", self.parallel.name, self.parallel.why))
        self.average = Average(self.module, ema) if ema is not None else None
        self.settings.append(Setting("ema", ema, "moving average of the weights, on the device"))
        if self.device.type == "cuda":
            self.settings.append(Setting("cudnn.benchmark", True, "inside steps whose shapes are those of the last"))
        self.steps = 0
        self._pending: Flag | None = None
        self._shapes: tuple = ()
        self._looked = False
        self.restart()

    def restart(self) -> None:
        """Forget an incomplete accumulation."""
        self._seen = 0  # micro-batches since the last optimizer step
        self._weight = 0.0  # their items, in units of the first one's
        self._first = 1
        self.optimizer.zero_grad(set_to_none=True)

    # ------------------------------------------------------------------ building
    def _scaler(self) -> Scaler | None:
        dtype = self.result._pipeline.facts.low_precision
        self.settings.append(Setting("precision", str(dtype or "float32").removeprefix("torch."), "the autocast pass"))
        if dtype is not torch.float16:
            return None
        self.settings.append(Setting("scaler", "on the device", "float16 gradients underflow without one"))
        return Scaler(self.device)

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
        if not self._looked:
            self._look()
        if self.seen_targets is None:
            self.seen_targets = [(t.shape, t.dtype) for t in targets if isinstance(t, torch.Tensor)]
        inputs, targets = to_device((inputs, targets), self.device)
        items = _items(inputs)
        with self._settings_of_torch(inputs), self.parallel.micro_batch(last):
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
        """Step on an incomplete accumulation; gradients are averaged over what was seen. Nothing seen: nothing done.

        In a process group every process must call it; they may have seen different numbers of micro-batches.
        """
        if not self._seen and type(self.parallel) is Parallel:
            return
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if gradients and self._first != 1:
            torch._foreach_mul_(gradients, float(self._first))
        total = self.parallel.flush(self._seen, self._weight * self._first)
        if total:
            self._weight = total
            self._step()

    def evaluate(self, inputs: Any, *targets: Any, averaged: bool = False) -> tuple[torch.Tensor, Any]:
        """Loss and output of the eval graph, in inference mode; every module's training flag is restored.

        Args:
            averaged: with the moving average of the weights (`ema=`) in place of the weights.
        """
        if averaged and self.average is None:
            raise Error("averaged=True needs a moving average: build the step with ema=0.999 or the like")
        inputs, targets = to_device((inputs, targets), self.device)
        flags = [(m, m.training) for m in self.module.modules()]
        weights = self.average.in_place() if averaged and self.average is not None else contextlib.nullcontext()
        try:
            self.module.eval()
            with weights, torch.inference_mode():
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
            self.parallel.agree(self.scaler.found)
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
        else:
            self.optimizer.step()
        if self.average is not None:
            self.average.update(self.scaler.found if self.scaler is not None else None)
        self.steps += 1
        self.restart()
        if self.schedule is not None:
            if self.scaler is None:
                self._schedule_step()
            else:  # whether the step counted is known on the device: asked at the next step, when the answer is there
                self._pending = Flag(self.scaler.found)

    def _advance(self) -> None:
        """Advance the schedule for the step before, if it counted."""
        if self._pending is not None:
            counted = not self._pending
            self._pending = None
            if counted:
                self._schedule_step()

    def _schedule_step(self) -> None:
        assert self.schedule is not None
        if self.total_steps is not None and self.schedule.last_epoch + 1 >= self.total_steps:
            return  # the last step of the schedule has been taken
        self.schedule.step()

    @contextlib.contextmanager
    def _settings_of_torch(self, inputs: Any) -> Iterator[None]:
        """torch's global settings as this step wants them, the user's again afterwards."""
        if self.device.type != "cuda":
            yield
            return
        shapes = tuple(t.shape for t in tensors_in(inputs))
        static, self._shapes = shapes == self._shapes, shapes
        was = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = static
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = was

    def _look(self) -> None:
        """Say once which debug APIs are on."""
        self._looked = True
        if found := debug_apis():
            self.settings.append(Setting("debug APIs", tuple(found), "on at the first step: each makes steps slower"))
            warnings.warn(f"fxspeed: on in training steps: {'; '.join(found)}", stacklevel=3)

    # ------------------------------------------------------------------ state
    @property
    def skipped_steps(self) -> int:
        """Steps that the scaler skipped. Reads from the device."""
        return int(self.scaler.skipped) if self.scaler is not None else 0

    @property
    def source(self) -> str:
        """The step as Python that needs torch alone: a class `TrainStep(model)`, as `result.save` writes it.

        Raises:
            Error: it is spread over processes, or made of code of the user's that cannot be written.
        """
        return step_source(self)

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
            "average": self.average.state_dict() if self.average is not None else None,
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
        for name in ("schedule", "scaler", "average"):
            if (state.get(name) is None) != (getattr(self, name) is None):
                found = "without" if state.get(name) is None else "with"
                raise Error(f"the state was taken {found} a {name}; build the step alike")
        try:
            self.module.load_state_dict(state["module"])
        except RuntimeError as error:
            raise Error(f"the state is of another module: {error}") from error
        self.optimizer.load_state_dict(state["optimizer"])
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
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
