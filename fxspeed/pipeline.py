"""From a module and a call's inputs to rewritten graphs: capture, passes, verification, roll-back."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import nn

from fxspeed import verify as check
from fxspeed.emit.source import render
from fxspeed.errors import BudgetError, Error, Untraceable
from fxspeed.example import device_of, real_inputs
from fxspeed.graph.clone import plain_view
from fxspeed.graph.inputs import Dim
from fxspeed.graph.regions import Region
from fxspeed.graph.state import preserved_rng
from fxspeed.graph.trace import Trace, is_leaf, trace
from fxspeed.module import Entry, OptimizedMixin, Program, drop_in
from fxspeed.passes import Captured, Change, Edit, Pass, Skip
from fxspeed.passes.fuse_pointwise import FusedRegion
from fxspeed.passes.insert_norm import bare_convolutions
from fxspeed.records import Facts


@dataclasses.dataclass
class Pipeline:
    """The passes and what was asked of them. Callable on a module and a call's inputs: that call's rewritten graph.

    Attributes: `edits`, the changes of parameters made when the module was first optimized; `waiting`, whether nothing
    has been captured yet; `inner`, whether the module is a part of one that stayed Python.
    """

    passes: tuple[Pass, ...]
    options: dict[str, Any]
    dynamic: tuple[Dim, ...]
    verify: bool | Literal["full"]
    edits: list[Edit] = dataclasses.field(default_factory=list)
    facts: Facts = dataclasses.field(default_factory=Facts)
    waiting: bool = True
    inner: bool = False

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> list[Entry]:
        """Capture and rewrite a call of an optimized module.

        The first one (where `optimize` had no example inputs) as `optimize` does, in both modes; later ones in the
        module's present mode, and parameters stay as they are.
        """
        if self.waiting:
            with preserved_rng():
                entries = self.first(module, *real_inputs(args, kwargs, module, None))
            if not entries:
                raise Untraceable(self.facts.eager)
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
        passes = tuple(p for p in self.passes if not p.edits_module)
        captured, records, _ = self.rewrite(captured, passes)
        self.facts.add(records)
        return [Entry(rewritten, before[mode]) for mode, rewritten in captured.traces.items()]

    def first(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> list[Entry]:
        """Entries of both modes, and programs for the children of what stays Python; none if the whole does."""
        self.waiting = False
        entries, self.facts.texts, self.facts.eager = _rewrite_now(self, module, args, kwargs)
        for path in dict.fromkeys(leaf.path for e in entries for leaf in e.trace.leaves) if entries else ("",):
            self.adopt(module.get_submodule(path))
        return entries

    def adopt(self, parent: nn.Module) -> None:
        """Make drop-ins of the children of a module that stays Python; each is captured at its first call.

        Parameters of theirs are left as they are: the module around them may read them.
        """
        passes = tuple(p for p in self.passes if not p.edits_module)
        options = dict(self.options)
        if not isinstance(options["memory_budget"], float):
            options["memory_budget"] = None  # bytes speak of the whole, which no graph shows
        for child in openable(parent):
            drop_in(child, Program([], Pipeline(passes, options, self.dynamic, self.verify, inner=True)))

    def capture(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], modes: Iterable[str]) -> Captured:
        """The graphs of `module` in the given modes; its training flags are as before afterwards."""
        flags = {m: m.training for m in module.modules()}
        traces: dict[str, Trace] = {}
        try:
            for mode in modes:
                if module.training is not (mode == "train"):
                    module.train(mode == "train")
                traces[mode] = trace(plain_view(module), args, kwargs, self.dynamic)
        finally:
            for m, flag in flags.items():
                m.training = flag
        return Captured(module, traces, options={**self.options, "device": self.options["device"] or device_of(module)})

    def rewrite(self, captured: Captured, passes: tuple[Pass, ...]) -> tuple[Captured, list[Change | Skip], list[str]]:
        """Run the passes, verify, roll back what differs. Returns also the passes that were rolled back."""
        start = captured
        records, broken = [*self._leaves(start), *self._specialized(start)], []
        current, said = self.run(start, passes)
        if self.verify and any(isinstance(r, Change) for r in said):
            if problem := self._compiled_regions(current):  # no need to look for the culprit
                name = "fuse_pointwise"
                passes = tuple(p for p in passes if p.name != name)
                current, said = self.run(start, passes)
                said.append(Skip(name, "the whole model", "rolled back", f"verification: {problem}"))
                broken.append(name)
            if self.verify == "full" or self._problem(start, current):
                current, found, more = self._one_by_one(start, passes)
                said = [*found, *(r for r in said if r.what == "rolled back")]
                broken += more
        return current, [*records, *said], broken

    def run(self, captured: Captured, passes: tuple[Pass, ...]) -> tuple[Captured, list[Change | Skip]]:
        """Run the passes, unverified."""
        records: list[Change | Skip] = []
        for one in passes:
            attempt = captured.copy()
            try:
                said = one.run(attempt)
            except Error as error:
                if not (self.inner and isinstance(error, BudgetError)):
                    raise
                said, attempt = [Skip(one.name, "the whole model", "keep the budget", str(error))], captured
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
            attempt, said = self.run(current, (one,))
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
        traces = captured.traces.values()
        words = dict.fromkeys(w for one in traces for w in one.specialized)
        words |= dict.fromkeys(f"the graph is one for {w}" for one in traces for w in one.ties)
        return [
            Skip("capture", "inputs", "keep the size dynamic", f"{w}; other sizes are captured anew") for w in words
        ]


def _regions(constants: dict[str, Any]) -> Iterable[Region]:
    for value in constants.values():
        if isinstance(value, Region):
            yield value
            yield from _regions(value.constants)


def openable(parent: nn.Module) -> Iterator[nn.Module]:
    """The nearest modules below `parent` that could be captured by themselves."""
    for child in parent.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from openable(child)
        elif is_leaf(child) or isinstance(child, (torch.jit.ScriptModule, OptimizedMixin, nn.ParameterList)):
            continue
        elif "forward" not in vars(child):
            yield child


def _rewrite_now(pipeline: Pipeline, module: nn.Module, args: tuple, kwargs: dict[str, Any]):
    facts = pipeline.facts
    modes = ["train", "eval"] if module.training else ["eval", "train"]
    try:
        captured = pipeline.capture(module, args, kwargs, modes)
    except Untraceable as error:
        facts.add([Skip("capture", f"the whole model ({type(module).__name__})", "open the module", str(error))])
        return [], {}, str(error)
    facts.captured_seconds = time.perf_counter()
    if pipeline.verify:
        for mode, one in list(captured.traces.items()):
            flags = {m: m.training for m in module.modules()}
            try:
                if module.training is not one.training:
                    module.train(one.training)
                problem = check.captured_equals_eager(one, plain_view(module), args, kwargs)
            finally:
                for m, flag in flags.items():
                    m.training = flag
            if problem:
                facts.add([Skip("capture", "the whole model", f"capture in {mode} mode", f"verification: {problem}")])
                facts.broken.append("capture")
                return [], {}, f"the captured graph differs from the model: {problem}"
    before = {mode: render(t.graph, t.constants, module) for mode, t in captured.traces.items()}
    records: list[Change | Skip] = []
    if wanted := tuple(p for p in pipeline.passes if p.changes_function):
        changed, records = pipeline.run(captured, wanted)
        for edit in changed.edits:
            edit.apply(module)
        pipeline.edits += changed.edits
        captured = pipeline.capture(module, args, kwargs, modes)
    elif bare := bare_convolutions(captured):
        why = f"opt-in, since it changes the function: no norm stands between an activation and {', '.join(bare)}"
        records = [Skip("insert_norm", "the whole model", "insert BatchNorm", why)]
    plain = dict(captured.traces)
    captured, said, broken = pipeline.rewrite(captured, tuple(p for p in pipeline.passes if not p.changes_function))
    facts.add([*records, *said])
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
