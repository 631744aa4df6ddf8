"""What graphs call when they run, beside PyTorch's own functions."""

from __future__ import annotations

import builtins
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from fxspeed.errors import Differs
from fxspeed.graph.structure import text_of


def expect_shape(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """`tensor`, the result of a module that capture could not open, if it has the shape the graph was made for."""
    if tensor.shape != shape:
        raise Differs(
            f"a module that was left as it is returned shape {tuple(tensor.shape)} where the captured graph expects "
            f"{tuple(shape)}; call the optimized module itself, which then runs as it was written"
        )
    return tensor


def expect_like(value: Any, outline: str) -> Any:
    """`value`, the nested result of a module that capture could not open, if it is but for its tensors what it was."""
    if (found := text_of(value)) != outline:
        raise Differs(
            f"a module that was left as it is returned {found} where the captured graph expects {outline}; call the "
            "optimized module itself, which then runs as it was written"
        )
    return value


def require(value: Any, wanted: bool, error: str, message: str) -> None:
    """Raise the built-in exception named `error` unless the truth of `value` is `wanted`: the model's own assertion."""
    if isinstance(value, (FakeTensor, torch.SymBool)):
        return
    if bool(value) is not wanted:
        raise getattr(builtins, error)(*([message] if message else []))


class FunctionApply:
    """`cls.apply` of a `torch.autograd.Function`, as the target of a node."""

    def __init__(self, cls: type[torch.autograd.Function]):
        self.cls = cls
        self.__name__ = f"{cls.__name__}_apply"
        self.__module__ = cls.__module__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.cls.apply(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FunctionApply) and other.cls is self.cls

    def __hash__(self) -> int:
        return hash(self.cls)


def function_apply(cls: type[torch.autograd.Function]) -> FunctionApply:
    return FunctionApply(cls)


class _Modes(threading.local):
    """The blocks that the running graph has entered and not left."""

    def __init__(self) -> None:
        self.open: list[Any] = []


_modes = _Modes()


def enter_inference_mode(mode: bool) -> None:
    """Begin a `torch.inference_mode(mode)` block."""
    _enter(torch.inference_mode(mode))


def exit_inference_mode() -> None:
    """End the innermost block begun by `enter_inference_mode`."""
    _modes.open.pop().__exit__(None, None, None)


def enter_autocast(device_type: str, dtype: torch.dtype | None, enabled: bool, cache_enabled: bool = True) -> None:
    """Begin a `torch.autocast` block."""
    _enter(torch.autocast(device_type, dtype, enabled, cache_enabled))


def exit_autocast() -> None:
    """End the innermost block begun by `enter_autocast`."""
    _modes.open.pop().__exit__(None, None, None)


def _enter(context: Any) -> None:
    context.__enter__()
    _modes.open.append(context)


@contextlib.contextmanager
def unwinding() -> Iterator[None]:
    """Leave the blocks that a graph has entered when an error ends it half-way; restore the grad mode."""
    depth, grad = len(_modes.open), torch.is_grad_enabled()
    try:
        yield
    finally:
        while len(_modes.open) > depth:
            _modes.open.pop().__exit__(None, None, None)
        torch.set_grad_enabled(grad)


#: Functions of torch that switch a mode; they pass through a function mode when a `with` block does.
MODE_SWITCHES = {torch._C._set_grad_enabled}
SIDE_EFFECTS = MODE_SWITCHES | {
    enter_inference_mode,
    exit_inference_mode,
    enter_autocast,
    exit_autocast,
    expect_shape,
    expect_like,
    require,
    torch._assert,
}


#: What a graph checks of the modules in it that stayed Python.
EXPECTATIONS = {expect_shape, expect_like}


def ambient() -> tuple:
    """The autocast state around a call: a graph is right for the state it was captured under."""
    if not torch.is_autocast_enabled() and not torch.is_autocast_enabled("cpu"):
        return ()
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
