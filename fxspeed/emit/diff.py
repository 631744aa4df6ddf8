"""The unified diff of a graph before and after."""

from __future__ import annotations

import difflib

_COLORS = {"+": "\x1b[32m", "-": "\x1b[31m", "@": "\x1b[36m"}


def unified(before: str, after: str, color: bool = False) -> str:
    """Unified diff of two rendered graphs; empty if they are equal. With `color`, ANSI colours beside the signs."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "before", "after", lineterm="", n=2)
    text = []
    for line in lines:
        code = _COLORS.get(line[:1], "") if color else ""
        text.append(f"{code}{line}\x1b[0m" if code else line)
    return "".join(f"{line}\n" for line in text)
