"""The learning-rate range test."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

from fxspeed.errors import Error
from fxspeed.train.batch import split
from fxspeed.train.progress import progress
from fxspeed.train.snapshot import fresh, no_trace
from fxspeed.train.step import TrainStep


@dataclasses.dataclass(frozen=True)
class RangeTest:
    """The curve of a range test.

    Attributes:
        rates: learning rate of each optimizer step.
        losses: the loss of each, a mean over its micro-batches.
        smoothed: the losses' exponential moving average, corrected for its start.
        suggestion: where the smoothed loss falls fastest over log(rate); a peak rate for a schedule.
        diverged: the rate at which the test stopped, or None if it went through.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    suggestion: float
    diverged: float | None

    def __float__(self) -> float:
        return self.suggestion

    def __str__(self) -> str:
        end = f"diverged at {self.diverged:.2g}" if self.diverged is not None else "did not diverge"
        return f"learning rate {self.suggestion:.2g} ({len(self.rates)} steps to {self.rates[-1]:.2g}, {end})"


def find_lr(
    step: TrainStep,
    loader: Iterable[Any],
    *,
    low: float = 1e-7,
    high: float = 10.0,
    steps: int = 100,
    smoothing: float = 0.95,
    divergence: float = 4.0,
) -> RangeTest:
    """Raise the learning rate from step to step, watch the loss, suggest a rate. Leaves no trace.

    Weights, buffers, optimizer, schedule, scaler, random numbers and the loader's position are as before afterwards.
    A loader that is shorter than the test is iterated again.

    Args:
        step: the training step. Its schedule rests during the test; groups keep the ratio of their rates.
        loader: batches `(inputs, *targets)`, a tensor or a dict; anything that can be iterated more than once.
        low, high: first and last learning rate.
        steps: optimizer steps from `low` to `high`, equally far apart in log(rate).
        smoothing: factor of the moving average, in [0, 1).
        divergence: stop where the smoothed loss is over this many times its least, or not finite.

    Source: Smith, "Cyclical Learning Rates for Training Neural Networks", 2017 (the range test); the suggestion is the
    steepest descent, as in fastai's and Lightning's finders.

    Raises:
        Error: bad limits; a loader without batches or one that can be iterated only once; a loss that is not finite
            at once.
    """
    if not 0 < low < high:
        raise Error(f"low is {low!r} and high {high!r}; they must be 0 < low < high")
    if not isinstance(steps, int) or steps < 2:
        raise Error(f"steps is {steps!r}; it must be a whole number of at least 2")
    if not 0 <= smoothing < 1:
        raise Error(f"smoothing is {smoothing!r}; it must be in [0, 1)")
    if isinstance(loader, Iterator):
        raise Error("the loader is an iterator: its batches would be gone; give a DataLoader or a list")
    base = [float(g["lr"]) for g in step.optimizer.param_groups]
    top = max(base) or 1.0
    rates: list[float] = []
    losses: list[float] = []
    smoothed: list[float] = []
    average, diverged = 0.0, None
    with no_trace(step), fresh(loader) as own:
        step.module.train()
        batches = _endless(own)
        for i in progress(range(steps), "learning rates"):
            rate = low * (high / low) ** (i / (steps - 1))
            for group, initial in zip(step.optimizer.param_groups, base, strict=True):
                _set_rate(group, rate * (initial / top if initial else 1.0))
            total = 0.0
            for _ in range(step.accumulate):
                inputs, targets = split(next(batches))
                total += float(step(inputs, *targets)) / step.accumulate
            if not rates and not math.isfinite(total):
                raise Error(f"the loss is {total} at learning rate {low:.2g}: look at the data and the loss first")
            rates.append(rate)
            losses.append(total)
            average = smoothing * average + (1 - smoothing) * total
            smoothed.append(average / (1 - smoothing ** (i + 1)))
            if not math.isfinite(total) or (i > 0 and smoothed[-1] > divergence * min(smoothed)):
                diverged = rate
                break
    return RangeTest(tuple(rates), tuple(losses), tuple(smoothed), _steepest(rates, smoothed), diverged)


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if hasattr(group["lr"], "fill_"):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _steepest(rates: list[float], smoothed: list[float]) -> float:
    """The rate where the smoothed loss falls fastest over log(rate), the noisy ends left out."""
    finite = [i for i, value in enumerate(smoothed) if math.isfinite(value)]
    least = min(finite, key=lambda i: smoothed[i])
    inner = [i for i in finite if 0 < i < len(smoothed) - 1 and i <= least and i + 1 in finite]
    slopes = {i: smoothed[i + 1] - smoothed[i - 1] for i in inner}
    falling = {i: s for i, s in slopes.items() if s < 0}
    return rates[min(falling, key=lambda i: falling[i])] if falling else rates[max(least - 1, 0)]


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise Error("the loader has no batches")
