"""Runs public model zoos through fxspeed: `python -m tests.zoo [--source timm] [--share 0.05] [--seed 0] [name ...]`.

For each model it prints whether it was captured whole (or which module stayed, and why), whether outputs, gradients
and buffers are equal in train mode and outputs in eval mode with another batch size, what `optimize` took in seconds
and in forwards of the model, and how large the graph is. The summary closes it. `--json FILE` keeps a line for each
model and passes over those that the file has already (a model at which the process was killed, for memory, is skipped
by the next one); `--part 0/2` takes every second one.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import random
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from tests.zoo import language, others, vision
from tests.zoo.check import PASSES, Example, Row, Unfit, check

SOURCES: dict[str, Callable[[], Iterator[tuple[str, Example]]]] = {
    "timm": vision.timm_models,
    "torchvision": vision.torchvision_models,
    "smp": vision.segmentation_models,
    "transformers": language.transformers_models,
    "diffusers": others.diffusers_models,
    "x-transformers": others.x_transformers_models,
    "torch-geometric": others.geometric_models,
}
#: Seconds for one model.
PATIENCE = 300


class _TooLong(BaseException):
    pass


def _too_long(*_: object) -> None:
    raise _TooLong


def run(name: str, example: Example, sizes: bool = False, passes: Sequence[str] = PASSES) -> Row:
    """The row of one model; an error of ours is a row too."""
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(PATIENCE)
    try:
        return check(name, example, sizes, passes)
    except _TooLong:
        return Row(name, "skipped", f"takes more than {PATIENCE} s here")
    except Unfit as error:
        return Row(name, "skipped", str(error))
    except Exception as error:
        return Row(name, "error", f"{type(error).__name__}: {str(error)[:200]}")
    finally:
        signal.alarm(0)
        gc.collect()


class Journal:
    """The rows of a file, one JSON object a line; beside it, the name of the model that is at work."""

    def __init__(self, path: str | None) -> None:
        self.path, self.rows = path, dict[str, Row]()
        if path and os.path.exists(path):
            with open(path) as file:
                self.rows = {r["name"]: Row(**r) for r in map(json.loads, file)}
        if path and os.path.exists(path + ".now"):
            with open(path + ".now") as file:
                self.add(Row(file.read(), "skipped", "the process was killed: more memory than this machine has"))

    def begin(self, name: str) -> None:
        if self.path:
            with open(self.path + ".now", "w") as file:
                file.write(name)

    def add(self, row: Row) -> None:
        self.rows[row.name] = row
        if self.path:
            with open(self.path, "a") as file:
                file.write(json.dumps(dataclasses.asdict(row)) + "\n")
            with contextlib.suppress(FileNotFoundError):
                os.remove(self.path + ".now")


def summary(rows: list[Row]) -> str:
    """Counts, and the shares of those that ran."""
    counts = Counter(r.status for r in rows)
    ran = sum(n for s, n in counts.items() if s != "skipped")
    text = ", ".join(f"{n} {s}" for s, n in counts.most_common())
    if ran:
        right = ran - counts["wrong"] - counts["error"]
        text += f"\nright {100 * right / ran:.1f}%, whole {100 * counts['whole'] / ran:.1f}% of {ran}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.zoo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--source", choices=SOURCES, action="append")
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--sizes", action="store_true", help="height and width dynamic, and another size compared")
    parser.add_argument("--passes", default=",".join(PASSES))
    parser.add_argument("--json")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    journal = Journal(options.json)
    rows: list[Row] = []
    chooser = random.Random(options.seed)
    mine, parts = map(int, options.part.split("/"))
    for source, make in SOURCES.items():
        if options.source and source not in options.source:
            continue
        chosen = [m for m in make() if not options.names or m[0] in options.names]
        if options.share < 1:
            chosen = chooser.sample(chosen, max(1, round(options.share * len(chosen))))
        for name, example in chosen[mine::parts]:
            row = journal.rows.get(f"{source}/{name}")
            if row is None:
                journal.begin(f"{source}/{name}")
                row = run(f"{source}/{name}", example, options.sizes, options.passes.split(","))
                print(row, flush=True)
                journal.add(row)
            rows.append(row)
    print(summary(rows))
    return 1 if any(r.status in ("wrong", "error") for r in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
