"""The README's code runs, and its diff is what the program prints."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_python_blocks_run_and_the_diff_is_real(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    space: dict = {}
    with contextlib.redirect_stdout(printed):
        for block in re.findall(r"```python\n(.*?)```", README, re.S):
            exec(compile(block, "README.md", "exec"), space)
    (diff,) = re.findall(r"```diff\n(.*?)```", README, re.S)
    assert printed.getvalue().strip() == diff.strip()
    assert os.path.exists("checkpoint.pt") and os.path.exists("weights.pt")


def test_the_first_two_sh_blocks_use_the_constraints():
    blocks = re.findall(r"```sh\n(.*?)```", README, re.S)
    assert len(blocks) >= 2 and all("-c tests/constraints.txt" in b for b in blocks[:2])
    assert "python -m fxspeed" in blocks[0] and "pytest" in blocks[1]
