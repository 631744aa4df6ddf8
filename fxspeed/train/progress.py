"""A progress bar for long work, on a terminal alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track

T = TypeVar("T")


def progress(items: Sequence[T], label: str) -> Iterator[T]:
    """The items one by one, with a bar on standard error if that is a terminal."""
    console = Console(stderr=True)
    if not (console.is_terminal and sys.stderr.isatty()):
        yield from items
    else:
        yield from track(items, label, console=console, transient=True)
