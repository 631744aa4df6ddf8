"""State outside the graph that a traced forward may touch: modules' attributes, Python's and NumPy's random numbers."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Hashable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy
import torch
from torch import nn

from fxspeed.graph.clone import HOOKS


def own_state(module: nn.Module, names: dict[int, int] | None = None) -> dict[str, Any]:
    """The attributes of a module by identity, containers one level deep.

    `names` maps the `id` of an object to that of another which it stands for.
    """
    seen: dict[str, Any] = {}

    def name_of(value: Any) -> Hashable:
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value.node.expr
        return id(value) if names is None else names.get(id(value), id(value))

    for name, value in vars(module).items():
        if name in HOOKS or name.startswith(("_forward_hooks_", "_forward_pre_hooks_")):
            continue  # libraries watch their modules with hooks that the forward installs
        if name == "forward" and getattr(value, "__func__", None) is type(module).forward:
            continue  # wrapped for a while and put back, as libraries do that watch their modules
        if isinstance(value, dict):
            seen[name] = _Same(value, id(value), tuple((k, name_of(v)) for k, v in value.items()))
        elif isinstance(value, (list, set)):
            seen[name] = _Same(value, id(value), tuple(map(name_of, value)))
        else:
            seen[name] = _Same(value, name_of(value), None)
    return seen


class _Same:
    """Equal only to the same object with the same contents (plain numbers and strings: to an equal one)."""

    def __init__(self, value: Any, name: Hashable, contents: tuple | None):
        self.value, self.name, self.contents = value, name, contents
        self.copy = value.copy() if contents is not None else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return NotImplemented
        same = self.name == other.name
        if not same and isinstance(self.value, (int, float, str)):
            same = type(self.value) is type(other.value) and self.value == other.value
        return same and self.contents == other.contents

    __hash__ = None  # type: ignore[assignment]


def restore(module: nn.Module, state: dict[str, Any]) -> None:
    attributes = vars(module)
    for name in list(attributes):
        if name not in state and name != "forward" and "_hooks" not in name:
            del attributes[name]
    for name, same in state.items():
        attributes[name] = same.value
        if isinstance(same.value, dict):
            same.value.clear()
            same.value.update(same.copy)
        elif isinstance(same.value, list):
            same.value[:] = same.copy
        elif isinstance(same.value, set):
            same.value.clear()
            same.value.update(same.copy)


class Moment:
    """What a call may change, as it is now: attributes of `modules`, `tensors`, all random numbers."""

    def __init__(self, modules: Iterable[nn.Module], tensors: Iterable[torch.Tensor]):
        self.attributes = [(m, own_state(m)) for m in modules]
        self.tensors = [(t, t.grad_fn, t.detach().clone()) for t in tensors]
        self.random = random_state()
        self.generators = [(torch.get_rng_state, torch.set_rng_state, torch.get_rng_state())]
        for device in range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ():
            get, put = (partial(f, device=device) for f in (torch.cuda.get_rng_state, torch.cuda.set_rng_state))
            self.generators.append((get, put, get()))

    def rewind(self) -> bool:
        """Make everything as it was. False, and nothing done, where autograd has recorded a write into a tensor."""
        if any(t.grad_fn is not grad_fn for t, grad_fn, _ in self.tensors):
            return False
        for module, state in self.attributes:
            restore(module, state)
        with torch.no_grad():
            for tensor, _, value in self.tensors:
                if not torch.equal(tensor, value):  # batch_norm writes without a new version
                    tensor.copy_(value)
        set_random_state(self.random)
        for _, put, state in self.generators:
            put(state)
        return True


def random_state() -> tuple:
    return random.getstate(), numpy.random.get_state(legacy=False)


def same_random_state(state: tuple) -> bool:
    now = random_state()
    return (
        now[0] == state[0]
        and now[1]["state"]["pos"] == state[1]["state"]["pos"]
        and (now[1]["state"]["key"] == state[1]["state"]["key"]).all()
    )


def set_random_state(state: tuple) -> None:
    random.setstate(state[0])
    numpy.random.set_state(state[1])


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Python's, NumPy's and torch's random state are the same after as before."""
    state = random_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
        try:
            yield
        finally:
            set_random_state(state)
