"""The main entry: capture a model, run the passes, verify each, and put the drop-in module together."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn

from fxspeed import verify as check
from fxspeed.emit.source import render
from fxspeed.errors import BudgetError, Error, Untraceable
from fxspeed.example import device_of, real_inputs
from fxspeed.graph.regions import Region
from fxspeed.graph.state import preserved_rng
from fxspeed.graph.trace import Trace, trace
from fxspeed.module import Entry, Program, drop_in
from fxspeed.passes import Captured, Change, Edit, Pass, Skip, resolve
from fxspeed.passes.autocast import choose
from fxspeed.passes.checkpoint import parse_bytes
from fxspeed.passes.fuse_pointwise import FusedRegion
from fxspeed.result import Facts, Optimized


@dataclasses.dataclass
class Pipeline:
    """The passes and what was asked of them. Callable on a module and a call's inputs: that call's rewritten graph.

    Attributes: `edits`, the changes of parameters made when the module was first optimized; `waiting`, whether nothing
    has been captured yet.
    """

    passes: tuple[Pass, ...]
    options: dict[str, Any]
    dynamic: tuple[str | int, ...]
    verify: bool | Literal["full"]
    edits: list[Edit] = dataclasses.field(default_factory=list)
    facts: Facts = dataclasses.field(default_factory=Facts)
    waiting: bool = True

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> list[Entry]:
        """Capture and rewrite a call of an optimized module.

        The first one (where `optimize` had no example inputs) as `optimize` does, in both modes; later ones in the
        module's present mode, and parameters stay as they are.
        """
        if self.waiting:
            self.waiting = False
            with preserved_rng():
                entries, self.facts.texts, reason = _rewrite_now(self, module, *real_inputs(args, kwargs, module, None))
            if not entries:
                raise Untraceable(reason)
            return entries
        captured = self.capture(module, args, kwargs, [("train" if module.training else "eval")])
        for edit in self.edits:
            for captured_trace in captured.traces.values():
                if reason := edit.holds(captured_trace, module):
                    raise Error(
                        f"for these inputs {getattr(edit, 'path', 'a layer')} is used in another way ({reason}), but "
                        "its bias is gone; call optimize() with inputs of this kind, or leave drop_bias out"
                    )
        before = dict(captured.traces)
        passes = tuple(p for p in self.passes if p.name != "drop_bias")
        captured, records, _ = self.rewrite(captured, passes)
        self.facts.add(records)
        return [Entry(rewritten, before[mode]) for mode, rewritten in captured.traces.items()]

    def capture(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], modes: Iterable[str]) -> Captured:
        """The graphs of `module` in the given modes; its training flags are as before afterwards."""
        flags = {m: m.training for m in module.modules()}
        traces: dict[str, Trace] = {}
        try:
            for mode in modes:
                if module.training is not (mode == "train"):
                    module.train(mode == "train")
                traces[mode] = trace(_plain(module), args, kwargs, self.dynamic)
        finally:
            for m, flag in flags.items():
                m.training = flag
        return Captured(module, traces, options={**self.options, "device": self.options["device"] or device_of(module)})

    def rewrite(self, captured: Captured, passes: tuple[Pass, ...]) -> tuple[Captured, list[Change | Skip], list[str]]:
        """Run the passes, verify, roll back what differs. Returns also the passes that were rolled back."""
        start = captured
        records, broken = [*self._leaves(start), *self._specialized(start)], []
        current, said = self._run(start, passes)
        if self.verify and any(isinstance(r, Change) for r in said):
            if problem := self._compiled_regions(current):  # no need to look for the culprit
                name = "fuse_pointwise"
                passes = tuple(p for p in passes if p.name != name)
                current, said = self._run(start, passes)
                said.append(Skip(name, "the whole model", "rolled back", f"verification: {problem}"))
                broken.append(name)
            if self.verify == "full" or self._problem(start, current):
                current, found, more = self._one_by_one(start, passes)
                said = [*found, *(r for r in said if r.what == "rolled back")]
                broken += more
        return current, [*records, *said], broken

    def _run(self, captured: Captured, passes: tuple[Pass, ...]) -> tuple[Captured, list[Change | Skip]]:
        records: list[Change | Skip] = []
        for one in passes:
            attempt = captured.copy()
            try:
                said = one.run(attempt)
            except Error:
                raise
            except Exception as error:
                said = [Skip(one.name, "the whole model", "run", f"{type(error).__name__}: {error}")]
                attempt = captured
            captured = attempt
            records += said
        return captured, records

    def _one_by_one(self, start: Captured, passes: tuple[Pass, ...]):
        """Every pass checked by itself against the graphs before it; those that differ are rolled back."""
        records: list[Change | Skip] = []
        broken: list[str] = []
        current = start
        for one in passes:
            attempt, said = self._run(current, (one,))
            if not any(isinstance(r, Change) for r in said):
                records += said
                continue
            problem = self._problem(current, attempt)
            if problem:
                broken.append(one.name)
                records.append(Skip(one.name, "the whole model", "rolled back", f"verification: {problem}"))
            else:
                records += said
                current = attempt
        return current, records, broken

    def _problem(self, before: Captured, after: Captured) -> str:
        if problem := check.same_in_float64(before, after):
            return problem
        dtype = after.options.get("low_precision")
        if dtype is not None and before.options.get("low_precision") is None:
            if problem := check.low_precision_error(before, after, after.options["device"], dtype):
                return problem
        return ""

    def _compiled_regions(self, captured: Captured) -> str:
        done: set[tuple] = set()
        for one in captured.traces.values():
            for region in _regions(one.constants):
                if isinstance(region, FusedRegion) and region.key not in done:
                    done.add(region.key)
                    if problem := check.region_matches(region, captured.root):
                        return problem
        return ""

    def _leaves(self, captured: Captured) -> list[Skip]:
        found: dict[str, Skip] = {}
        for one in captured.traces.values():
            for leaf in one.leaves:
                label = f"{leaf.path or 'the whole model'} ({leaf.kind})"
                found.setdefault(leaf.path, Skip("capture", label, "open the module", leaf.reason, source=leaf.source))
        return list(found.values())

    def _specialized(self, captured: Captured) -> list[Skip]:
        words = dict.fromkeys(w for one in captured.traces.values() for w in one.specialized)
        return [
            Skip("capture", "inputs", "keep the size dynamic", f"{w}; other sizes are captured anew") for w in words
        ]


def _regions(constants: dict[str, Any]) -> Iterable[Region]:
    for value in constants.values():
        if isinstance(value, Region):
            yield value
            yield from _regions(value.constants)


def _plain(module: nn.Module) -> nn.Module:
    """A module that is already optimized as its user's class sees it; the tensors and children are the same."""
    original = getattr(module, "_fxspeed_class", None)
    if original is None:
        return module
    view = original.__new__(original)
    view.__dict__.update({k: v for k, v in module.__dict__.items() if k != "_fxspeed"})
    return view


