"""An optimized model as a Python package that needs torch alone: readable source, weights beside it."""

from __future__ import annotations

import collections
import importlib.util
import inspect
import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fxspeed.emit.constructors import constructor, literal
from fxspeed.emit.formatted import formatted
from fxspeed.emit.source import attribute, function_name, path, render
from fxspeed.errors import Error
from fxspeed.graph import recompute, runtime
from fxspeed.graph.regions import Region, model_nodes
from fxspeed.graph.state import preserved_rng
from fxspeed.graph.structure import Build, Constant, map_tensors, tensors_in
from fxspeed.graph.trace import Trace, is_leaf

_PART = '''
class Part(nn.Module):
    """A module of parts: children, parameters and buffers by name."""

    def __init__(self, /, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def __getitem__(self, index):
        return getattr(self, str(index))
'''
_COMPILED = '''
def compiled_by_inductor(method):
    """A method that reads its inputs alone, compiled as one."""
    compiled = torch.compile(
        lambda *inputs: method(None, *inputs), fullgraph=True, dynamic=True, options={"fallback_random": True}
    )
    return lambda self, *inputs: compiled(*inputs)
'''
_MAPPING = '''
class {name}(dict):
    """Stands for {full}: fields as keys, attributes or by number."""

    def __init__(self, **fields):
        super().__init__(fields)
        self.__dict__ = self

    def __getitem__(self, key):
        return tuple(self.values())[key] if isinstance(key, (int, slice)) else super().__getitem__(key)
'''
_OBJECT = '''
class {name}(types.SimpleNamespace):
    """Stands for {full}: its attributes alone."""
'''
_LOAD = '''
def load() -> Model:
    """The model with the weights that lie beside this file."""
    model = Model()
    saved = torch.load(Path(__file__).with_name("weights.pt"), weights_only=True)
    model.load_state_dict(saved["state_dict"])
    for name, value in saved["constants"].items():
        model.get_buffer(name).copy_(value)
    return model


def example() -> tuple[tuple, dict]:
    """Inputs `(args, kwargs)` of the shapes that the graphs were made from, drawn anew."""
    return {example}
'''
_INIT = '''"""{title}. `python -m {name}` trains a few steps."""

from .model import Model, example, load
from .step import TrainStep, main

__all__ = ["Model", "TrainStep", "example", "load", "main"]
'''
_MAIN = '''"""Trains a few steps: `python -m {name}`."""

from . import main

main()
'''


def write(
    directory: str | os.PathLike[str],
    module: nn.Module,
    traces: Mapping[str, Trace],
    example: tuple[tuple, dict[str, Any]],
    notes: Iterable[str],
    step: str,
) -> None:
    """Write the package; nothing is left where it cannot be written.

    Args:
        traces: the graphs by mode, "train" and "eval".
        example: inputs `(args, kwargs)`, of which only shapes and dtypes are used.
        notes: what was rewritten, a line each.
        step: the text of step.py.

    Raises:
        Error: the directory is there and not empty; the model cannot be written without the user's code.
    """
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise Error(f"{target} is there already; give an empty or a new directory")
    if not target.name.isidentifier():
        raise Error(f"{target.name!r} is no name of a Python package; use letters, digits and underscores")
    source, constants = model_source(module, traces, example, notes)
    title = f"{type(module).__name__}, rewritten by fxspeed"
    texts = {
        "__init__.py": _INIT.format(title=title, name=target.name),
        "__main__.py": _MAIN.format(name=target.name),
        "model.py": formatted(source),
        "step.py": step,
    }
    if "recomputed_in_backward" in source:
        texts["recompute.py"] = inspect.getsource(recompute)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        made = Path(scratch) / target.name
        made.mkdir()
        for name, text in texts.items():
            (made / name).write_text(text)
        torch.save({"state_dict": module.state_dict(), "constants": constants}, made / "weights.pt")
        _check(made, module, example)
        if target.exists():
            target.rmdir()
        made.rename(target)


