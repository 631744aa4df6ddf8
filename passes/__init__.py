"""The passes: one file each, a registry, the default order.

A pass is a frozen dataclass whose fields are its options. Packages outside can add theirs under the entry point group
`fxspeed.passes`.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib.metadata
import re
from collections.abc import Iterable

from fxspeed.errors import Error
from fxspeed.passes.autocast import Autocast
from fxspeed.passes.base import Captured, Change, Edit, Pass, Skip
from fxspeed.passes.checkpoint import Checkpoint
from fxspeed.passes.drop_bias import DropBias
from fxspeed.passes.fuse_pointwise import FusePointwise
from fxspeed.passes.insert_norm import InsertNorm
from fxspeed.passes.native_ops import NativeOps
from fxspeed.passes.remove_syncs import RemoveSyncs

__all__ = [
    "DEFAULT",
    "Autocast",
    "Captured",
    "Change",
    "Checkpoint",
    "DropBias",
    "Edit",
    "FusePointwise",
    "InsertNorm",
    "NativeOps",
    "Pass",
    "RemoveSyncs",
    "Skip",
    "parse",
    "registry",
    "resolve",
]

#: The default pipeline, in order.
DEFAULT = ("drop_bias", "remove_syncs", "native_ops", "fuse_pointwise", "checkpoint", "autocast")


def registry() -> dict[str, type[Pass]]:
    """Name -> class of every pass known here, those of other packages included."""
    known: dict[str, type[Pass]] = {
        cls.name: cls for cls in (InsertNorm, DropBias, RemoveSyncs, NativeOps, FusePointwise, Checkpoint, Autocast)
    }
    for point in importlib.metadata.entry_points(group="fxspeed.passes"):
        cls = point.load()
        known.setdefault(cls.name, cls)
    return known


def resolve(passes: Iterable[str | Pass] | None) -> tuple[Pass, ...]:
    """Pass objects for names, `name{option=value}` texts and objects; the default pipeline for None.

    Raises:
        Error: an unknown name or option.
    """
    if passes is None:
        passes = DEFAULT
    if isinstance(passes, (str, Pass)):
        passes = [passes]
    return tuple(p if isinstance(p, Pass) else parse(p) for p in passes)


def parse(text: str) -> Pass:
    """A pass written as `name` or `name{option=value, ...}`."""
    match = re.fullmatch(r"\s*(\w+)\s*(?:\{(.*)\})?\s*", text)
    known = registry()
    name = match[1] if match else text
    if match is None or name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
        raise Error(f"unknown pass {name!r}; {hint}")
    cls = known[name]
    fields = {f.name for f in dataclasses.fields(cls)}
    options = {}
    for part in filter(None, (p.strip() for p in (match[2] or "").split(","))):
        key, _, value = (s.strip() for s in part.partition("="))
        if key not in fields:
            raise Error(f"pass {name!r} has no option {key!r}; it has: {', '.join(sorted(fields)) or 'none'}")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    return cls(**options)
