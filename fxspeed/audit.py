"""What makes the host wait in a training step, and what travels between host and device."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fxspeed.accelerator import Accelerator, Real
from fxspeed.errors import Error
from fxspeed.example import device_of
from fxspeed.graph.regions import Region
from fxspeed.graph.state import preserved_rng
from fxspeed.graph.structure import tensors_in
from fxspeed.module import Entry, program_of
from fxspeed.result import Optimized
from fxspeed.train.batch import by_name, default_loss
from fxspeed.train.debug import debug_apis
from fxspeed.train.optimizers import count_on_device
from fxspeed.train.snapshot import no_trace
from fxspeed.train.step import TrainStep

_UNNAMED = "an operation that waits for the device"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One place that makes steps slower.

    Attributes:
        kind: "host read" (the host waits for a value), "copy to host", "copy to device", "asynchronous copy" (nobody
            waits for it), "made from host data" (a tensor built from Python values on the device, or an array copied),
            "debug API".
        what: the operation.
        place: "file:line" of the user's code; empty for debug APIs.
        count: how often in one optimizer step.
    """

    kind: str
    what: str
    place: str
    count: int = 1

    def __str__(self) -> str:
        return f"{self.count:4d} x {self.kind}: {self.what}" + (f"\n       {self.place}" if self.place else "")


@dataclasses.dataclass(frozen=True)
class Audit:
    """What `audit` found; `str()` prints it.

    Attributes:
        findings: in the order in which they came up.
        device: the device's name as the code saw it.
        note: how it was found out.
    """

    findings: tuple[Finding, ...]
    device: str
    note: str

    @property
    def ok(self) -> bool:
        """Nothing makes the host wait: nothing was found, or asynchronous copies alone."""
        return all(f.kind == "asynchronous copy" for f in self.findings)

    @property
    def host_reads(self) -> int:
        """How often the host waits for the device in one step."""
        return sum(f.count for f in self.findings if f.kind in ("host read", "copy to host"))

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self) | {"ok": self.ok, "host_reads": self.host_reads}

    def __str__(self) -> str:
        lines = [str(f) for f in self.findings] or ["nothing makes the host wait, and nothing is copied"]
        return "\n".join([*lines, f"({self.note})"])


def audit(step_or_module: TrainStep | Optimized | nn.Module, inputs: Any = None, *targets: Any) -> Audit:
    """Find each host read, each copy between host and device, each tensor made from host data and each debug API.

    One optimizer step is run (or forward and, in train mode, backward of a module), after one that warms up. Without
    a GPU it runs on a fake accelerator: the values are the CPU's, the code sees a CUDA device, and what is on the
    device is kept account of, beginning with parameters, buffers, optimizer state and the inputs. On a GPU, CUDA's
    sync debug mode reports too (torch.cuda.set_sync_debug_mode). Regions run uncompiled. Nothing is changed: not the
    weights, the optimizer, the counters nor random numbers.

    Args:
        step_or_module: a training step, what `optimize` returned, or any module.
        inputs: a tensor, a tuple (positional) or a dict (keywords), as the step takes them; left out for a result that
            has example inputs.
        targets: for the step's loss.

    Raises:
        Error: inputs are missing; or what the code itself raises.
    """
    what = step_or_module
    if isinstance(what, Optimized):
        if inputs is None:
            args, kwargs = what.example
            inputs = {**by_name(what.module, args), **kwargs}
        what = what.module
    if not isinstance(what, (TrainStep, nn.Module)):
        raise Error(f"audit takes a training step, a result of optimize or a module, not a {type(what).__name__}")
    if inputs is None:
        raise Error("audit needs inputs to run on: audit(step, inputs, *targets) or audit(module, inputs)")
    device = what.device if isinstance(what, TrainStep) else device_of(what)
    if device.type != "cpu":
        return _audit(what, inputs, targets, Real(device, audit.__code__), "ran on the device")
    fake = "ran on a fake accelerator that code sees as"
    try:
        return _audit(what, inputs, targets, Accelerator("cuda:0", audit.__code__), f"{fake} cuda:0")
    except Exception as error:  # kernels of its own, perhaps: then under the name of what is there
        note = f"{fake} cpu; as cuda:0 it raised {type(error).__name__}: {error}"
        return _audit(what, inputs, targets, Accelerator("cpu", audit.__code__), note)