def model_source(
    module: nn.Module, traces: Mapping[str, Trace], example: tuple[tuple, dict[str, Any]], notes: Iterable[str]
) -> tuple[str, dict[str, torch.Tensor]]:
    """The text of model.py, and the tensors by name that it holds and no state dict does."""
    for trace in traces.values():
        _refuse(trace, module)
    skeleton = _Skeleton(module, traces)
    names = _names(traces)
    methods, constants = _methods(module, traces)
    lines = skeleton.lines()
    lines += [f"self.{n} = nn.Buffer({_empty(t)}, persistent=False)" for n, t in constants.items()]
    persistent = module.state_dict().keys()
    constants |= {n: b.detach() for n, b in module.named_buffers() if n not in persistent}
    everything = "\n".join(methods)
    imports = [
        "import torch",
        *(["import torch.nn.functional as F"] if "F." in everything else []),
        "from torch import nn",
    ]
    standard = {"pathlib": "from pathlib import Path"}
    for module_name in ("collections", "types", "math", "builtins", "operator"):
        if any(f"{module_name}." in text for text in (*names.values(), everything)):
            standard[module_name] = f"import {module_name}"
    if "require(" in everything:
        names["require"] = f"\n{inspect.getsource(runtime.require)}"
        standard |= {"builtins": "import builtins", "typing": "from typing import Any"}
        imports.insert(1, "from torch._subclasses.fake_tensor import FakeTensor")
    blocks = [
        "from __future__ import annotations",
        "\n".join(sorted(standard.values())),
        "\n".join(imports),
    ]
    if "recomputed_in_backward" in everything:
        functions = ["recomputed_in_backward", *_called(traces, everything, recompute.__name__)]
        blocks.append(f"from .recompute import {', '.join(sorted(functions))}")
    done = textwrap.indent("\n".join(notes), "    ")
    title = f'"""{type(module).__name__}, rewritten by fxspeed.\n\n{done}\n"""'
    body = [_PART, *names.values()]
    if "@compiled_by_inductor" in everything:
        body.append(_COMPILED)
    flags = {mode: _flags(trace, module) for mode, trace in traces.items()}
    model = f'''
class Model(Part):
    """{type(module).__name__}: `forward` runs the graph of the mode it is in, `train()` or `eval()`."""

    def __init__(self):
        super().__init__()
{textwrap.indent(chr(10).join(lines) or "pass", " " * 8)}

{_train_method(flags)}{textwrap.indent(everything, "    ")}'''
    body += [model, _LOAD.replace("{example}", _example(example))]
    return "\n\n".join((title, *blocks)) + "\n\n" + "\n".join(body), constants


# ---------------------------------------------------------------------- what cannot be written
def _refuse(trace: Trace, module: nn.Module) -> None:
    if trace.ambient:
        raise Error("the graph was captured under autocast; call optimize() outside of it (precision= is for that)")
    for leaf in trace.leaves:
        raise Error(f"{leaf.path} ({leaf.kind}) stayed Python ({leaf.reason}): it cannot be written without your code")
    known = {"torch": torch, "F": F}
    for node in model_nodes(trace.graph, trace.constants):
        where = f"{node.meta.get('source') or node.name}"
        if node.meta.get("opaque"):
            raise Error(f"{node.target} has hooks, which cannot be written without your code; remove them")
        if isinstance(node.target, runtime.FunctionApply):
            raise Error(
                f"{node.target.cls.__name__}, a torch.autograd.Function of its own, cannot be written [{where}]"
            )
        if node.op != "call_function" or isinstance(node.target, (Build, Constant, type)) or _is_operator(node.target):
            continue
        if node.target in runtime.SIDE_EFFECTS or getattr(node.target, "__module__", "") == recompute.__name__:
            continue
        try:
            same = eval(function_name(node.target), known) is node.target
        except (AttributeError, NameError, SyntaxError):
            same = False
        if not same:
            raise Error(f"{function_name(node.target)} is no public function of torch: it cannot be written [{where}]")


def _is_operator(target: Any) -> bool:
    return getattr(target, "__module__", "") == "_operator"


