"""Leaving no trace: a training step as it was, whatever ran in between."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from fxspeed.graph.state import preserved_rng
from fxspeed.module import program_of

if TYPE_CHECKING:
    from fxspeed.train.step import TrainStep

_OWN = ("schedule", "total_steps", "steps", "_seen", "_weight", "_first", "_pending", "_looked")


@contextlib.contextmanager
def no_trace(step: TrainStep) -> Iterator[None]:
    """Weights, buffers, gradients, optimizer, schedule, scaler, counters, training flags and random numbers are
    afterwards as before, bit for bit and in the same tensors. The copies are held in host memory. Inside, the step
    begins a new accumulation and its schedule rests.
    """
    module, optimizer = step.module, step.optimizer
    tensors = [(t, _on_host(t)) for t in (*module.parameters(), *module.buffers())]
    gradients = [(p, p.grad, None if p.grad is None else _on_host(p.grad)) for p in module.parameters()]
    flags = [(m, m.training) for m in module.modules()]
    groups = [(g, {k: copy.copy(v) for k, v in g.items() if k != "params"}) for g in optimizer.param_groups]
    moments = {p: _kept(state) for p, state in optimizer.state.items()}
    others = [(s, copy.deepcopy(s.state_dict())) for s in (step.schedule, step.scaler, step.average) if s is not None]
    programs = [(p, p.entries, list(p.entries), p.eager, p.misses) for m in module.modules() if (p := program_of(m))]
    own = {name: getattr(step, name) for name in _OWN}
    with preserved_rng():
        try:
            step.schedule = step.total_steps = None
            step._looked = True  # what is said of debug APIs is for the user's own steps
            step.restart()
            yield
        finally:
            with torch.no_grad():
                for tensor, before in tensors:
                    tensor.copy_(before)
                for parameter, gradient, before in gradients:
                    parameter.grad = gradient
                    if gradient is not None:
                        gradient.copy_(before)
                optimizer.state.clear()
                for parameter, state in moments.items():
                    optimizer.state[parameter] = {key: _again(value) for key, value in state.items()}
            for group, values in groups:
                for key in group.keys() - values.keys() - {"params"}:
                    del group[key]
                group.update(values)
            for each, state in others:
                each.load_state_dict(state)
            for program, entries, before, eager, misses in programs:
                entries[:] = before
                program.entries, program.eager, program.misses = entries, eager, misses
            for name, value in own.items():
                setattr(step, name, value)
            for m, flag in flags:
                m.training = flag


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _kept(state: dict[str, Any]) -> dict[str, Any]:
    """Tensors with their values, other values copied."""
    return {k: (v, _on_host(v)) if isinstance(v, torch.Tensor) else copy.deepcopy(v) for k, v in state.items()}


def _again(value: Any) -> Any:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], torch.Tensor):
        return value[0].copy_(value[1])
    return value


@contextlib.contextmanager
def fresh(loader: Iterable[Any]) -> Iterator[Iterable[Any]]:
    """A loader to iterate over: `loader` itself keeps its position, its workers and the state of its generators."""
    generators = {
        id(g): (g, g.get_state())
        for holder in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
        if isinstance(g := getattr(holder, "generator", None), torch.Generator)
    }
    position = loader.state_dict() if hasattr(loader, "state_dict") else None
    other = copy.copy(loader)
    if isinstance(other, DataLoader):
        other._iterator = None  # persistent workers of a running iteration are the user's
    try:
        yield other
    finally:
        if isinstance(other, DataLoader) and other._iterator is not None:
            other._iterator._shutdown_workers()
        for generator, state in generators.values():
            generator.set_state(state)
        if position is not None:
            loader.load_state_dict(position)  # type: ignore[attr-defined]
