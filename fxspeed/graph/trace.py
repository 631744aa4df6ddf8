"""Tracing: run a model once on fake tensors and write down what it does as a torch.fx graph.

The model's own forward runs, on a fake clone, under a `TorchFunctionMode` that sees every torch function called and
makes one node of it. Python runs as Python: branches on sizes become guards (torch's ShapeEnv records them), loops
unroll, helper libraries are seen through. Built-in modules of torch.nn stay single nodes; the user's are opened.

What cannot be a node (a branch on a tensor's value, Python randomness, state kept in attributes) raises
`Untraceable`; the smallest module around it then stays as the user wrote it, as one opaque node.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import operator
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import sympy
import torch
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from fxspeed.errors import Untraceable
from fxspeed.graph import runtime, structure
from fxspeed.graph.asserts import demand_at
from fxspeed.graph.clone import FakeClone
from fxspeed.graph.inputs import CONSTANTS, Dim, InputSpec, compile_guard, describe
from fxspeed.graph.pickling import pack, unpack
from fxspeed.graph.probe import Fact, Probe
from fxspeed.graph.standins import (
    MATH,
    NUMBER_TYPES,
    NUMBERS,
    convolutions_of_any_batch,
    grouped_mm_of_any_dtype,
    named,
    replaced,
    traced_len,
)
from fxspeed.graph.state import own_state, preserved_rng, random_state, restore, same_random_state, set_random_state
from fxspeed.graph.symbols import SYMS, Symbols

_OPERATORS: dict[str, Callable] = {
    f"__{prefix}{name}__": getattr(operator, prefix + (name + "_" if name in ("and", "or") else name))
    for prefix in ("", "i")
    for name in (
        "add",
        "sub",
        "mul",
        "truediv",
        "floordiv",
        "mod",
        "pow",
        "matmul",
        "and",
        "or",
        "xor",
        "lshift",
        "rshift",
    )
    if not (prefix == "i" and name in ("and", "or"))
} | {
    "__iand__": operator.iand,
    "__ior__": operator.ior,
    **{f"__{n}__": getattr(operator, n) for n in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "invert", "abs")},
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
}
_REVERSED = {
    f"__r{name[2:-2]}__": op
    for name, op in _OPERATORS.items()
    if name[2:-2] in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
}
#: Functions behind Tensor's operators that carry another name.
_DUNDERS: dict[Any, str] = {
    f: n for n in (*_OPERATORS, *_REVERSED) if inspect.isfunction(f := getattr(torch.Tensor, n, None))
}
_READS = {"__float__": "float", "__int__": "int", "__index__": "int"}
_REFUSED = {"backward", "register_hook", "retain_grad", "__bool__", "tolist", "numpy", "__array__", "data_ptr", "set_"}
_LEAF_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
#: Built-in modules that compute something else in training than in eval mode.
_MODAL = (
    nn.modules.batchnorm._NormBase,
    nn.modules.dropout._DropoutNd,
    nn.RReLU,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.TransformerEncoderLayer,
    nn.FractionalMaxPool2d,
)
_QUIET = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A module that stays as the user wrote it: its path, class, the reason, and the source line that gave it."""

    path: str
    kind: str
    reason: str
    source: str