def _called(traces: Mapping[str, Trace], text: str, module: str) -> list[str]:
    """The functions of a module that `text`, which the graphs are written as, calls by name alone."""
    nodes = (n for t in traces.values() for n in model_nodes(t.graph, t.constants))
    found = {n.target.__name__ for n in nodes if getattr(n.target, "__module__", "") == module}
    return sorted(name for name in found if re.search(rf"(?<![\w.]){name}\(", text))


# ---------------------------------------------------------------------- classes that stand for the user's
def _names(traces: Mapping[str, Trace]) -> dict[str, str]:
    """Name -> definition of what the graphs call beside torch's functions."""
    found: dict[str, tuple[Any, str]] = {}
    for trace in traces.values():
        for node in trace.graph.nodes:
            target = node.target
            if node.op != "call_function" or not isinstance(target, (Build, Constant, type)):
                continue
            if isinstance(target, type) and target.__module__ in ("builtins", "torch", "torch.return_types"):
                continue
            name = target.__name__
            cls = target.cls if isinstance(target, Build) else target
            other = name in found and found[name][0] != cls and not isinstance(target, Constant)
            if other or any(n.name == name for n in trace.graph.nodes):
                raise Error(f"the graph has two meanings of the name {name}: it cannot be written")
            found[name] = cls, _stand_in(target)
    return {name: text for name, (_, text) in found.items()}


def _stand_in(target: Any) -> str:
    if isinstance(target, Constant):
        value = target.value
        try:
            known, note = literal(value), ""
        except TypeError:
            known, note = "None", f"  # a {type(value).__name__} of the model's own"
        return f"\n{target.__name__} = lambda: {known}{note}\n"
    cls = target.cls if isinstance(target, Build) else target
    full = f"{cls.__module__}.{cls.__qualname__}"
    if cls is collections.OrderedDict:
        return "\nOrderedDict = collections.OrderedDict\n"
    fields: Any = getattr(cls, "_fields", ())
    if issubclass(cls, tuple):
        return f"\n{cls.__name__} = collections.namedtuple({cls.__name__!r}, {list(fields)!r})\n"
    return (_MAPPING if issubclass(cls, dict) else _OBJECT).format(name=cls.__name__, full=full)


# ---------------------------------------------------------------------- modules
class _Skeleton:
    """The tree of modules as constructor calls."""

    def __init__(self, root: nn.Module, traces: Mapping[str, Trace]):
        self.root = root
        self.called = {
            str(n.target) for t in traces.values() for n in model_nodes(t.graph, t.constants) if n.op == "call_module"
        }
        self.modules: dict[int, str] = {}
        self.tensors: dict[int, str] = {}
        self.again: list[str] = []

    def lines(self) -> list[str]:
        made = [
            f"self.{name} = {text}" if name.isidentifier() else f"setattr(self, {name!r}, {text})"
            for name, text in self.parts(self.root, "")
        ]
        frozen = [n for n, p in self.root.named_parameters() if not p.requires_grad]
        if frozen:
            made += [f"for name in {frozen!r}:", "    self.get_parameter(name).requires_grad_(False)"]
        return made + self.again

    def parts(self, module: nn.Module, at: str) -> Iterator[tuple[str, str]]:
        """Name and text of what a module holds itself."""
        for name, parameter in module._parameters.items():
            if parameter is not None and not self.seen(self.tensors, parameter, f"{at}{name}"):
                yield name, f"nn.Parameter({_empty(parameter)})"
        for name, buffer in module._buffers.items():
            if buffer is not None and not self.seen(self.tensors, buffer, f"{at}{name}"):
                left = ", persistent=False" if name in module._non_persistent_buffers_set else ""
                yield name, f"nn.Buffer({_empty(buffer)}{left})"
        for name, child in module._modules.items():
            if child is not None and not self.seen(self.modules, child, f"{at}{name}"):
                yield name, self.text(child, f"{at}{name}")

    def seen(self, known: dict[int, str], value: Any, at: str) -> bool:
        first = known.setdefault(id(value), at)
        if first == at:
            return False
        owner, _, name = at.rpartition(".")
        self.again.append(f"setattr({path(owner, self.root) if owner else 'self'}, {name!r}, {attribute(first)})")
        return True

    def text(self, module: nn.Module, at: str) -> str:
        if is_leaf(module):
            if (text := constructor(module)) is not None:
                for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                    self.seen(self.tensors, tensor, f"{at}.{name}")
                return text
            if at in self.called:
                raise Error(f"{at} ({type(module).__name__}) cannot be written as a call of its class")
        parts = list(self.parts(module, f"{at}."))
        kind = type(module)
        numbered = [name for name, _ in parts] == [str(i) for i in range(len(parts))]
        if kind in (nn.Sequential, nn.ModuleList) and numbered and len(parts) == len(module._modules):
            inside = "".join(f"\n    {_indented(text)}," for _, text in parts)
            if not parts:
                return f"nn.{kind.__name__}()"
            return f"nn.Sequential({inside}\n)" if kind is nn.Sequential else f"nn.ModuleList([{inside}\n])"
        plain = all(name.isidentifier() for name, _ in parts)
        inside = "".join(
            f"\n    {name}={_indented(text)}," if plain else f"\n    {name!r}: {_indented(text)},"
            for name, text in parts
        )
        return f"Part({inside}\n)" if plain and parts else ("Part(**{" + inside + "\n})" if parts else "Part()")


