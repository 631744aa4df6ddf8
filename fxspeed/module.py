"""The drop-in module: the user's own class, with a forward that runs the rewritten graphs."""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
import threading
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import fx, nn

from fxspeed.errors import Differs, Untraceable
from fxspeed.graph import runtime
from fxspeed.graph.clone import HOOKS, is_users
from fxspeed.graph.regions import Region, bind, model_nodes
from fxspeed.graph.state import Moment
from fxspeed.graph.trace import Trace, is_leaf
from fxspeed.records import Facts

#: Graphs kept for one model; a call that fits none of this many runs the model as the user wrote it.
CACHE_LIMIT = 8


@dataclasses.dataclass(eq=False)
class Entry:
    """A rewritten graph of a program and, once it has run, its binding to the module.

    `retired` says why it runs no more: a module in it that stayed Python did something new.
    """

    trace: Trace
    before: Trace | None = None
    retired: str = ""
    bound: fx.GraphModule | None = None
    state: list[tuple] = dataclasses.field(default_factory=list)
    switches: bool = False
    run: Any = None
    unsure: bool = False

    def attach(self, root: nn.Module, regions: str = "run") -> None:
        """Bind to `root`; `regions` as `graph.regions.bind` takes it."""
        self.bound = bind(self.trace.graph, self.trace.constants, root, regions)
        self.run = self.bound.forward
        nodes = list(model_nodes(self.trace.graph, self.trace.constants))
        self.unsure = any(n.target in runtime.EXPECTATIONS for n in nodes)
        self.switches = any(n.target in runtime.SIDE_EFFECTS for n in nodes)
        self.state = []
        for path, flag in self.trace.flags.items():
            module = root.get_submodule(path)
            parent = root.get_submodule(path.rpartition(".")[0]) if path else None
            siblings = parent._modules if parent is not None else {"": module}
            hooks = [getattr(module, h) for h in HOOKS] if path and not is_leaf(module) else []
            self.state.append((siblings, path.rpartition(".")[2], module, vars(module), flag, hooks))

    def hooked(self) -> bool:
        """Whether an opened module has got hooks since the capture."""
        return any(is_users(hook) for *_, hooks in self.state for found in hooks for hook in found.values())

    def moment(self, root: nn.Module, inputs: tuple) -> Moment:
        """What a run may change, as it is now."""
        nodes = list(model_nodes(self.trace.graph, self.trace.constants))
        called = {root.get_submodule(str(n.target)): n for n in nodes if n.op == "call_module"}
        python = [m for each, n in called.items() if n.meta.get("opaque") for m in each.modules()]
        tensors = [b for m in called for b in m.buffers()]
        if any(n.meta.get("writes") for n in nodes if n.op != "call_module"):
            read = [operator.attrgetter(str(n.target))(root) for n in nodes if n.op == "get_attr"]
            tensors += [t for t in (*read, *inputs) if isinstance(t, torch.Tensor) and not isinstance(t, nn.Parameter)]
        return Moment(python, {id(t): t for t in tensors}.values())

    def holds(self) -> bool:
        """Whether the opened modules are still those of the capture: same flags, no new hooks, none replaced."""
        for siblings, name, module, attributes, flag, hooks in self.state:
            if siblings[name] is not module or attributes["training"] is not flag:
                return False
            for found in hooks:
                if found and any(map(is_users, found.values())):
                    return False
        return True


class Rewriter(Protocol):
    """Captures and rewrites a call that fits no entry; `edits` are the changes of parameters made at first."""

    edits: list[Any]
    facts: Facts

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> list[Entry]: ...


