"""The command line: optimize the model in a file and print the diff of its graph."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import inspect
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console
from torch import nn

from fxspeed.errors import Error
from fxspeed.optimize import optimize
from fxspeed.result import Optimized
from fxspeed.train.batch import by_name, default_loss

_EXAMPLES = """\
examples:
  python -m fxspeed model.py                                  example_inputs stands in the file
  python -m fxspeed model.py:Net --input 8x3x224x224          a class or function that makes the model
  python -m fxspeed model.py --input ids=int64:8x128:0..50257 a keyword input of integers
  python -m fxspeed model.py --budget 0.5 --precision bf16    half the memory, mixed precision
  python -m fxspeed model.py --passes drop_bias,checkpoint{budget=0.5}

exit codes: 0 done; 1 a pass failed verification and was rolled back; 2 the call cannot be carried out
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Error(f"{message} (see python -m fxspeed --help)")


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        options = _parser().parse_args(argv)
        return _run(options)
    except Error as error:
        print(f"fxspeed: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m fxspeed",
        description="Rewrite a PyTorch model's training graph, check every rewrite, print the diff.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "model",
        metavar="model.py[:name]",
        help="a file, and in it a module instance, a class or a function that makes one",
    )
    add(
        "--input",
        action="append",
        default=[],
        metavar="[NAME=][DTYPE:]SHAPE[:LOW..HIGH]",
        help="an input, e.g. 8x3x224x224",
    )
    add("--inputs", metavar="FILE", help="inputs saved with torch.save: a tensor, tuple or dict")
    add("--train-step", action="store_true", help="run one training step of the result too")
    add("--budget", metavar="SHARE|BYTES", help="peak memory of a step: 0.5 or 6GiB")
    add("--precision", default="auto", help='"auto", "fp32", "bf16" or "fp16"')
    add("--passes", metavar="A,B{option=1}", help="passes to run, in order")
    add("--save", metavar="DIR", help="write a standalone package")
    add("--html", metavar="FILE", help="write the report as a page")
    add("--json", action="store_true", help="print the report as JSON instead of the diff")
    add("--no-verify", action="store_true", help="do not check the rewrites")
    add("--color", choices=("auto", "always", "never"), default="auto")
    return parser


def _run(options: argparse.Namespace) -> int:
    if options.html:
        raise Error("--html is not built yet; leave it out")
    note = Console(stderr=True, highlight=False)
    stdout, sys.stdout = sys.stdout, sys.stderr  # what the user's file prints is not the diff
    try:
        model, space = _load(options.model)
        args, kwargs = _inputs(options, space)
        with note.status("optimizing") if note.is_terminal else _quiet():
            result = optimize(
                model,
                args,
                kwargs,
                passes=_passes(options.passes),
                memory_budget=_number(options.budget),
                precision=options.precision,
                verify=not options.no_verify,
            )
            if options.train_step:
                _train_step(result, args, kwargs, note)
            if options.save:
                result.save(options.save)
    finally:
        sys.stdout = stdout
    if options.json:
        print(json.dumps({**result.report.to_dict(), "diff": result.diff(), "rolled_back": list(result.broken)}))
    else:
        sys.stdout.write(result.diff(color=_colored(options.color)))
        sys.stdout.flush()
    print(result.report.text(width=min(note.width, 100)), file=sys.stderr, end="")
    for name in result.broken:
        print(f"fxspeed: {name} failed verification and was rolled back", file=sys.stderr)
    return 1 if result.broken else 0


class _quiet:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        return None


def _colored(choice: str) -> bool:
    if choice != "auto":
        return choice == "always"
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _number(budget: str | None) -> float | str | None:
    if budget is None:
        return None
    try:
        return float(budget) if re.fullmatch(r"0?\.\d+|1\.0*|1|0\.?0*", budget) else budget
    except ValueError:
        return budget


def _passes(text: str | None) -> list[str] | None:
    return None if text is None else [p for p in re.split(r",(?![^{]*\})", text) if p.strip()]