def _indented(text: str) -> str:
    return text.replace("\n", "\n    ")


def _empty(tensor: torch.Tensor) -> str:
    shape = ", ".join(map(str, tensor.shape)) if tensor.dim() else "()"
    return f"torch.empty({shape}{'' if tensor.dtype is torch.float32 else f', dtype={tensor.dtype}'})"


# ---------------------------------------------------------------------- graphs
def _methods(module: nn.Module, traces: Mapping[str, Trace]) -> tuple[list[str], dict[str, torch.Tensor]]:
    """forward and what it calls; the tensors that the graphs hold."""
    methods: list[str] = []
    held: dict[str, torch.Tensor] = {}
    taken: dict[str, Any] = {}
    guards = {}
    for mode, trace in traces.items():
        text = render(trace.graph, trace.constants, module, f"forward_{mode}", runnable=True)
        for name, value in _constants(trace.constants).items():
            new = name if taken.setdefault(name, value) is value else f"{mode}_{name}"
            text = re.sub(rf"(?<=self\.){name}\b|(?<=def ){name}(?=\()", new, text)
            if isinstance(value, torch.Tensor):
                held[new] = value.detach()
        methods.append(text)
        guards[mode] = _guard(trace)
    same = len(set(guards.values())) == 1
    for mode, text in guards.items():
        if same and mode != next(iter(guards)):
            continue
        name = "inputs_of" if same else f"inputs_of_{mode}"
        methods.insert(0, text.replace("def guard(args, kwargs):", f"@staticmethod\ndef {name}(args, kwargs):", 1))
    runs = "".join(
        f"    {'if self.training' if mode == 'train' and len(traces) > 1 else 'if True'}:\n"
        f"        return self.forward_{mode}(*self.{'inputs_of' if same else f'inputs_of_{mode}'}(args, kwargs))\n"
        for mode in traces
    )
    runs = runs.replace("    if True:\n        return", "    return")
    return [f"def forward(self, *args, **kwargs):\n{runs}", *methods], held


def _constants(constants: Mapping[str, Any]) -> dict[str, Any]:
    """What a graph and its regions hold, by name."""
    found = dict(constants)
    for value in constants.values():
        if isinstance(value, Region):
            found |= _constants(value.constants)
    return found


def _guard(trace: Trace) -> str:
    """The function that finds the graph's inputs in those of a call, for whatever device."""
    constants = trace.spec.constants

    def value(match: re.Match) -> str:
        found = constants[int(match[1])]
        if found is type(None):
            return "type(None)"
        if isinstance(found, type):
            if found.__module__ != "builtins":
                raise Error(f"inputs that hold a {found.__name__} cannot be written without your code")
            return found.__name__
        if isinstance(found, frozenset):
            return repr(set(found))
        if isinstance(found, torch.layout):
            return str(found)
        try:
            return literal(found)
        except TypeError:
            raise Error(f"inputs that hold a {type(found).__name__} cannot be written without your code") from None

    text = re.sub(r" and t\d+\.device == c\[\d+\]", "", trace.guard_source)
    text = re.sub(r"\bc\[(\d+)\]", value, text).replace(" in plain", " in (torch.Tensor, nn.Parameter)")
    refusal = 'raise ValueError("the graph was made for inputs of another kind; optimize and save again for these")'
    text = re.sub(r"(if not .*): return None", rf"\1:\n        {refusal}", text)
    return re.sub(r"\(\(\((\w+) := (n\[\d+\])\) or 1\)\)", r"(\1 := \2) >= 0", text)


