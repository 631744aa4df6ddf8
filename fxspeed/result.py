"""What `optimize` returns: the module, what changed, the diff, the report, the way back."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from fxspeed.emit.diff import unified
from fxspeed.emit.package import write
from fxspeed.emit.source import render
from fxspeed.errors import Error
from fxspeed.example import device_of, real_inputs
from fxspeed.graph.regions import bind
from fxspeed.graph.structure import map_tensors, tensors_in
from fxspeed.module import Program, program_of
from fxspeed.passes.base import Change, Skip


class Optimized:
    """An optimized model.

    Attributes:
        module: drop-in module of the user's class.
    """

    def __init__(self, module: nn.Module, pipeline: Any, example: tuple[tuple, dict[str, Any]] = ((), {})):
        self.module = module
        self._pipeline = pipeline
        self._step: Any = None
        self._example = map_tensors(example, _remembered, torch.Tensor)

    @property
    def example(self) -> tuple[tuple, dict[str, Any]]:
        """Inputs `(args, kwargs)` of the shapes `optimize` was given: floats drawn anew, few integers as they were.

        Raises:
            Error: it was given none.
        """
        if not tensors_in(self._example):
            raise Error("optimize() was given no example inputs; give inputs here")
        args, kwargs = self._example
        device = device_of(self.module)
        return map_tensors(real_inputs(args, kwargs, self.module, None), lambda t: t.to(device), torch.Tensor)

    @property
    def program(self) -> Program:
        return self.module._fxspeed

    def programs(self) -> Iterator[tuple[str, Program]]:
        """The programs of the model and of modules inside those that stayed Python, with their paths."""
        for path, module in self.module.named_modules():
            if (program := program_of(module)) is not None:
                yield path, program

    def _records(self) -> Iterator[Change | Skip]:
        for path, program in self.programs():
            found: list[Change | Skip] = list(program.rewrite.facts.records)
            whole = [
                r for r in found if isinstance(r, Skip) and r.pass_name == "capture" and r.what == "open the module"
            ]
            reasons = [e.retired for e in program.entries if e.retired] + [program.eager] * (not whole)
            found += [Skip("capture", "the whole model", "run the graphs", r) for r in dict.fromkeys(reasons) if r]
            for record in found:
                yield dataclasses.replace(record, target=inside(path, record.target)) if path else record

    @property
    def changes(self) -> tuple[Change, ...]:
        """What was rewritten."""
        return tuple(r for r in self._records() if isinstance(r, Change))

    @property
    def skipped(self) -> tuple[Skip, ...]:
        """What could have been rewritten and was not, with the reason."""
        return tuple(r for r in self._records() if isinstance(r, Skip))

    @property
    def broken(self) -> tuple[str, ...]:
        """Names of passes that failed verification and were rolled back."""
        return tuple(name for _, program in self.programs() for name in program.rewrite.facts.broken)

    @property
    def train_graph(self) -> fx.GraphModule:
        """The rewritten training graph; it shares the module's parameters."""
        return self._graph(True)

    @property
    def eval_graph(self) -> fx.GraphModule:
        """The rewritten eval graph; it shares the module's parameters."""
        return self._graph(False)

    def _graph(self, training: bool) -> fx.GraphModule:
        for entry in self.program.entries:
            if entry.trace.training is training:
                return bind(entry.trace.graph, entry.trace.constants, self.module)
        why = self.program.eager or "no call has been captured yet; give optimize() example inputs or call the module"
        raise Error(f"there is no {'training' if training else 'eval'} graph: {why}")

    def source(self, mode: str = "train") -> tuple[str, str]:
        """The graph of a mode as Python, before and after; with those inside of modules that stayed Python."""
        pairs = []
        for path, program in self.programs():
            known = program.rewrite.facts.texts
            for entry in program.entries if mode not in known else ():
                if entry.trace.training is (mode == "train") and entry.before is not None:
                    root = self.module.get_submodule(path)
                    before, after = (render(t.graph, t.constants, root) for t in (entry.before, entry.trace))
                    known[mode] = before, after
            if mode in known:
                title = f"# {path}\n" if path else ""
                pairs.append([f"{title}{text}" for text in known[mode]])
        return "\n\n".join(p[0] for p in pairs), "\n\n".join(p[1] for p in pairs)

    def diff(self, color: bool = False) -> str:
        """Unified diff of the training graph before against after; empty if nothing changed."""
        return unified(*self.source("train"), color=color)

    @property
    def report(self) -> Any:
        """Table of all changes and skips; `str()` prints it, `.to_dict()` is plain data."""
        from fxspeed.emit.report import Report

        return Report(
            type(self.module).__name__,
            self.changes,
            self.skipped,
            self._pipeline.facts.timelines,
            self._pipeline.facts.seconds,
        )

    def original_state_dict(self) -> dict[str, torch.Tensor]:
        """A state dict that the user's class loads strictly and that gives it the same outputs."""
        state = {k: v.detach() for k, v in self.module.state_dict().items()}
        for edit in reversed(self._pipeline.edits):
            edit.restore(state)
        return _in_order(state, self.module)

    def load_original_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load a state dict of the user's class.

        Raises:
            Error: keys are missing or too many, or shapes differ.
        """
        state = dict(state)
        for edit in self._pipeline.edits:
            edit.adopt(state)
        try:
            self.module.load_state_dict(state, strict=True)
        except RuntimeError as error:
            raise Error(f"this is no state dict of {type(self.module).__name__}: {error}") from error

    def train_step(self, loss_fn: Any, optimizer: Any = "adamw", **options: Any) -> Any:
        """The training step; see `fxspeed.TrainStep`."""
        from fxspeed.train.step import TrainStep

        self._step = TrainStep(self, loss_fn, optimizer, **options)
        return self._step

    def save(self, directory: str | os.PathLike[str], step: Any = None) -> None:
        """Write a standalone package: the rewritten graphs and a training step as readable source that needs torch
        alone, and the weights. `python -m <directory>` trains a few steps.

        Args:
            directory: new or empty; its last part is the package's name.
            step: the `TrainStep` to write; left out, the last that `train_step` made, or else one with AdamW.

        Raises:
            Error: the directory holds something; a part of the model stayed Python or needs the user's code.
        """
        from fxspeed.train.step import TrainStep

        entries = {"train" if e.trace.training else "eval": e for e in reversed(self.program.entries)}
        if len(entries) < 2:
            self._graph("train" not in entries)  # says why there is none
        traces = {mode: entries[mode].trace for mode in ("train", "eval")}
        if step is None:
            step = self._step or TrainStep(self, None, distributed=None)  # type: ignore[arg-type]
        notes = [f"{c.pass_name}: {c.target}: {c.what}" for c in self.changes] or ["Nothing was changed."]
        write(directory, self.module, traces, self.example, notes, step.source)

    def __repr__(self) -> str:
        return f"Optimized({type(self.module).__name__}, {len(self.changes)} changes, {len(self.skipped)} skipped)"


def inside(path: str, target: str) -> str:
    """A record's target as the model around the module at `path` names it."""
    return target.replace("the whole model", path) if "the whole model" in target else f"{path}.{target}"


def _in_order(state: dict[str, torch.Tensor], module: nn.Module) -> dict[str, torch.Tensor]:
    """A bias stands behind its layer's weight, as torch.nn orders them."""
    ordered: dict[str, torch.Tensor] = {}
    own = module.state_dict().keys()
    back = {k for k in state if k not in own}
    for key, value in state.items():
        if key in back:
            continue
        ordered[key] = value
        bias = f"{key.removesuffix('weight')}bias"
        if key.endswith("weight") and bias in back:
            ordered[bias] = state[bias]
            back.discard(bias)
    ordered.update((k, state[k]) for k in back)
    return ordered


def _remembered(tensor: torch.Tensor) -> torch.Tensor:
    """What is kept of an example: its shape, and integers (tokens, labels) where they are few."""
    known = not (tensor.is_meta or isinstance(tensor, FakeTensor) or tensor.is_floating_point())
    return tensor.detach().cpu().clone() if known and tensor.numel() <= 1 << 16 else tensor.detach().to("meta")
