"""The main entry: capture a model, run the passes, verify each, and put the drop-in module together."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn

from fxspeed.errors import Error
from fxspeed.example import device_of, real_inputs
from fxspeed.graph.clone import plain_view
from fxspeed.graph.state import preserved_rng
from fxspeed.module import Program, drop_in, program_of
from fxspeed.passes import Pass, resolve
from fxspeed.passes.autocast import choose
from fxspeed.passes.checkpoint import as_budget
from fxspeed.pipeline import Pipeline
from fxspeed.result import Optimized


def optimize(
    model: nn.Module,
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
    *,
    passes: Iterable[str | Pass] | None = None,
    memory_budget: float | int | str | None = None,
    precision: str = "auto",
    device: torch.device | str | None = None,
    dynamic: Iterable[str | int] = ("batch",),
    verify: bool | Literal["full"] = True,
    inplace: bool = False,
) -> Optimized:
    """Rewrite a model's training and eval graphs to be faster and smaller, without changing what it computes.

    Args:
        model: any module, in train or eval mode. Never modified; with `inplace` the result shares its tensors.
        args, kwargs: example inputs: real, fake or meta tensors of typical shape; a single tensor is one argument.
            Without any, capture waits for the first call and uses its inputs.
        passes: names, `name{option=value}` texts or pass objects, in order; None for the default pipeline.
        memory_budget: the peak of a training step: a share of the plain step's in (0, 1], bytes, or "6GiB".
        precision: "auto", "fp32", "bf16" or "fp16".
        device: default: where the parameters are.
        dynamic: dimensions that may change between calls: "batch", "sequence", "height", "width", or indices.
        verify: check the rewritten graphs against the plain ones; "full" after every pass; False not at all.
        inplace: share parameters and buffers with `model` instead of copying them.

    Raises:
        Error: bad options, or inputs that the model itself refuses.
        BudgetError: no plan keeps the budget; the message names the smallest peak that can be reached.
    """
    if not isinstance(model, nn.Module):
        raise Error(f"optimize() takes an nn.Module, not {type(model).__name__}; wrap a function in a module's forward")
    chosen = resolve(passes)
    place = torch.device(device) if device is not None else None
    choose(precision, place or device_of(model))
    if verify not in (True, False, "full"):
        raise Error(f'verify is {verify!r}; use True, False or "full"')
    options = {"memory_budget": as_budget(memory_budget), "precision": precision, "device": place}
    if getattr(vars(model).get("forward"), "__func__", None) not in (None, type(model).forward):
        raise Error(
            f"{type(model).__name__} has a forward of its own instance; put it into a class, so that it can be copied"
        )
    pipeline = Pipeline(chosen, options, tuple(dynamic), verify)
    began = time.perf_counter()
    with preserved_rng():
        module = _copy(model, inplace)
        vars(module).pop("forward", None)  # the class's own, bound: it would hide the optimized one
        if place is not None and not inplace:
            module = module.to(place)
        args, kwargs = real_inputs(args, kwargs, module, place)
        program = Program([], pipeline)
        if args or kwargs or _takes_nothing(model):
            program.entries = pipeline.first(module, args, kwargs)
            program.eager = pipeline.facts.eager
            if not program.entries:  # inputs that the model refuses are the caller's to mend
                _run_once(plain_view(module), args, kwargs)
        drop_in(module, program)
        _warm(module, args, kwargs)
        pipeline.facts.seconds = time.perf_counter() - began
    return Optimized(module, pipeline, (args, kwargs))


def _warm(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Have the programs inside of what stayed Python capture the example's calls, in a run of a copy."""
    if not any(program_of(m) for m in module.modules() if m is not module):
        return
    shared = {id(v): v for m in module.modules() for v in vars(m).values() if isinstance(v, torch.Tensor)}
    before = [(v, v.detach().clone()) for v in shared.values()]  # graphs name these tensors: no copies
    copied = copy.deepcopy(module, shared)
    copied(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    with torch.no_grad():
        for value, kept in before:
            if not torch.equal(value, kept):
                value.copy_(kept)
    for path, each in copied.named_modules():
        if path and (program := program_of(each)) is not None:
            drop_in(module.get_submodule(path), program.detached())


def _run_once(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Run a copy of the model on the example inputs, to tell its own errors from ours."""
    with preserved_rng(), torch.no_grad():
        try:
            copied = copy.deepcopy(module)
        except Exception:
            return
        try:
            copied(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        except Exception as error:
            raise Error(
                f"{type(module).__name__} does not run on the example inputs: {type(error).__name__}: "
                f"{str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            ) from error


def _copy(model: nn.Module, inplace: bool) -> nn.Module:
    shared: dict[int, Any] = {}
    if inplace:
        shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    try:
        return copy.deepcopy(model, shared)
    except Exception as error:
        raise Error(
            f"{type(model).__name__} cannot be deep-copied ({type(error).__name__}: {error}); make it deep-copyable, "
            "since optimize() never changes the model it is given"
        ) from error


def _takes_nothing(model: nn.Module) -> bool:
    import inspect

    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return False
    return not list(parameters)