def _flags(trace: Trace, module: nn.Module) -> dict[str, bool]:
    """Built-in modules whose training flag is not that of the whole."""
    return {
        name: flag
        for name, flag in trace.flags.items()
        if flag is not trace.training and name and is_leaf(module.get_submodule(name))
    }


def _train_method(flags: Mapping[str, dict[str, bool]]) -> str:
    if not any(flags.values()):
        return ""
    differing = {mode == "train": found for mode, found in flags.items() if found}
    return f'''    def train(self, mode=True):
        """As `nn.Module.train`; some modules have a mode of their own."""
        super().train(mode)
        for name, flag in {differing!r}.get(mode, {{}}).items():
            self.get_submodule(name).training = flag
        return self

'''


# ---------------------------------------------------------------------- text and files
def _example(example: tuple[tuple, dict[str, Any]]) -> str:
    """An expression for inputs of the shapes of `example`."""

    def drawn(t: torch.Tensor) -> str:
        if t.is_floating_point() or t.is_complex():
            return f"torch.randn({tuple(t.shape)}, dtype={t.dtype})"
        if t.dtype is torch.bool or not t.numel():
            return f"torch.ones({tuple(t.shape)}, dtype={t.dtype})"
        low, high = int(t.min()), int(t.max())
        if low == high:
            return f"torch.full({tuple(t.shape)}, {low}, dtype={t.dtype})"
        return f"torch.randint({low}, {high + 1}, {tuple(t.shape)}, dtype={t.dtype})"

    def text(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return drawn(value)
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {text(v)}" for k, v in value.items()) + "}"
        if type(value) in (list, tuple):
            inside = ", ".join(map(text, value))
            return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if len(value) == 1 else ''})"
        return literal(value)

    try:
        return text(example)
    except TypeError as error:
        raise Error(f"the example inputs cannot be written: {error}") from None


def _check(directory: Path, module: nn.Module, example: tuple[tuple, dict[str, Any]]) -> None:
    """Import what was written and compare it, in eval mode, with the module it was written from."""
    name = f"_fxspeed_saved_{directory.name}"
    spec = importlib.util.spec_from_file_location(
        name, directory / "model.py", submodule_search_locations=[str(directory)]
    )
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[name] = package
    try:
        spec.loader.exec_module(package)
        made = package.load().eval()
        args, kwargs = package.example()
    except Exception as error:
        raise Error(f"what was written does not load ({type(error).__name__}: {error}); nothing was saved") from error
    finally:
        for key in [k for k in sys.modules if k == name or k.startswith(f"{name}.")]:
            del sys.modules[key]
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    if device.type == "meta":
        return
    flags = [(m, m.training) for m in module.modules()]
    try:
        module.eval()
        made.to(device)
        put = lambda t: t.to(device)
        inputs = map_tensors((args, kwargs), put, torch.Tensor)
        outputs = []
        with torch.no_grad(), preserved_rng():
            for each in (module, made):
                torch.manual_seed(0)
                outputs.append(tensors_in(each.forward(*inputs[0], **inputs[1])))
        wanted, got = outputs
    except Exception as error:
        raise Error(f"what was written does not run ({type(error).__name__}: {error}); nothing was saved") from error
    finally:
        for m, flag in flags:
            m.training = flag
    same = len(wanted) == len(got) and all(
        torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-5, equal_nan=True)
        if a.is_floating_point()
        else torch.equal(a, b)
        for a, b in zip(wanted, got, strict=True)
    )
    if not same:
        raise Error("what was written computes something else than the module; nothing was saved")
