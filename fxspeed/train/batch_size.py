"""The largest batch that fits."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import nn

from fxspeed.cost.measure import measured_peak
from fxspeed.cost.memory import resident_bytes, step_timeline
from fxspeed.errors import Error
from fxspeed.graph.regions import bytes_of
from fxspeed.graph.structure import map_tensors, tensors_in
from fxspeed.passes.checkpoint import parse_bytes
from fxspeed.result import Optimized
from fxspeed.train.batch import by_name, default_loss
from fxspeed.train.snapshot import no_trace
from fxspeed.train.step import TrainStep


@dataclasses.dataclass(frozen=True)
class BatchTrial:
    """One batch size tried: bytes of the whole training measured, whether they fit, or why the model takes no such."""

    size: int
    bytes: int
    fits: bool
    error: str = ""


@dataclasses.dataclass(frozen=True)
class BatchSize:
    """What fits.

    Attributes:
        size: items in the largest batch that fits.
        bytes: measured with it: parameters, gradients, buffers, optimizer state, inputs, and the step's own tensors.
        limit: bytes that there are.
        predicted: the memory model's answer before any trial, or None where it had no graph to look at.
        lr: the step's learning rate, scaled from the example's batch to `size`.
        trials: what was tried, in order.
    """

    size: int
    bytes: int
    limit: int
    predicted: int | None
    lr: float
    trials: tuple[BatchTrial, ...]

    def __int__(self) -> int:
        return self.size

    def __str__(self) -> str:
        used = f"{self.bytes / 2**20:.0f} of {self.limit / 2**20:.0f} MiB"
        return f"batch size {self.size} ({used}, {len(self.trials)} trials), learning rate {self.lr:.3g}"


def find_batch_size(
    result: Optimized | TrainStep,
    inputs: Any = None,
    targets: tuple = (),
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    optimizer: Any = "adamw",
    lr: float = 1e-3,
    limit: int | str | None = None,
    largest: int = 65536,
    multiple_of: int = 1,
    rule: Literal["linear", "sqrt"] = "linear",
) -> BatchSize:
    """The largest batch whose training step fits: predicted by the memory model, proved by trial steps.

    Each trial is two whole steps (the first makes the optimizer's state). From the prediction the size is doubled while
    it fits or halved while it does not, then the gap is closed by bisection. Leaves no trace in weights, buffers,
    gradients, optimizer, random numbers or memory.

    Args:
        result: what `optimize` returned, or a step made of it.
        inputs, targets: one batch of any size, as the step takes it; its tensors are repeated along the first
            dimension. Default: the example inputs of `optimize`, and no targets.
        loss_fn: as for `train_step`; default the output's `loss`, or the mean square of all that the model returns.
        optimizer, lr: as for `train_step`, where `result` is no step.
        limit: bytes, or "6GiB". Default on CUDA: what the device has free or holds for this process.
        largest: do not look further.
        multiple_of: the size shall be a multiple of this.
        rule: how the learning rate grows with the batch: "linear" (Goyal et al., "Accurate, Large Minibatch SGD",
            2017) or "sqrt" (Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014).

    Raises:
        Error: not even `multiple_of` items fit; no limit is known.
    """
    if rule not in ("linear", "sqrt"):
        raise Error(f'rule is {rule!r}; use "linear" or "sqrt"')
    if multiple_of < 1 or largest < multiple_of:
        raise Error(f"multiple_of is {multiple_of} and largest {largest}; they must be 1 <= multiple_of <= largest")
    with _step_of(result, loss_fn, optimizer, lr) as step:
        if inputs is None:
            if isinstance(result, TrainStep) and not targets and loss_fn is None:
                raise Error("a step needs inputs and targets to try; give one batch of any size")
            args, kwargs = step.result.example
            inputs = args if not kwargs else {**by_name(step.module, args), **kwargs}
        example = next((t.shape[0] for t in tensors_in(inputs) if t.dim()), 0)
        if not example:
            raise Error("the inputs have no tensor with a batch dimension")
        device = step.device
        most = parse_bytes(limit) if limit is not None else _device_limit(device)
        predicted = _predict(step, inputs, example, most - resident_bytes(step.module) - _optimizer_bytes(step))
        own = sum(map(bytes_of, (*step.module.parameters(), *step.module.buffers())))
        own += sum(bytes_of(v) for s in step.optimizer.state.values() for v in s.values())

        def attempt(size: int) -> BatchTrial:
            batch = _of_size((inputs, targets), example, size)
            try:
                used = _whole_step(step, batch, device)
            except Exception as error:  # a size too small for the model, such as one item for a BatchNorm
                if size >= example:
                    raise
                return BatchTrial(size, 0, False, f"{type(error).__name__}: {error}")
            total = used + own + bytes_of(batch) if used is not None else most + 1
            return BatchTrial(size, total, total <= most)

        trials = _search(attempt, predicted or example, largest, multiple_of)
        best = max((t for t in trials if t.fits), key=lambda t: t.size, default=None)
        if best is None:
            least = min((t for t in trials if not t.error), key=lambda t: t.size, default=None)
            if least is None:
                raise Error(f"a batch of {trials[0].size} does not run ({trials[0].error}); give a larger limit")
            raise Error(
                f"a batch of {least.size} needs {least.bytes / 2**20:.1f} MiB, more than the limit of "
                f"{most / 2**20:.1f} MiB; give memory_budget= to optimize(), or a larger limit"
            )
        ratio = best.size / example
        base = max(float(g["lr"]) for g in step.optimizer.param_groups)
        rate = base * (ratio if rule == "linear" else math.sqrt(ratio))
    return BatchSize(best.size, best.bytes, most, predicted, rate, tuple(trials))


def _search(attempt: Callable[[int], BatchTrial], first: int, largest: int, multiple_of: int) -> list[BatchTrial]:
    """Double or halve from `first`, then bisect to 2% or one multiple."""
    rounded = lambda n: max(n // multiple_of, 1) * multiple_of
    top, low, high = rounded(largest), 0, 0
    size = min(rounded(first), top)
    trials: list[BatchTrial] = []
    while True:
        trials.append(attempt(size))
        if trials[-1].fits:
            low = size
        else:
            high = size
        if not low:
            if high <= multiple_of:
                return trials
            size = rounded(high // 2)
        elif not high:
            if low >= top:
                return trials
            size = min(2 * low if len(trials) > 1 else rounded(low * 9 // 8) + multiple_of, top)
        else:
            if high - low <= max(multiple_of, low // 50):
                return trials
            size = max(rounded((low + high) // 2), low + multiple_of)


def _predict(step: TrainStep, inputs: Any, example: int, room: int) -> int | None:
    """Items that the memory model fits into `room`.

    The peak is the largest of sums that are linear in the batch, so it is convex, and Newton's method from above or
    below ends at the answer.
    """
    entry = next((e for e in step.result.program.entries if e.trace.training), None)
    if entry is None or step.result.program.eager:
        return None
    own = [t.value for t in entry.trace.spec.tensors]
    first = size = next((t.shape[0] for t in own if t.dim()), 1)

    def peak(n: int) -> int:
        timeline = step_timeline(entry.trace, step.module, inputs=_of_size(own, first, n))
        return timeline.peak + bytes_of(_of_size(inputs, example, n))

    try:
        for _ in range(8):
            here, more = peak(size), max(size // 8, 1)
            slope = (peak(size + more) - here) / more
            if slope <= 0:
                return None
            last, size = size, max(size + math.floor((room - here) / slope), 1)
            if abs(size - last) <= size // 100:
                break
    except Exception:  # sizes that the graph does not take
        return None
    return size


def _whole_step(step: TrainStep, batch: tuple[Any, tuple], device: torch.device) -> int | None:
    """Peak bytes of two whole training steps above the start, or None where the device has not got them."""
    inputs, targets = batch

    def run() -> None:
        for _ in range(2 * step.accumulate):
            step(inputs, *targets)

    try:
        with no_trace(step):
            step.module.train()
            return measured_peak(run, device)
    except (torch.OutOfMemoryError, MemoryError):
        return None
    except RuntimeError as error:  # the CPU's allocator
        if "allocate memory" not in str(error):
            raise
        return None
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


@contextlib.contextmanager
def _step_of(result: Optimized | TrainStep, loss_fn: Any, optimizer: Any, lr: float) -> Iterator[TrainStep]:
    """The step itself, or one made for the trials; the gradients that the user has are put back."""
    if isinstance(result, TrainStep):
        yield result
        return
    if not isinstance(result, Optimized):
        raise Error(f"find_batch_size takes what optimize() returned or a TrainStep, not a {type(result).__name__}")
    gradients = [(p, p.grad) for p in result.module.parameters()]
    try:
        yield TrainStep(result, loss_fn or default_loss, optimizer, lr=lr)
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _of_size(tree: Any, example: int, size: int) -> Any:
    """Tensors whose first dimension is `example`, repeated to `size` items."""

    def change(t: torch.Tensor) -> torch.Tensor:
        if not t.dim() or t.shape[0] != example:
            return t
        index = torch.arange(size, device=t.device) % example
        return t.detach().index_select(0, index).requires_grad_(t.requires_grad)

    return map_tensors(tree, change, torch.Tensor)


def _optimizer_bytes(step: TrainStep) -> int:
    """Bytes of the optimizer's state, those that its first step will make included."""
    optimizer = step.optimizer
    present = sum(bytes_of(v) for s in optimizer.state.values() for v in s.values())
    if present:
        return present
    probe = nn.Parameter(torch.zeros(8, 8))
    probe.grad = torch.zeros_like(probe)
    try:
        known = inspect.signature(type(optimizer)).parameters
        small = type(optimizer)([probe], **{k: v for k, v in optimizer.defaults.items() if k in known and k != "fused"})
        small.step()
        each = sum(t.numel() for t in small.state[probe].values() if isinstance(t, torch.Tensor)) / probe.numel()
    except Exception:  # an optimizer of other habits: two moments, as most have
        each = 2
    return int(each * sum(map(bytes_of, step.parameters)))


def _device_limit(device: torch.device) -> int:
    if device.type != "cuda":
        raise Error(f'a {device.type} has no limit of its own that is worth reaching; give limit="8GiB" or bytes')
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)
