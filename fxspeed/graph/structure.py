"""Nested Python values with tensors in them: walking inputs, writing outputs as nodes."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from fxspeed.errors import Untraceable
from fxspeed.graph.inputs import CONSTANTS
from fxspeed.graph.symbols import SYMS


def map_tensors(tree: Any, change: Callable[[Any], Any], kind: type | tuple[type, ...] | None = None) -> Any:
    """`tree` with `change` applied to its leaves of type `kind` (default: anything that is no container)."""
    return _map(tree, change, kind, objects=False)


def map_objects(tree: Any, change: Callable[[Any], Any], kind: type | tuple[type, ...] | None = None) -> Any:
    """`map_tensors` that looks into plain objects too (key-value caches), and makes new ones of their classes."""
    return _map(tree, change, kind, objects=True)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes of a plain object, which are all that it is; None of anything else."""
    known = isinstance(value, (*CONSTANTS, torch.Tensor, dict)) or callable(value)
    plain = hasattr(value, "__dict__") and not known
    return vars(value) if plain and not any(getattr(c, "__slots__", ()) for c in type(value).__mro__) else None


def _map(tree: Any, change: Callable[[Any], Any], kind: type | tuple[type, ...] | None, objects: bool) -> Any:
    if kind is not None and isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map(v, change, kind, objects) for v in tree))
    if type(tree) in (list, tuple):
        return type(tree)(_map(v, change, kind, objects) for v in tree)
    if type(tree) in (dict, collections.OrderedDict):
        return type(tree)((k, _map(v, change, kind, objects)) for k, v in tree.items())
    if isinstance(tree, dict) and dataclasses.is_dataclass(tree):  # the outputs of transformers
        return type(tree)(**{k: _map(v, change, kind, objects) for k, v in tree.items()})
    if objects and (attributes := attributes_of(tree)) is not None:
        return Build(type(tree))(**{k: _map(v, change, kind, objects) for k, v in attributes.items()})
    if kind is None:
        return tree if isinstance(tree, CONSTANTS) else change(tree)
    return tree


def replace_tensors(tree: Any, values: Iterator[torch.Tensor]) -> Any:
    """`tree` with its tensors replaced, in order, by `values`."""
    return map_tensors(tree, lambda _: next(values), torch.Tensor)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors of a nested value, in order; looks into dataclasses, mappings and plain objects too."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.append(value)
            return
        if isinstance(value, CONSTANTS) or id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, (list, tuple)):
            for item in value:
                walk(item)
        elif isinstance(value, collections.abc.Mapping):
            for item in value.values():
                walk(item)
        elif hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module)) and not callable(value):
            walk(vars(value))

    walk(tree)
    return found


def outline(tree: Any) -> Any:
    """Something that is equal for equal structures with the same tensors in them."""
    if isinstance(tree, torch.Tensor):
        return id(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree), tuple(map(outline, tree))
    if isinstance(tree, dict):
        return type(tree), tuple((k, outline(v)) for k, v in tree.items())
    return tree if isinstance(tree, CONSTANTS) else id(tree)


def text_of(value: Any) -> str:
    """A nested value as text, with the word Tensor for each tensor in it."""
    if isinstance(value, torch.Tensor):
        return "Tensor"
    if type(value) is list:
        return f"[{', '.join(map(text_of, value))}]"
    if isinstance(value, tuple):
        return f"{'' if type(value) is tuple else type(value).__name__}({', '.join(map(text_of, value))})"
    parts = value if isinstance(value, dict) else attributes_of(value)
    if parts is None:
        return repr(value) if isinstance(value, CONSTANTS) else type(value).__name__
    name = "" if type(value) is dict else type(value).__name__
    return f"{name}{{{', '.join(f'{k!r}: {text_of(v)}' for k, v in parts.items())}}}"


class Build:
    """Makes an instance of a plain class with given attributes, as `copy.copy` does. The target of a node."""

    def __init__(self, cls: type):
        self.cls = cls
        self.__name__, self.__module__ = cls.__name__, cls.__module__

    def __call__(self, **attributes: Any) -> Any:
        instance: Any = object.__new__(self.cls)
        vars(instance).update(attributes)
        return instance


class Constant:
    """A function of no arguments that returns one object of the user's. The target of a node."""

    def __init__(self, value: Any):
        self.value = value
        self.__name__ = f"{type(value).__name__}_of_the_model"
        self.__module__ = __name__

    def __call__(self) -> Any:
        return self.value


def encode(value: Any, arg: Callable[[Any], Any], graph: fx.Graph, originals: dict[int, Any]) -> Any:
    """The output of a traced forward as the argument of the graph's output node.

    Containers that a graph can write stay literal; dataclasses, mappings with a class of their own and plain objects
    become a node that calls the class. What existed before the call (a config, say) is referred to.

    Raises:
        Untraceable: an object whose contents cannot be written down.
    """
    done: dict[int, Any] = {}

    def call(function: Callable, *args: Any, **kwargs: Any) -> fx.Node:
        node = graph.create_node("call_function", function, args, kwargs)
        node.meta["source"] = node.meta["path"] = ""
        node.meta["val"] = None
        node.meta["constructs"] = True
        return node

    def walk(value: Any) -> Any:
        if isinstance(value, (torch.Tensor, *SYMS, *CONSTANTS)):
            return arg(value)
        if value is Ellipsis or isinstance(value, torch.Size):
            return arg(value)
        if id(value) in done:
            return done[id(value)]
        result = done[id(value)] = compound(value)
        return result

    def compound(value: Any) -> Any:
        cls = type(value)
        if cls in (list, tuple):
            return cls(map(walk, value))
        if isinstance(value, tuple):
            if hasattr(value, "_fields"):
                return call(cls, *map(walk, value))
            return call(cls, tuple(map(walk, value)))
        if cls is dict:
            if all(isinstance(k, (str, int)) for k in value):
                return {k: walk(v) for k, v in value.items()}
            raise Untraceable("the output is a dict whose keys are neither strings nor integers")
        if cls is collections.OrderedDict:
            return call(cls, [(k, walk(v)) for k, v in value.items()])
        if cls is set:
            return call(set, [walk(v) for v in value])
        if id(value) in originals:
            return call(Constant(originals[id(value)]))
        if isinstance(value, type) or (callable(value) and not hasattr(value, "__dict__")):
            return call(Constant(value))
        if dataclasses.is_dataclass(value) and all(f.init for f in dataclasses.fields(value)):
            fields = {f.name: walk(getattr(value, f.name)) for f in dataclasses.fields(value)}
            if isinstance(value, dict) or set(vars(value)) <= set(fields):
                return call(cls, **{k: v for k, v in fields.items() if v is not None})
        if (attributes := attributes_of(value)) is not None:
            return call(Build(cls), **{k: walk(v) for k, v in attributes.items()})
        raise Untraceable(f"the output holds a {cls.__name__}")

    return walk(value)
