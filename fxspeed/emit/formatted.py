"""Python text as ruff formats it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path


def formatted(text: str) -> str:
    """`text` with long calls broken and double quotes, where ruff is installed; as it is elsewhere."""
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    if ruff is None:
        return text
    command = [ruff, "format", "--isolated", "--line-length=120", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else text