def optimize(
    model: nn.Module,
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
    *,
    passes: Iterable[str | Pass] | None = None,
    memory_budget: float | int | str | None = None,
    precision: str = "auto",
    device: torch.device | str | None = None,
    dynamic: Iterable[str | int] = ("batch",),
    verify: bool | Literal["full"] = True,
    inplace: bool = False,
) -> Optimized:
    """Rewrite a model's training and eval graphs to be faster and smaller, without changing what it computes.

    Args:
        model: any module, in train or eval mode. Never modified; with `inplace` the result shares its tensors.
        args, kwargs: example inputs: real, fake or meta tensors of typical shape; a single tensor is one argument.
            Without any, capture waits for the first call and uses its inputs.
        passes: names, `name{option=value}` texts or pass objects, in order; None for the default pipeline.
        memory_budget: the peak of a training step: a share of the plain step's in (0, 1], bytes, or "6GiB".
        precision: "auto", "fp32", "bf16" or "fp16".
        device: default: where the parameters are.
        dynamic: dimensions that may change between calls: "batch", "sequence", "height", "width", or indices.
        verify: check the rewritten graphs against the plain ones; "full" after every pass; False not at all.
        inplace: share parameters and buffers with `model` instead of copying them.

    Raises:
        Error: bad options, or inputs that the model itself refuses.
        BudgetError: no plan keeps the budget; the message names the smallest peak that can be reached.
    """
    if not isinstance(model, nn.Module):
        raise Error(f"optimize() takes an nn.Module, not {type(model).__name__}; wrap a function in a module's forward")
    chosen = resolve(passes)
    place = torch.device(device) if device is not None else None
    choose(precision, place or device_of(model))
    if verify not in (True, False, "full"):
        raise Error(f'verify is {verify!r}; use True, False or "full"')
    options = {"memory_budget": _budget(memory_budget), "precision": precision, "device": place}
    if getattr(vars(model).get("forward"), "__func__", None) not in (None, type(model).forward):
        raise Error(
            f"{type(model).__name__} has a forward of its own instance; put it into a class, so that it can be copied"
        )
    pipeline = Pipeline(chosen, options, tuple(dynamic), verify)
    began = time.perf_counter()
    with preserved_rng():
        module = _copy(model, inplace)
        vars(module).pop("forward", None)  # the class's own, bound: it would hide the optimized one
        if place is not None and not inplace:
            module = module.to(place)
        args, kwargs = real_inputs(args, kwargs, module, place)
        entries: list[Entry] = []
        facts, eager = pipeline.facts, ""
        if args or kwargs or _takes_nothing(model):
            pipeline.waiting = False
            entries, facts.texts, eager = _rewrite_now(pipeline, module, args, kwargs)
        facts.seconds = time.perf_counter() - began
    program = Program(entries, pipeline)
    program.eager = eager
    return Optimized(drop_in(module, program), pipeline)


