"""The house: who may import whom, and that the package is what the repository holds."""

from __future__ import annotations

import ast
from pathlib import Path

import fxspeed

PACKAGE = Path(fxspeed.__file__).parent
#: Each may import those before it.
ORDER = [
    "errors",
    "graph",
    "accelerator",
    "cost",
    "passes",
    "example",
    "emit",
    "records",
    "module",
    "verify",
    "result",
    "pipeline",
    "optimize",
    "dynamo",
    "train",
    "audit",
    "cli",
]
LATER = {"result": {"train"}}  # imported inside a function: result.train_step makes the step


def test_nothing_imports_upwards():
    for path in sorted(PACKAGE.rglob("*.py")):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part not in ORDER:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("fxspeed"):
                names = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
            for name in names:
                parts = name.split(".")
                if len(parts) > 1 and parts[1] in ORDER and parts[1] not in LATER.get(part, ()):
                    assert ORDER.index(parts[1]) <= ORDER.index(part), f"{path} imports {name}"


def test_passes_stand_in_one_place():
    assert (PACKAGE / "passes").is_symlink() or (PACKAGE / "passes" / "drop_bias.py").exists()
