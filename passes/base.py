"""What a pass is: options, one method, and records of what it did and did not do."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from fxspeed.graph.trace import Trace


@dataclasses.dataclass(frozen=True)
class Change:
    """One rewrite. `saves` maps "bytes", "flops" or "host_reads" to an estimate for each step."""

    pass_name: str
    target: str
    what: str
    why: str
    saves: dict[str, int] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.pass_name}: {self.target}: {self.what} ({self.why})"


@dataclasses.dataclass(frozen=True)
class Skip:
    """One place where a pass could have fired and did not. `source` is "file:line" in the user's code."""

    pass_name: str
    target: str
    what: str
    why: str
    saves: dict[str, int] = dataclasses.field(default_factory=dict)
    source: str = ""

    @property
    def reason(self) -> str:
        return self.why

    def __str__(self) -> str:
        at = f" [{self.source}]" if self.source else ""
        return f"{self.pass_name}: {self.target}: {self.what} skipped: {self.why}{at}"


class Edit(Protocol):
    """A change of the module's own parameters or buffers, with its way back."""

    def apply(self, module: nn.Module) -> None:
        """Change `module`."""

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        """Turn a state dict of the changed module into one of the user's, in place."""

    def lacks(self, state: dict[str, torch.Tensor]) -> bool:
        """Whether a state dict holds what the changed module lacks, so that it is one of the user's."""

    def adopt(self, state: dict[str, torch.Tensor]) -> None:
        """Turn a state dict of the user's module into one of the changed, in place."""

    def holds(self, trace: Trace, module: nn.Module) -> str:
        """Empty if the edit is right for another graph of the same model, else the reason why not."""


@dataclasses.dataclass
class Captured:
    """What passes work on: the graphs of one model. A pass may change the traces it is given; they are copies.

    Attributes:
        root: the module that the graphs run on, to be looked at only.
        traces: one graph for each mode captured ("train", "eval").
        edits: changes of the module that passes ask for.
        leaves: the example's tensors in the order of the placeholders.
        options: what the user asked of the whole (memory budget, precision).
    """

    root: nn.Module
    traces: dict[str, Trace]
    edits: list[Edit] = dataclasses.field(default_factory=list)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def copy(self) -> Captured:
        traces = {mode: trace.copy() for mode, trace in self.traces.items()}
        return dataclasses.replace(self, traces=traces, edits=list(self.edits))


@dataclasses.dataclass(frozen=True)
class Pass(abc.ABC):
    """Base of all passes. Fields are options, settable from the command line as `name{option=value}`."""

    name: ClassVar[str]
    #: Whether it asks for edits of the module's own parameters or children: such passes run once, at the first capture.
    edits_module: ClassVar[bool] = False
    #: Whether it is meant to change what the model computes: it runs first, and what follows is checked against it.
    changes_function: ClassVar[bool] = False

    @abc.abstractmethod
    def run(self, captured: Captured) -> list[Change | Skip]:
        """Rewrite the traces of `captured` in place; say what changed and what did not and why."""