class Program:
    """The graphs of one optimized model.

    Attributes:
        entries: rewritten graphs, each with its guard.
        rewrite: what makes entries of a call that fits none.
        eager: why calls run the user's forward, where they do.
        misses: calls that fitted no entry.
    """

    def __init__(self, entries: list[Entry], rewrite: Rewriter):
        self.entries, self.rewrite = entries, rewrite
        self.eager = ""
        self.misses = 0
        self._lock = threading.RLock()

    def call(self, module: nn.Module, original: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        ambient = runtime.ambient()
        for entry in self.entries:
            inputs = entry.trace.guard(args, kwargs)
            if inputs is None or entry.trace.ambient != ambient or entry.retired:
                continue
            if entry.bound is None:
                entry.attach(module)
            if not entry.holds():
                if entry.hooked():
                    return original(module, *args, **kwargs)  # hooks on modules that graphs look into
                continue
            if entry.unsure:
                return self._try(entry, inputs, module, original, args, kwargs)
            if entry.switches:
                with runtime.unwinding():
                    return entry.run(*inputs)
            return entry.run(*inputs)
        return self._miss(module, original, args, kwargs)

    def _miss(self, module: nn.Module, original: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not self.eager:
            with self._lock:
                self.misses += 1
                if len(self.entries) >= CACHE_LIMIT:
                    self.eager = f"inputs differed in {CACHE_LIMIT} ways; new kinds run the model as it was written"
                    warnings.warn(f"fxspeed: {type(module).__name__}: {self.eager}", stacklevel=4)
                else:
                    try:
                        made = self.rewrite(module, args, kwargs)
                    except Untraceable as error:
                        if not self.entries or self.misses > 2 * CACHE_LIMIT:
                            self.eager = str(error)
                    else:
                        self.entries += made
                        entry = next(e for e in made if e.trace.training is module.training)
                        entry.attach(module)
                        inputs = entry.trace.guard(args, kwargs)
                        if inputs is not None:
                            return self._try(entry, inputs, module, original, args, kwargs)
        return original(module, *args, **kwargs)

    def _try(
        self, entry: Entry, inputs: tuple, module: nn.Module, original: Callable, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Run `entry`; where a module that stayed Python does something new, all is as before, and runs as written."""
        before = entry.moment(module, inputs) if entry.unsure else None
        try:
            with runtime.unwinding():
                return entry.run(*inputs)
        except Differs as error:
            if before is None or not before.rewind():
                raise
            entry.retired = self.eager = str(error).partition(";")[0]
            warnings.warn(f"fxspeed: {type(module).__name__} runs as it was written: {entry.retired}", stacklevel=4)
        return original(module, *args, **kwargs)

    def move(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Move the tensors that graphs hold to where `change` moves the module's; their dtype stays."""
        for entry in self.entries:
            _move(entry.trace.constants, change)
            entry.bound = None

    def detached(self) -> Program:
        """The same graphs, bound to no module yet."""
        made = Program([Entry(e.trace, e.before, e.retired) for e in self.entries], self.rewrite)
        made.eager, made.misses = self.eager, self.misses
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        made = Program([], self.rewrite)
        memo[id(self)] = made
        made.eager, made.misses = self.eager, self.misses
        made.entries = [
            Entry(dataclasses.replace(e.trace, constants=_copied(e.trace.constants)), e.before, e.retired)
            for e in self.entries
        ]
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {
            "entries": [dataclasses.replace(e, before=None, bound=None, state=[], run=None) for e in self.entries],
            "rewrite": self.rewrite,
            "eager": self.eager,
            "misses": self.misses,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock())


def _move(constants: dict[str, Any], change: Callable) -> None:
    for name, value in constants.items():
        if isinstance(value, Region):
            _move(value.constants, change)
        elif isinstance(value, torch.Tensor) and not name.startswith("_tensor_"):  # those belong to the user
            constants[name] = value.to(change(value).device)


def _copied(constants: dict[str, Any]) -> dict[str, Any]:
    return {
        name: dataclasses.replace(value, constants=_copied(value.constants))
        if isinstance(value, Region)
        else copy.copy(value)
        for name, value in constants.items()
    }


class OptimizedMixin:
    """What an optimized module has beside its user's class. `_fxspeed` is its program."""

    _fxspeed: Program
    _fxspeed_class: type[nn.Module]

    def _apply(self, fn: Callable, recurse: bool = True) -> Any:
        before = _dtypes(self)
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        if before != _dtypes(self):
            self._fxspeed.entries.clear()  # forwards may ask for the dtype of a weight
        self._fxspeed.move(fn)
        return result

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """As the user's class loads; takes state dicts of that class too."""
        edits = self._fxspeed.rewrite.edits
        if any(edit.lacks(state_dict) for edit in edits):
            state_dict = dict(state_dict)
            for edit in edits:
                edit.adopt(state_dict)
        return super().load_state_dict(state_dict, *args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _bare, (self._fxspeed_class,), vars(self).copy()


def _dtypes(module: Any) -> list[torch.dtype]:
    return [t.dtype for t in (*module.parameters(), *module.buffers())]


def _bare(cls: Any) -> nn.Module:
    made: nn.Module = object.__new__(cls)
    made.__class__ = optimized_class(cls)
    return made


def optimized_class(cls: Any) -> type[nn.Module]:
    """The subclass of the user's class whose forward runs the program."""
    for known in type.__subclasses__(cls):  # the one cache that keeps no class alive
        if vars(known).get("_fxspeed_class") is cls:
            return known
    original = cls.forward

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        return self._fxspeed.call(self, original, args, kwargs)

    return type(
        cls.__name__,
        (OptimizedMixin, cls),
        {
            "forward": forward,
            "_fxspeed_class": cls,
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
        },
    )


def drop_in(module: nn.Module, program: Program) -> nn.Module:
    """Make `module` run `program`. Its class becomes a subclass of its own; nothing else of it changes."""
    module.__dict__["_fxspeed"] = program
    kind: Any = type(module)
    if not issubclass(kind, OptimizedMixin):
        module.__class__ = optimized_class(kind)
    return module


def program_of(module: nn.Module) -> Program | None:
    """The program that a module runs, if it is optimized."""
    return vars(module).get("_fxspeed")
