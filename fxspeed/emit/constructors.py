"""Built-in modules of torch as the call that makes them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

#: Constructor arguments that are kept under another name or in another form.
_KEPT_AS: dict[str, Any] = {
    "add_bias_kv": lambda m: m.bias_k is not None,
    "bias": lambda m: m.bias if isinstance(vars(m).get("bias"), bool) else _has_bias(m),
}
_RECURRENT = (
    "input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional", "proj_size",
)  # fmt: skip


def constructor(module: nn.Module) -> str | None:
    """`nn.Conv2d(3, 64, 7, stride=2, bias=False)`: an expression for a module like this one, weights apart.

    None where no call of its class gives the same parameters, buffers and settings, or it is no module of torch.nn.
    """
    cls = type(module)
    if getattr(nn, cls.__name__, None) is not cls:
        return None
    try:
        arguments = _arguments(module)
        if not _alike(_made(cls, arguments), module):
            return None
        for name, value in list(arguments.items()):  # as short as it can be said
            shorter = {k: v for k, v in arguments.items() if k != name}
            uniform = isinstance(value, tuple) and len(set(value)) == 1
            for fewer in (shorter, {**arguments, name: value[0]}) if uniform else (shorter,):
                try:
                    same = _alike(_made(cls, fewer), module)
                except (TypeError, ValueError, IndexError):
                    continue
                if same:
                    arguments = fewer
                    break
        return _written(cls, arguments)
    except Exception:
        return None


def _arguments(module: nn.Module) -> dict[str, Any]:
    """All arguments of the constructor, as the module's attributes tell them."""
    parameters = {
        n: p
        for n, p in inspect.signature(type(module).__init__).parameters.items()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    names = _RECURRENT if isinstance(module, nn.RNNBase) else list(parameters)[1:]
    found = {}
    for name in names:
        optional = name not in parameters or parameters[name].default is not inspect.Parameter.empty
        if name in ("device", "dtype") or name.startswith("_") or (optional and not _known(module, name)):
            continue
        found[name] = _KEPT_AS[name](module) if name in _KEPT_AS else getattr(module, name)
    dtype = next((p.dtype for p in (*module.parameters(), *module.buffers()) if p.is_floating_point()), torch.float32)
    if dtype is not torch.float32:
        found["dtype"] = dtype
    return found


def _known(module: nn.Module, name: str) -> bool:
    if isinstance(module, nn.RNNBase):
        return name != "proj_size" or isinstance(module, nn.LSTM)
    return name in _KEPT_AS or hasattr(module, name)


def _made(cls: type[nn.Module], arguments: dict[str, Any]) -> nn.Module:
    with torch.device("meta"):
        return eval(_written(cls, arguments), {"nn": nn, "torch": torch})


def _written(cls: type[nn.Module], arguments: dict[str, Any]) -> str:
    needed = [
        n for n, p in inspect.signature(cls.__init__).parameters.items() if p.default is p.empty and n in arguments
    ]
    if issubclass(cls, nn.RNNBase):
        needed = [n for n in _RECURRENT[:2] if n in arguments]
    positional = [literal(arguments[n]) for n in needed]
    keywords = [f"{n}={literal(v)}" for n, v in arguments.items() if n not in needed]
    return f"nn.{cls.__name__}({', '.join([*positional, *keywords])})"


def literal(value: Any) -> str:
    """A plain value as Python.

    Raises:
        TypeError: it is none.
    """
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f'float("{value}")'
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        inside = ", ".join(map(literal, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if len(value) == 1 else ''})"
    raise TypeError(f"a {type(value).__name__} has no literal")


def _has_bias(module: nn.Module) -> bool:
    name = "in_proj_bias" if isinstance(module, nn.MultiheadAttention) else "bias"
    return getattr(module, name, None) is not None


def _alike(made: nn.Module, module: nn.Module) -> bool:
    """Whether two modules differ in weights alone, and in what others have attached to the second."""
    tensors = [{name: (t.shape, t.dtype) for name, t in m.state_dict().items()} for m in (made, module)]
    pairs = list(zip(made.modules(), module.modules(), strict=False))
    return (
        tensors[0] == tensors[1]
        and len(list(made.modules())) == len(list(module.modules()))
        and all(type(a) is type(b) and _same_settings(vars(a), vars(b)) for a, b in pairs)
    )


def _same_settings(made: dict[str, Any], own: dict[str, Any]) -> bool:
    compared = [k for k, v in made.items() if k != "training" and (callable(v) or _is_plain(v))]
    return all(k in own and type(own[k]) is type(made[k]) and own[k] == made[k] for k in compared)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
