"""What is written down while a model is optimized."""

from __future__ import annotations

import dataclasses

import torch

from fxspeed.cost.memory import Timeline
from fxspeed.passes.base import Change, Skip


@dataclasses.dataclass
class Facts:
    """What was found out while a model was optimized. Grows when calls of a new kind are captured later."""

    records: list[Change | Skip] = dataclasses.field(default_factory=list)
    broken: list[str] = dataclasses.field(default_factory=list)
    eager: str = ""
    timelines: dict[str, Timeline] = dataclasses.field(default_factory=dict)
    low_precision: torch.dtype | None = None
    seconds: float = 0.0
    captured_seconds: float = 0.0
    texts: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)

    def add(self, records: list[Change | Skip]) -> None:
        self.records += [r for r in records if r not in self.records]