def _audit(what: TrainStep | nn.Module, inputs: Any, targets: tuple, accelerator: Accelerator, note: str) -> Audit:
    _run(what, inputs, targets, accelerator)
    counts = accelerator.events
    named = {place for _, operation, place in counts if operation != _UNNAMED}
    findings = [Finding(*key, n) for key, n in counts.items() if key[1] != _UNNAMED or key[2] not in named]
    apis = [Finding("debug API", name, "") for name in debug_apis()]
    return Audit((*findings, *apis), str(accelerator.device), note)


def _run(what: TrainStep | nn.Module, inputs: Any, targets: tuple, accelerator: Accelerator) -> None:
    """One round without and one with the accelerator's account."""
    if isinstance(what, TrainStep):
        step = what
        scheduled = step.schedule, step.total_steps
        with no_trace(step):
            step.schedule, step.total_steps = scheduled
            _round(step, inputs, targets)
            step.optimizer.state.clear()  # made anew under the accelerator's eyes
            if not step.given:
                count_on_device(step.optimizer)
            average = step.average.weights if step.average is not None else None
            accelerator.put(tensors_in([inputs, targets, step.scaler, step._normalize, average]))
            with _uncompiled(step.module, accelerator), _named(step, accelerator.device):
                with _synchronizing(accelerator), accelerator.running():
                    _round(step, inputs, targets)
                    accelerator.events.clear()
                    _round(step, inputs, targets)
        return
    module = copy.deepcopy(what)
    with preserved_rng():
        _call(module, inputs)
        accelerator.put(tensors_in(inputs))
        with _uncompiled(module, accelerator), _synchronizing(accelerator), accelerator.running():
            _call(module, inputs)


def _round(step: TrainStep, inputs: Any, targets: tuple) -> None:
    step.steps = 0  # whatever is left of the schedule, this is a step within it
    for _ in range(step.accumulate):
        step(inputs, *targets)


def _call(module: nn.Module, inputs: Any) -> None:
    if isinstance(inputs, dict):
        output = module(**inputs)
    else:
        output = module(*inputs) if isinstance(inputs, tuple) else module(inputs)
    if module.training and any(t.requires_grad for t in tensors_in(output)):
        default_loss(output).backward()


@contextlib.contextmanager
def _named(step: TrainStep, device: torch.device) -> Iterator[None]:
    """The step takes `device` for the place of its module."""
    was, step.device = step.device, device
    try:
        yield
    finally:
        step.device = was


@contextlib.contextmanager
def _uncompiled(module: nn.Module, accelerator: Accelerator) -> Iterator[None]:
    """The module and what its graphs hold are on the device; the graphs run without compiled code."""
    programs = [(m, p, list(p.entries)) for m in module.modules() if (p := program_of(m))]
    accelerator.put((*module.parameters(), *module.buffers()))
    for owner in module.modules():
        accelerator.put(t for t in vars(owner).values() if isinstance(t, torch.Tensor))
    try:
        for root, program, entries in programs:
            plain = [Entry(e.trace, e.before, e.retired) for e in entries]
            for entry in plain:
                entry.attach(root, "simulate")
                accelerator.put(_constants(entry.trace.constants))
            program.entries[:] = plain
        yield
    finally:
        for _, program, entries in programs:
            program.entries[:] = entries


def _constants(constants: dict[str, Any]) -> Iterator[torch.Tensor]:
    for value in constants.values():
        if isinstance(value, Region):
            yield from _constants(value.constants)
        elif isinstance(value, torch.Tensor):
            yield value


@contextlib.contextmanager
def _synchronizing(accelerator: Accelerator) -> Iterator[None]:
    """On CUDA, its sync debug mode: operations that wait and that no rule here knows are reported too."""
    if not isinstance(accelerator, Real) or accelerator.device.type != "cuda":
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    said = warnings.showwarning

    def show(message: Any, category: Any, *rest: Any, **options: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            accelerator.report("host read", _UNNAMED)
        else:
            said(message, category, *rest, **options)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)