# ---------------------------------------------------------------------- the model
def _load(target: str) -> tuple[nn.Module, dict[str, Any]]:
    file, _, name = target.partition(":") if not re.match(r"^[A-Za-z]:[\\/]", target) else (target, "", "")
    path = Path(file)
    if not path.is_file():
        raise Error(f"there is no file {file!r}; give the path of a Python file that holds the model")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise Error(f"{file!r} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise Error(f"{file} does not run: {type(error).__name__}: {error}") from error
    space = vars(module)
    chosen = name or _only_candidate(space, path)
    if chosen not in space:
        near = difflib.get_close_matches(chosen, [n for n in space if not n.startswith("_")], 1)
        raise Error(f"{file} has no {chosen!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    return _made(space[chosen], f"{file}:{chosen}"), space


def _only_candidate(space: dict[str, Any], path: Path) -> str:
    own = {n: v for n, v in space.items() if not n.startswith("_")}
    instances = [n for n, v in own.items() if isinstance(v, nn.Module)]
    here = {n: v for n, v in own.items() if getattr(v, "__module__", None) == path.stem}
    classes = [n for n, v in here.items() if inspect.isclass(v) and issubclass(v, nn.Module) and _needs_nothing(v)]
    makers = [n for n, v in here.items() if inspect.isfunction(v) and _returns_module(v) and _needs_nothing(v)]
    for found in (instances, makers, classes):
        if len(found) == 1:
            return found[0]
        if found:
            raise Error(f"{path} holds several models: {', '.join(found)}; name one, as in {path}:{found[0]}")
    raise Error(f"{path} holds no model: no nn.Module instance, no class or function that makes one without arguments")


def _returns_module(function: Callable) -> bool:
    returned = inspect.signature(function).return_annotation
    if inspect.isclass(returned):
        return issubclass(returned, nn.Module)
    return isinstance(returned, str) and returned.split(".")[-1] == "Module"


def _needs_nothing(maker: Callable) -> bool:
    try:
        parameters = inspect.signature(maker).parameters.values()
    except (TypeError, ValueError):
        return False
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def _made(value: Any, label: str) -> nn.Module:
    if isinstance(value, nn.Module):
        return value
    if not callable(value):
        raise Error(f"{label} is a {type(value).__name__}, neither a module nor something that makes one")
    try:
        model = value()
    except Exception as error:
        raise Error(f"{label}() does not make a model: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise Error(f"{label}() returned a {type(model).__name__}, not an nn.Module")
    return model


# ---------------------------------------------------------------------- the inputs
def _inputs(options: argparse.Namespace, space: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    if options.input and options.inputs:
        raise Error("--input and --inputs are both given; use one")
    if options.input:
        args, kwargs = [], {}
        for text in options.input:
            name, tensor = parse_input(text)
            if name:
                kwargs[name] = tensor
            else:
                args.append(tensor)
        return tuple(args), kwargs
    if options.inputs:
        try:
            found = torch.load(options.inputs, weights_only=True)
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0]
            raise Error(f"{options.inputs} cannot be read as tensors: {type(error).__name__}: {reason}") from error
    elif "example_inputs" in space:
        found = space["example_inputs"]
        found = found() if callable(found) else found
    else:
        raise Error("no inputs: give --input SHAPE, as in --input 8x3x224x224, or put example_inputs into the file")
    if isinstance(found, dict):
        return (), found
    return tuple(found) if isinstance(found, (tuple, list)) else (found,), {}


def parse_input(text: str) -> tuple[str, torch.Tensor]:
    """`[name=][dtype:]shape[:low..high]` as (name, tensor): floats standard normal, integers uniform in [low, high).

    Raises:
        Error: the text is nothing of the kind.
    """
    match = re.fullmatch(
        r"(?:(\w+)=)?(?:([a-z]+\d*):)?(\d+(?:x\d+)*|scalar)(?::(-?[\d.]+)\.\.(-?[\d.]+))?", text.strip()
    )
    if match is None:
        raise Error(f"input {text!r} is not understood; write 8x3x224x224 or tokens=int64:8x128:0..50257")
    name, kind, shape, low, high = match.groups()
    dtype = getattr(torch, kind, None) if kind else torch.float32
    if not isinstance(dtype, torch.dtype):
        raise Error(f"input {text!r}: {kind!r} is no dtype; use float32, int64, bool, ...")
    sizes = [int(s) for s in shape.split("x")] if shape != "scalar" else []
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        tensor = torch.randn(sizes, generator=generator)
        if low is not None:
            tensor = float(low) + (float(high) - float(low)) * torch.rand(sizes, generator=generator)
    else:
        bottom, top = (int(float(low)), int(float(high))) if low is not None else (0, 2)
        if top <= bottom:
            raise Error(f"input {text!r}: {low}..{high} is an empty range")
        tensor = torch.randint(bottom, top, sizes, generator=generator)
    return name or "", tensor.to(dtype)


def _train_step(result: Optimized, args: tuple, kwargs: dict[str, Any], note: Console) -> None:
    result.module.train()
    step = result.train_step(default_loss)
    values = [step({**by_name(result.module, args), **kwargs}) for _ in range(2)]
    note.print(f"training step: loss {float(values[0]):.4g}, then {float(values[1]):.4g}")
    note.print("; ".join(f"{s.name} {s.value} ({s.why})" for s in step.settings))