def _rewrite_now(pipeline: Pipeline, module: nn.Module, args: tuple, kwargs: dict[str, Any]):
    facts = pipeline.facts
    modes = ["train", "eval"] if module.training else ["eval", "train"]
    try:
        captured = pipeline.capture(module, args, kwargs, modes)
    except Untraceable as error:
        _run_once(_plain(module), args, kwargs)  # inputs that the model refuses are the caller's to mend
        facts.add([Skip("capture", f"the whole model ({type(module).__name__})", "open the module", str(error))])
        return [], {}, str(error)
    facts.captured_seconds = time.perf_counter()
    if pipeline.verify:
        for mode, one in list(captured.traces.items()):
            flags = {m: m.training for m in module.modules()}
            try:
                if module.training is not one.training:
                    module.train(one.training)
                problem = check.captured_equals_eager(one, _plain(module), args, kwargs)
            finally:
                for m, flag in flags.items():
                    m.training = flag
            if problem:
                facts.add([Skip("capture", "the whole model", f"capture in {mode} mode", f"verification: {problem}")])
                facts.broken.append("capture")
                return [], {}, f"the captured graph differs from the model: {problem}"
    before = {mode: render(t.graph, t.constants, module) for mode, t in captured.traces.items()}
    plain = dict(captured.traces)
    captured, records, broken = pipeline.rewrite(captured, pipeline.passes)
    facts.add(records)
    facts.broken += broken
    facts.timelines = {
        k: captured.options[f"{k}_timeline"] for k in ("plain", "planned") if f"{k}_timeline" in captured.options
    }
    facts.low_precision = captured.options.get("low_precision")
    for edit in captured.edits:
        edit.apply(module)
    pipeline.edits += captured.edits
    after = {mode: render(t.graph, t.constants, module) for mode, t in captured.traces.items()}
    entries = [Entry(t, plain[mode]) for mode, t in captured.traces.items()]
    return entries, {mode: (before[mode], after[mode]) for mode in before}, ""


def _run_once(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Run a copy of the model on the example inputs, to tell its own errors from ours."""
    with preserved_rng(), torch.no_grad():
        try:
            copied = copy.deepcopy(module)
        except Exception:
            return
        try:
            copied(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        except Exception as error:
            raise Error(
                f"{type(module).__name__} does not run on the example inputs: {type(error).__name__}: "
                f"{str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            ) from error


def _budget(budget: float | int | str | None) -> float | int | None:
    if budget is None or isinstance(budget, bool):
        return None
    if isinstance(budget, str):
        text = budget.strip()
        if text.replace(".", "", 1).isdigit() and "." in text:
            budget = float(text)
        else:
            budget = parse_bytes(text)
    if isinstance(budget, float) and not 0 < budget <= 1:
        raise BudgetError(f'memory budget {budget} is no share in (0, 1]; for bytes give an int or "6GiB"')
    if isinstance(budget, int) and budget <= 0:
        raise BudgetError(f"memory budget {budget} is no positive number of bytes")
    return budget


def _copy(model: nn.Module, inplace: bool) -> nn.Module:
    shared: dict[int, Any] = {}
    if inplace:
        shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    try:
        return copy.deepcopy(model, shared)
    except Exception as error:
        raise Error(
            f"{type(model).__name__} cannot be deep-copied ({type(error).__name__}: {error}); make it deep-copyable, "
            "since optimize() never changes the model it is given"
        ) from error


def _takes_nothing(model: nn.Module) -> bool:
    import inspect

    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return False
    return not list(parameters)