@dataclasses.dataclass
class Trace:
    """One captured graph.

    Attributes:
        graph: the nodes. `meta["val"]` is the fake result, `meta["source"]` "file:line" in the user's code,
            `meta["path"]` the module path, `meta["saved"]` the fake tensors that autograd keeps for backward (none of
            the model's own),
            `meta["mutates"]` the nodes whose values the node writes into.
        spec: the call it was captured from.
        guard: `(args, kwargs) -> input tensors or None` for calls that do not match.
        guard_source: the same, to read.
        constants: attributes of the graph that are no parameters or buffers: tensors, and (after passes) regions.
        leaves: modules that could not be opened.
        flags: path -> training flag, of opened modules and of built-in ones that have modes, with which it is right.
        training: whether the root was in training mode.
        autocast: the ambient autocast state it was captured under (see `runtime.ambient`).
        specialized: sizes named in `dynamic` that turned out to be fixed, in words.
        ties: equations that sizes named in `dynamic` must fulfil, in words.
    """

    graph: fx.Graph
    spec: InputSpec
    guard: Callable[[tuple, dict], tuple | None]
    guard_source: str
    constants: dict[str, Any]
    leaves: tuple[Leaf, ...]
    flags: dict[str, bool]
    training: bool
    ambient: tuple
    specialized: tuple[str, ...]
    fake_mode: FakeTensorMode | None
    ties: tuple[str, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self), graph=pack(self.graph))
        del state["guard"], state["fake_mode"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        guard = compile_guard(state["guard_source"], state["spec"].constants)
        vars(self).update(state, graph=unpack(state["graph"]), guard=guard, fake_mode=None)

    def copy(self) -> Trace:
        """The same with a graph and constants of its own."""
        graph = fx.Graph()
        values: dict[fx.Node, fx.Node] = {}
        graph.output(graph.graph_copy(self.graph, values))
        old, new = self.graph.output_node(), graph.output_node()
        new.meta = dict(old.meta)
        for node in graph.nodes:  # metadata points at nodes too
            if "mutates" in node.meta:
                node.meta["mutates"] = tuple(values[n] for n in node.meta["mutates"])
        return dataclasses.replace(self, graph=graph, constants=dict(self.constants))


def trace(model: nn.Module, args: tuple, kwargs: dict[str, Any], dynamic: tuple[Dim, ...] = ("batch",)) -> Trace:
    """Capture `model(*args, **kwargs)`, with the modes and training flags as they are now.

    Neither the model, its buffers, the inputs nor any random state is changed. The inputs may be fake.

    Raises:
        Untraceable: the root module itself cannot be opened.
    """
    probe = Probe(model, args, kwargs, dynamic)
    spaces: dict[int, set[str]] = {}
    found: Trace | None = None
    while True:
        with preserved_rng():
            tracer = _Tracer(model, args, kwargs, dynamic, probe, spaces)
            try:
                traced = tracer.run()
            except _NeedsProbe:  # a module cannot be opened: see what it returns in a real run, outside of all modes
                try:
                    probe.run()
                except Exception as error:
                    raise Untraceable(f"the model does not run: {_reason(error)}") from error
                continue
            except _NeedsNumber as need:  # float(tensor) must return a float: try again with the name replaced
                names = spaces.setdefault(id(need.namespace), set())
                if need.name in names:
                    raise Untraceable(f"{need.name}() of a tensor") from None
                names.add(need.name)
                continue
        if found is not None:
            better = len(traced.leaves) <= len(found.leaves) and len(traced.specialized) < len(found.specialized)
            return traced if better else found
        if not traced.specialized:
            return traced
        found = traced  # int() of a size fixes it: see whether the size can stay symbolic
        for space in tracer.spaces():
            spaces.setdefault(id(space), set()).update(NUMBERS)


def _seems_always(relation: sympy.Basic) -> bool:
    """Whether sizes of all kinds fulfil an equation, which sympy cannot see."""
    symbols = sorted(relation.free_symbols, key=str)
    return all(relation.subs({s: n + 7 * i for i, s in enumerate(symbols)}) == sympy.true for n in range(2, 26))


class _NeedsNumber(BaseException):
    """`float(t)` or `int(t)` was called on a traced tensor, from code with these globals."""

    def __init__(self, namespace: dict[str, Any], name: str):
        self.namespace, self.name = namespace, name


class _NeedsProbe(BaseException):
    """What a module returns must be known from a real run."""


class _Recorder(TorchFunctionMode):
    def __init__(self, record: Callable):
        super().__init__()
        self.record = record

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self.record(func, args, kwargs or {})


class _Tracer:
    def __init__(self, model, args, kwargs, dynamic, probe, numbers):
        self.model, self.args, self.kwargs, self.dynamic, self.probe = model, args, kwargs, dynamic, probe
        self.numbers = numbers  # id of a module's globals -> builtins to replace there
        self.graph = fx.Graph()
        self.symbols = Symbols(self.graph)
        self.shape_env = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
        self.fake_mode = FakeTensorMode(shape_env=self.shape_env, allow_non_fake_inputs=True)
        self.clone = FakeClone(model, self.fake_mode)
        model_tensors = [*self.clone.module.parameters(), *self.clone.module.buffers()]
        self.held = {t.untyped_storage()._cdata for t in model_tensors}  # in memory anyway, saved or not
        self.nodes: dict[int, fx.Node] = {}  # id of a tensor -> the node that made it
        self.alive: list[Any] = []  # so that ids stay unique
        self.constants: dict[str, Any] = {}
        self.leaves: list[Leaf] = []
        self.flags: dict[str, bool] = {}
        self.scope: list[str] = []
        self.noops: dict[int, int] = {}  # id of a tensor that an operator returned as it got it -> id of that
        self.settled: dict[int, dict[str, Any]] = {}  # modules whose attributes hold caches now, and these
        self.calls: dict[str, int] = {}
        self.saved: list[torch.Tensor] = []
        self.paused = 0
        self.reads_requires_grad = False

    # ------------------------------------------------------------------ the run
    def run(self) -> Trace:
        self.spec = describe(self.model.forward, self.args, self.kwargs)
        fakes = [self._input(leaf) for leaf in self.spec.tensors]
        args, kwargs = structure.replace_tensors((self.args, dict(self.kwargs)), iter(fakes))
        before = structure.outline((args, kwargs))
        root = self.clone.module
        states = self._states(root)
        ambient = runtime.ambient()
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
            stack.enter_context(self.fake_mode)
            stack.enter_context(enable_python_dispatcher())  # operators written in C++ would fix symbolic sizes
            # Autograd's nodes own these hooks where the garbage collector cannot see: they must not lead back to us.
            stack.callback(self.saved.clear)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self.saved.append, lambda _: None))
            stack.enter_context(self._patched())
            stack.enter_context(_Recorder(self.record))
            try:
                output = self._open(root, "", nn.Module.__dict__["_fxspeed_call"], args, kwargs, hooks=False)
            except Untraceable:
                raise
            except Exception as error:
                raise Untraceable(f"{_reason(error)} [{_source_of(error)}]") from error
            if structure.outline((args, kwargs)) != before:
                raise Untraceable("forward changes the containers it is given")
            if changed := self._changed(states):
                raise Untraceable(f"forward changes attributes of another module ({type(changed[0]).__name__})")
            self.paused += 1
            result = structure.encode(output, self.arg, self.graph, self.clone.originals)
        self.graph.output(result)
        for node in reversed(list(self.graph.nodes)):  # sizes and items that nobody used
            if not node.users and node.op != "placeholder" and not is_kept(node):
                self.graph.erase_node(node)
        guard, source, specialized, ties = self._guard()
        return Trace(
            self.graph,
            self.spec,
            guard,
            source,
            self.constants,
            tuple(self.leaves),
            self.flags,
            root.training,
            ambient,
            specialized,
            self.fake_mode,
            ties,
        )

    def _input(self, leaf) -> torch.Tensor:
        value = leaf.value
        dims = leaf.dynamic_dims(self.dynamic)
        kinds = [DimDynamic.DUCK if d in dims else DimDynamic.STATIC for d in range(value.dim())]
        context = StatelessSymbolicContext(dynamic_sizes=kinds, constraint_sizes=[None] * len(kinds))
        fake = self.fake_mode.from_tensor(value.detach(), source=ConstantSource(leaf.name), symbolic_context=context)
        fake.requires_grad_(leaf.value.requires_grad)
        node = self.graph.placeholder(leaf.name)
        self._fact(node, fake)
        self._know(fake, node)
        return fake

    def _guard(self):
        shapes: list[tuple] = []
        fixed: list[str] = []
        for leaf, node in zip(self.spec.tensors, [n for n in self.graph.nodes if n.op == "placeholder"], strict=True):
            sizes: list[Any] = []
            dims = leaf.dynamic_dims(self.dynamic)
            for d, size in enumerate(node.meta["val"].shape):
                expr = (
                    self.shape_env.simplify(size.node.expr) if isinstance(size, torch.SymInt) else sympy.Integer(size)
                )
                sizes.append(int(expr) if expr.is_number else expr)
                if d in dims and expr.is_number:
                    fixed.append(f"dimension {d} of {leaf.name} is fixed to {expr}")
            shapes.append(tuple(sizes))
        symbols = {s for sizes in shapes for e in sizes if isinstance(e, sympy.Expr) for s in e.free_symbols}
        relations = []
        for guard in self.shape_env.guards:
            expr = self.shape_env.simplify(guard.expr)
            if expr in (sympy.true, True) or not expr.free_symbols <= symbols:
                continue
            relations.append(expr)
        names = self._names_of_sizes()
        tied = (r for r in dict.fromkeys(relations) if isinstance(r, sympy.Eq) and not _seems_always(r))
        ties = tuple(" == ".join(str(side.subs(names)) for side in r.args) for r in tied)
        for symbol in sorted(symbols, key=str):
            bounds = self.shape_env.var_to_range[symbol]
            relations.append(symbol >= max(int(bounds.lower), 2))  # sizes 0 and 1 broadcast: they are never symbolic
        guard, source = self.spec.guard(shapes, dict.fromkeys(relations), self.reads_requires_grad)
        return guard, source, tuple(fixed), ties

    def _names_of_sizes(self) -> dict[sympy.Symbol, sympy.Symbol]:
        """What a symbol is called in words: the dimension of the input that it is the size of."""
        return {
            symbol: sympy.Symbol(f"{node.name}.shape[{dim}]") for symbol, (node, dim) in self.symbols.origins.items()
        }

    # ------------------------------------------------------------------ modules
    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        """Everything outside the dispatcher that tracing must see, replaced for the time of the trace."""
        original = nn.Module.__call__
        tracer = self

        def call(module, *args, **kwargs):
            if tracer.paused or id(module) not in tracer.clone.module_paths:
                return original(module, *args, **kwargs)
            return tracer.module(module, original, args, kwargs)

        def apply(cls, *args, **kwargs):
            if tracer.paused:
                return original_apply(cls, *args, **kwargs)
            return tracer.record(runtime.function_apply(cls), args, kwargs)

        def checkpointed(*args, **kwargs):
            raise Untraceable("torch.utils.checkpoint inside the model")

        def inference_enter(context):
            tracer.paused or tracer.node(runtime.enter_inference_mode, (context.mode,))
            return original_enter(context)

        def inference_exit(context, *exc):
            original_exit(context, *exc)
            tracer.paused or tracer.node(runtime.exit_inference_mode, ())

        def grad_enabled():
            if not tracer.paused and not sys._getframe(1).f_code.co_filename.startswith(_QUIET[0]):
                tracer.reads_requires_grad = True
            return torch._C.is_grad_enabled()

        def autocast_enter(context):
            if not tracer.paused:
                tracer.node(
                    runtime.enter_autocast,
                    (context.device, context.fast_dtype, context._enabled, context._cache_enabled),
                )
            return original_autocast_enter(context)

        def autocast_exit(context, *exc):
            if not tracer.paused:
                tracer.node(runtime.exit_autocast, ())
            return original_autocast_exit(context, *exc)

        def converted(module, fn, recurse=True):
            if id(module) not in tracer.clone.module_paths:
                return original_converted(module, fn, recurse)
            with tracer._pause():
                for tensor in [*module.parameters(recurse), *module.buffers(recurse)]:
                    if fn(tensor) is not tensor:
                        raise Untraceable("its forward casts or moves a module")
            return module

        def truth(number):
            if not tracer.paused and number.node.is_symbolic() and not number.node.has_hint():
                wanted = tracer._required(number)
                if wanted is not None:
                    return wanted
            return original_truth(number)

        original_converted, original_truth = nn.Module._apply, torch.SymBool.__bool__
        original_autocast_enter, original_autocast_exit = torch.autocast.__enter__, torch.autocast.__exit__
        inference = torch.autograd.grad_mode.inference_mode
        original_apply = torch.autograd.Function.__dict__["apply"].__func__
        original_enter, original_exit = inference.__enter__, inference.__exit__
        import torch.utils.checkpoint as checkpoint

        with contextlib.ExitStack() as stack:
            patch = lambda *a: stack.enter_context(replaced(*a))
            patch(nn.Module, "_fxspeed_call", original)
            patch(nn.Module, "__call__", call)
            patch(nn.Module, "_apply", converted)
            patch(torch.SymBool, "__bool__", truth)
            patch(torch.autograd.Function, "apply", classmethod(apply))
            patch(checkpoint, "_checkpoint_without_reentrant_generator", checkpointed)
            patch(inference, "__enter__", inference_enter)
            patch(inference, "__exit__", inference_exit)
            patch(torch.autocast, "__enter__", autocast_enter)
            patch(torch.autocast, "__exit__", autocast_exit)
            patch(torch, "is_grad_enabled", grad_enabled)
            for name, function in MATH.items():
                patch(math, name, function)
            stack.enter_context(grouped_mm_of_any_dtype())
            stack.enter_context(convolutions_of_any_batch(self.shape_env))
            for space in self.spaces():
                stack.enter_context(named(space, "len", traced_len))
                for name in self.numbers.get(id(space), ()):
                    stack.enter_context(named(space, name, NUMBERS[name]))
            yield

    def spaces(self) -> list[dict[str, Any]]:
        """The globals of the Python files that the user's modules come from."""
        modules = {
            type(m).__module__ for m in self.clone.module.modules() if not type(m).__module__.startswith("torch.")
        }
        spaces = {id(vars(sys.modules[name])): vars(sys.modules[name]) for name in modules if name in sys.modules}
        spaces.update((id(s), s) for m in self.clone.module.modules() if (s := _globals(m)) is not None)
        return list(spaces.values())

    def module(self, module: nn.Module, original: Callable, args: tuple, kwargs: dict) -> Any:
        path = self.clone.module_paths[id(module)]
        count = self.calls[path] = self.calls.get(path, -1) + 1
        last = next(reversed(self.graph.nodes), None)
        known = dict(self.nodes)
        try:
            if is_leaf(module):
                return self.leaf(module, path, original, args, kwargs)
            if id(module) in self.clone.hooked:
                raise Untraceable("it has hooks")
            return self._open(module, path, original, args, kwargs)
        except Exception as error:
            self._erase_after(last, known)
            return self.opaque(module, path, count, args, kwargs, error)

    def _open(self, module, path, original, args, kwargs, hooks=True) -> Any:
        """Run a module's forward with its parts recorded one by one."""
        states, draws = self._states(module), random_state()
        depth = len(self.scope)
        self.scope.append(path)
        self.flags[path] = module.training
        paused = self.paused
        run = (lambda: original(module, *args, **kwargs)) if hooks else (lambda: module.forward(*args, **kwargs))
        last = next(reversed(self.graph.nodes), None)
        try:
            output = run()
            if (changed := self._changed(states)) and not self._only_caches(changed, run, last):
                whose = "its own attributes" if changed == [module] else f"attributes of a {type(changed[-1]).__name__}"
                raise Untraceable(f"its forward changes {whose}")
        except BaseException:
            for part, state in states:
                restore(part, state)
            raise
        finally:
            self.paused = paused
            del self.scope[depth:]
            drew = not same_random_state(draws)
            set_random_state(draws)
        if drew:
            raise Untraceable("its forward draws Python or NumPy random numbers")
        return output

    def _states(self, module: nn.Module) -> list[tuple[nn.Module, dict[str, Any]]]:
        return [(m, own_state(m, self.noops)) for m in module.modules() if m is module or not self._is_opaque(m)]

    def _changed(self, states: list[tuple[nn.Module, dict[str, Any]]]) -> list[nn.Module]:
        """The modules whose attributes are no longer those of `states`, nor caches that are known to be no more."""
        return [
            module
            for module, state in states
            if (now := own_state(module, self.noops)) != state
            and now != self.settled.get(id(module))
            and not self._is_opaque(module)
        ]

    def _only_caches(self, modules: list[nn.Module], run: Callable[[], Any], last: fx.Node | None) -> bool:
        """Whether what a forward left in attributes of `modules` makes no difference to the next forward.

        True where a second forward changes nothing more and does the same as the first, but for what the first
        computed from sizes, parameters and constants alone: it then found that in the attributes. The graph, which
        is the first forward's, computes it anew.
        """
        first = _behind(self.graph, last)
        warm = {id(m): own_state(m, self.noops) for m in modules}
        middle = next(reversed(self.graph.nodes), None)
        known = dict(self.nodes)
        run()
        second = _behind(self.graph, middle)
        same = all(own_state(m, self.noops) == warm[id(m)] for m in modules)
        left = iter(second)
        expected = next(left, None)
        for node in first:
            if expected is not None and (node.op, node.target) == (expected.op, expected.target):
                expected = next(left, None)
            elif _reads_inputs(node):
                same = False
        same = same and expected is None
        self._erase_after(middle, known)
        self.settled.update(warm)
        return same

    def _is_opaque(self, module: nn.Module) -> bool:
        path = self.clone.module_paths[id(module)]
        return any(path == leaf.path or path.startswith(f"{leaf.path}.") for leaf in self.leaves) or is_leaf(module)

    def leaf(self, module, path, original, args, kwargs) -> Any:
        """A built-in module: one node."""
        inputs = (self.arg(args), self.arg(kwargs))
        watched = [*self._tensors((args, kwargs)), *(b for b in module.buffers())]
        versions = [t._version for t in watched]
        mark = len(self.saved)
        with self._pause(), _as_eager(type(module).__name__):
            output = original(module, *args, **kwargs)
        if isinstance(module, _MODAL):
            self.flags[path] = module.training
        node = self.graph.create_node("call_module", path, *inputs)
        self._facts(node, output, mark, [t for t, v in zip(watched, versions, strict=True) if t._version != v])
        node.meta["path"] = path
        if id(module) in self.clone.hooked:
            node.meta["opaque"] = True  # hooks may do anything
        return self._results(node, output, watched)

    def opaque(self, module, path, count, args, kwargs, error: Exception) -> Any:
        """A module that cannot be opened: one node that runs it as it is, its results known from a real run."""
        if isinstance(error, Untraceable) and error.args[0] == _UNKNOWN:
            raise error
        if self.probe.runs is None:
            raise _NeedsProbe
        try:
            outputs = self.probe.outputs(path, count)
        except Untraceable as unknown:
            raise Untraceable(f"{type(module).__name__}: {_reason(error)}; and {unknown}") from error
        inputs = (self.arg(args), self.arg(kwargs))
        node = self.graph.create_node("call_module", path, *inputs)
        with self._pause():
            output = self._from_probe(outputs, node)
        self._facts(node, output, len(self.saved), [])
        node.meta["path"] = path
        if is_leaf(module) and id(module) not in self.clone.hooked:  # known, only too much for fake tensors
            node.meta["writes"] = any(True for _ in module.buffers())
            return self._results(node, output, [], checked=True)
        node.meta["opaque"] = True
        leaf = Leaf(path, type(module).__name__, _reason(error), _source_of(error) or node.meta["source"])
        if leaf not in self.leaves:
            self.leaves.append(leaf)
        if not isinstance(output, torch.Tensor):
            node = self.graph.create_node("call_function", runtime.expect_like, (node, structure.text_of(output)), {})
            self._facts(node, output, len(self.saved), [])
        return self._results(node, output, [], checked=True)

    def _from_probe(self, outputs, node):
        symbols = {
            s.node.expr: s
            for n in self.graph.nodes
            if n.op == "placeholder"
            for d, s in enumerate(n.meta["val"].shape)
            if isinstance(s, torch.SymInt) and isinstance(s.node.expr, sympy.Symbol)
        }
        batch = next(iter(symbols.values()), None)
        if len(symbols) > 1:
            batch = next(
                (n.meta["val"].shape[0] for n in self.graph.nodes if n.op == "placeholder" and n.meta["val"].dim()),
                None,
            )
        return structure.map_objects(outputs, lambda fact: fact.fake(self.fake_mode, batch), Fact)

    # ------------------------------------------------------------------ functions
    def record(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        if self.paused:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _READS and args and isinstance(args[0], torch.Tensor):
            frame = _user_frame()
            if self._constant_value(args[0]) is None and frame is not None:
                raise _NeedsNumber(frame.f_globals, _READS[name])
        if name == "__bool__" and (wanted := self._required(args[0])) is not None:
            return wanted
        if name in _REFUSED and args and isinstance(args[0], torch.Tensor) and id(args[0]) in self.nodes:
            raise Untraceable(f"Tensor.{name}() needs the tensor's value or changes what autograd sees")
        if name == "__set__":
            return self._assign(func, *args)
        if name == "__get__":
            return self._attribute(func, args)
        if name == "__iter__":
            return iter(args[0].unbind(0))
        if name == "__len__":
            with self._pause():
                return func(*args, **kwargs)
        if func in runtime.MODE_SWITCHES:
            with self._pause():
                func(*args)
            return self.node(func, args)
        watched = list(self._tensors((args, kwargs)))
        with self._pause():
            versions = [t._version if not t.is_inference() else 0 for t in watched]
            mark = len(self.saved)
            with _as_eager(name):
                output = func(*args, **kwargs)
            written = [t for t, v in zip(watched, versions, strict=True) if not t.is_inference() and t._version != v]
            if func is torch.Tensor.requires_grad_:
                written = watched  # what follows sees another tensor
        if not written and not _has_nodes(output):
            return output
        if (
            all(self._constant_value(t) is not None for t in watched)
            and watched
            and isinstance(output, (int, float, bool))
        ):
            return output
        op, target, args, kwargs = _call(func, args, kwargs)
        node = self.graph.create_node(op, target, self.arg(args), self.arg(kwargs))
        self._facts(node, output, mark, written)
        return self._results(node, output, watched)

    def node(self, func: Callable, args: tuple) -> fx.Node:
        node = self.graph.create_node("call_function", func, args, {})
        self._facts(node, None, len(self.saved), [])
        return node

    def _attribute(self, func, args) -> Any:
        """`x.T`, `x.grad_fn`, `x.shape`: a node where the result is a tensor."""
        prop = func.__self__
        name = getattr(prop, "__name__", None) or prop.fget.__name__
        with self._pause():
            value = func(*args)
        if name in ("requires_grad", "is_leaf", "grad_fn"):
            self.reads_requires_grad = True
        if not isinstance(value, torch.Tensor):
            return value
        if name in ("grad", "_grad", "_base"):
            raise Untraceable(f"Tensor.{name} is read")
        node = self.graph.create_node("call_function", getattr, (self.arg(args[0]), name), {})
        self._facts(node, value, len(self.saved), [])
        return self._results(node, value, [args[0]])

    def _required(self, value: Any) -> bool | None:
        """The truth of `value` with which the model goes on, if it raises on the other; the graph checks that."""
        frame = _user_frame()
        demand = demand_at(frame, _Tracer.run.__code__, _is_quiet) if frame is not None else None
        if demand is None:
            return None
        self.node(runtime.require, (self.arg(value), demand.wanted, demand.error, demand.message))
        return demand.wanted

    def _assign(self, func, tensor: torch.Tensor, value: Any) -> None:
        """`x.requires_grad = True`; anything else that is assigned to a tensor needs Python."""
        if func.__self__ is not torch.Tensor.requires_grad or value is not True:
            raise Untraceable("an attribute of a tensor is assigned")
        self.record(torch.Tensor.requires_grad_, (tensor,), {})

    # ------------------------------------------------------------------ values and nodes
    def arg(self, value: Any) -> Any:
        """`value` as an argument of a node."""
        if isinstance(value, torch.Tensor):
            return self._node_of(value)
        if isinstance(value, SYMS):
            return self.symbols.node(value)
        if isinstance(value, numpy.generic):  # numpy.float64 is a float that prints otherwise
            return value.item()
        if isinstance(value, CONSTANTS) or value is Ellipsis or isinstance(value, torch.memory_format):
            return value
        if isinstance(value, torch.Size):
            return tuple(map(self.arg, value))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.arg, value))
        if isinstance(value, (tuple, list)):
            return type(value)(map(self.arg, value)) if type(value) in (tuple, list) else tuple(map(self.arg, value))
        if isinstance(value, dict):
            return {k: self.arg(v) for k, v in value.items()}
        if isinstance(value, slice):
            return slice(self.arg(value.start), self.arg(value.stop), self.arg(value.step))
        if isinstance(value, type) and value in NUMBER_TYPES:
            return NUMBER_TYPES[value]
        raise Untraceable(f"an argument of type {type(value).__name__}")

    def _node_of(self, tensor: torch.Tensor) -> fx.Node:
        if (node := self.nodes.get(id(tensor))) is not None:
            return node
        with self._pause():
            if (path := self.clone.tensor_paths.get(id(tensor))) is not None:
                node = self.graph.create_node("get_attr", path)
            elif (
                original := self.clone.originals.get(id(tensor), None if isinstance(tensor, FakeTensor) else tensor)
            ) is not None:
                path = f"_tensor_{len(self.constants)}"
                self.constants[path] = original
                node = self.graph.create_node("get_attr", path)
            else:
                raise Untraceable(_UNKNOWN)
            self._fact(node, tensor)
            self._know(tensor, node)
        return node

    def _results(self, node: fx.Node, output: Any, watched: list, checked: bool = False) -> Any:
        """Connect what a node returned with the node. Returns what the traced code gets."""
        if isinstance(output, torch.Tensor):
            if any(output is t for t in watched) and not node.meta.get("mutates"):
                with self._pause():
                    made = output.view_as(output)  # a no-op here, perhaps not for other inputs: keep the two apart
                    self.noops[id(made)] = self.noops.get(id(output), id(output))
                    node.meta["val"] = output = made
            if checked:
                sizes = tuple(self.arg(s) for s in output.shape)
                node = self.graph.create_node("call_function", runtime.expect_shape, (node, sizes), {})
                self._facts(node, output, len(self.saved), [])
            self._know(output, node)
            return output
        if isinstance(output, SYMS):
            self.symbols.bind(output, node)
            return output
        if isinstance(output, (tuple, list, dict)):
            items = output.items() if isinstance(output, dict) else enumerate(output)
            made = {}
            for key, item in items:
                if _has_nodes(item):
                    part = self.graph.create_node("call_function", operator.getitem, (node, key), {})
                    self._facts(part, item, len(self.saved), [])
                    item = self._results(part, item, watched, checked)
                made[key] = item
            if isinstance(output, dict):
                return type(output)(**made) if dataclasses.is_dataclass(output) else type(output)(made)
            if hasattr(output, "_fields"):
                return type(output)(*made.values())
            return type(output)(made.values())
        if _has_nodes(output):
            attributes = structure.attributes_of(output)
            assert attributes is not None
            for name, item in attributes.items():
                if _has_nodes(item):
                    part = self.graph.create_node("call_function", getattr, (node, name), {})
                    self._facts(part, item, len(self.saved), [])
                    attributes[name] = self._results(part, item, watched, checked)
        return output

    def _know(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self.nodes[id(tensor)] = node
        self.alive.append(tensor)
        self.symbols.found(node, tensor)

    def _tensors(self, tree: Any) -> Iterator[torch.Tensor]:
        if isinstance(tree, torch.Tensor):
            yield tree
        elif isinstance(tree, (tuple, list)):
            for item in tree:
                yield from self._tensors(item)
        elif isinstance(tree, dict):
            yield from self._tensors(list(tree.values()))

    def _constant_value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return getattr(tensor, "constant", None) if isinstance(tensor, FakeTensor) else None

    def _facts(self, node: fx.Node, value: Any, mark: int, written: list[torch.Tensor]) -> None:
        self._fact(node, value)
        kept = (t for t in self.saved[mark:] if t.untyped_storage()._cdata not in self.held)
        node.meta["saved"] = tuple(kept)
        if written:
            node.meta["mutates"] = tuple(self._node_of(t) for t in written if id(t) in self.nodes)
            node.meta["writes"] = True

    def _fact(self, node: fx.Node, value: Any) -> None:
        node.meta["val"] = value
        node.meta["path"] = self.scope[-1] if self.scope else ""
        frame = _user_frame()
        node.meta["source"] = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""

    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    def _erase_after(self, last: fx.Node | None, known: dict[int, fx.Node]) -> None:
        erased: set[fx.Node] = set()
        for node in reversed(list(self.graph.nodes)):
            if node is last:
                break
            if node.op == "placeholder":
                continue
            self.graph.erase_node(node)
            erased.add(node)
        self.nodes = {i: n for i, n in known.items() if n not in erased}
        self.symbols.forget(erased)


# ---------------------------------------------------------------------- small helpers
_UNKNOWN = "a tensor was made by code that tracing cannot see (a compiled or scripted function)"


def is_leaf(module: nn.Module) -> bool:
    """Whether a module becomes one node: torch.nn's own, and those with a parametrization on top."""
    kind = type(module)
    if parametrize.is_parametrized(module):
        kind = kind.__bases__[0]
    return kind.__module__.startswith(("torch.nn", "torch.ao.nn")) and not isinstance(module, _LEAF_CONTAINERS)


def is_kept(node: fx.Node) -> bool:
    """Whether a node must stay although nothing uses its result."""
    if node.op in ("placeholder", "output") or node.meta.get("writes") or node.meta.get("opaque"):
        return True
    if node.op == "call_function" and (
        node.target in runtime.SIDE_EFFECTS or isinstance(node.target, runtime.FunctionApply)
    ):
        return True
    return node.op == "call_module" or _draws_random(node)


def _draws_random(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return any(
        word in name
        for word in (
            "rand",
            "dropout",
            "bernoulli",
            "multinomial",
            "normal",
            "uniform",
            "poisson",
            "rrelu",
            "exponential",
            "geometric",
            "cauchy",
            "scaled_dot",
            "multi_head",
        )
    )


def _as_eager(name: str) -> Any:
    """Dropout and attention as eager runs them: their decompositions keep other tensors for backward."""
    plain = "dropout" in name.lower() or name == "scaled_dot_product_attention"
    return no_python_dispatcher() if plain else contextlib.nullcontext()


def _call(func: Callable, args: tuple, kwargs: dict) -> tuple[str, Any, tuple, dict]:
    """How a torch function is written in a graph: operator, method or function."""
    name = str(_DUNDERS.get(func) or getattr(func, "__name__", ""))
    method = getattr(torch.Tensor, name, None) is func or getattr(torch._C.TensorBase, name, None) is func
    if name in _OPERATORS and not kwargs:
        return "call_function", _OPERATORS[name], args, kwargs
    if name in _REVERSED and len(args) == 2:
        return "call_function", _REVERSED[name], args[::-1], kwargs
    if method and args:
        return "call_method", name, args, kwargs
    return "call_function", func, args, kwargs


def _has_nodes(value: Any) -> bool:
    """Whether `value` holds something that only a node can make: tensors, numbers read from tensors."""
    if isinstance(value, torch.Size):
        return False
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, SYMS):
        expr = value.node.expr
        if isinstance(value, torch.SymBool) and isinstance(expr, sympy.Eq):  # .item() of a bool tensor: u0 == 1
            expr = expr.lhs
        return isinstance(expr, sympy.Symbol) and value.node.shape_env is not None and _is_unbacked(value)
    if isinstance(value, (tuple, list)):
        return any(map(_has_nodes, value))
    if isinstance(value, dict):
        return any(map(_has_nodes, value.values()))
    attributes = structure.attributes_of(value)
    return attributes is not None and any(map(_has_nodes, attributes.values()))


def _is_unbacked(value: Any) -> bool:
    return not value.node.has_hint()


def _is_quiet(file: str) -> bool:
    """Whether a file is torch's, fxspeed's or Python's machinery rather than the model's."""
    return file.startswith((*_QUIET, "<")) or "contextlib" in file


def _user_frame() -> types.FrameType | None:
    """The innermost frame of code that belongs neither to torch nor to fxspeed."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and (_is_quiet(frame.f_code.co_filename)):
        frame = frame.f_back
    return frame


def _behind(graph: fx.Graph, last: fx.Node | None) -> list[fx.Node]:
    """The nodes made after `last`."""
    found: list[fx.Node] = []
    for node in reversed(graph.nodes):
        if node is last:
            break
        found.append(node)
    return found[::-1]


def _reads_inputs(node: fx.Node) -> bool:
    """Whether a node depends on values of the graph's inputs, not on sizes alone, or does more than compute."""
    todo, seen = [node], {node}
    while todo:
        each = todo.pop()
        if each.op == "placeholder" or each.meta.get("opaque") or _draws_random(each):
            return True
        if each.op == "call_method" and each.target == "size":
            continue
        for source in each.all_input_nodes:
            if source not in seen:
                seen.add(source)
                todo.append(source)
    return False


def _globals(module: nn.Module) -> dict[str, Any] | None:
    """The globals of a user module's forward, behind whatever decorates it."""
    forward = inspect.unwrap(type(module).forward)
    space = getattr(forward, "__globals__", None)
    return space if space is not None and not str(space.get("__name__", "")).startswith("torch.") else None


def _source_of(error: BaseException) -> str:
    found, tb = "", error.__traceback__
    while tb is not None:
        file = tb.tb_frame.f_code.co_filename
        if not _is_quiet(file):
            found = f"{file}:{tb.tb_lineno}"
        tb = tb.tb_next
    return found


def _reason(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if "data-dependent" in text.lower() or type(error).__name__ == "GuardOnDataDependentSymNode":
        return "Python branches on a tensor's value"
    return text if isinstance(error, Untraceable) else f"{type(error).__name__}: {text}"
