"""The report: what changed and why, as a table and as plain data."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from fxspeed.cost.memory import Timeline
from fxspeed.passes.base import Change, Skip


@dataclasses.dataclass(frozen=True)
class Report:
    """Changes, skips and memory of one optimized model."""

    model: str
    changes: tuple[Change, ...]
    skipped: tuple[Skip, ...]
    timelines: dict[str, Timeline]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data: strings, numbers, lists and dicts."""
        memory = {
            name: {"peak": t.peak, "held": t.held, "flops": t.flops, "live": list(t.live)}
            for name, t in self.timelines.items()
        }
        return {
            "model": self.model,
            "changes": [dataclasses.asdict(c) for c in self.changes],
            "skipped": [dataclasses.asdict(s) for s in self.skipped],
            "memory": memory,
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = 80, color: bool = False) -> str:
        """The table, at most `width` columns wide."""
        out = io.StringIO()
        console = Console(file=out, width=width, force_terminal=color, no_color=not color, highlight=False)
        for title, rows in (("changes", _grouped(self.changes)), ("skipped", _grouped(self.skipped))):
            if rows:
                table = Table(title=f"{self.model}: {title}", title_justify="left", box=None, pad_edge=False)
                for column in ("pass", "where", "what", "why", "saves"):
                    table.add_column(column, overflow="fold", ratio=None if column == "pass" else 2)
                for row in rows:
                    table.add_row(*row)
                console.print(table)
                console.print()
        if not self.changes:
            console.print(f"{self.model}: nothing changed")
        if "plain" in self.timelines:
            line = f"peak of a step: plain {amount(self.timelines['plain'].peak)}"
            if "planned" in self.timelines:
                planned, plain = self.timelines["planned"], self.timelines["plain"]
                line += f", planned {amount(planned.peak)} ({planned.peak / plain.peak:.2f}"
                line += f", FLOPs x {planned.flops / max(plain.flops, 1):.3f})"
            console.print(line)
        console.print(f"optimized in {self.seconds:.1f} s")
        return out.getvalue()


def _grouped(records: Sequence[Change | Skip], most: int = 40) -> list[tuple[str, str, str, str, str]]:
    """Rows of the table; equal changes at several places share one."""
    groups: dict[tuple[str, str], list[Change | Skip]] = {}
    for record in records:
        groups.setdefault((record.pass_name, record.what if isinstance(record, Change) else record.why), []).append(
            record
        )
    rows = []
    for (name, _), same in groups.items():
        what, why = same[0].what, same[0].why
        where = same[0].target if len(same) == 1 else f"{same[0].target} and {len(same) - 1} more"
        source = getattr(same[0], "source", "")
        if source:
            where += f" [{short(source)}]"
        total: dict[str, int] = {}
        for record in same:
            for key, value in record.saves.items():
                total[key] = total.get(key, 0) + value
        saves = ", ".join(amount(v) if k == "bytes" else f"{v:,} {k.replace('_', ' ')}" for k, v in total.items() if v)
        rows.append((name, where, what, why, saves))
    if len(rows) > most:
        rows[most:] = [("...", f"{len(rows) - most} more rows", "", "", "")]
    return rows


def short(source: str) -> str:
    """The last two parts of a path, for a narrow table."""
    return "/".join(source.split("/")[-2:])


def amount(size: float) -> str:
    """Bytes for a reader."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return ""
