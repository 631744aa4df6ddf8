"""Call PyTorch's fused operators where the model writes them out.

Rule: operations that compute, from one tensor and numbers, what one of these operators computes are replaced by it.
Pointwise functions and normalizations are recognized by value, not by spelling: the operations are run in float64 on a
grid (zeros of both signs, kinks, large and non-finite values among it), and value and gradient must agree with the
operator's everywhere. Attention is recognized by its parts.

| operator | what is recognized |
| --- | --- |
| F.gelu, both approximations | x * 0.5 * (1 + erf(x / sqrt(2))), the tanh polynomial, any grouping |
| F.silu | x * sigmoid(x), SwiGLU's first factor; not x / (1 + exp(-x)), whose gradient is NaN far below zero |
| F.mish | x * tanh(softplus(x)), on accelerators: on a CPU the operator is slower |
| F.hardswish, F.hardsigmoid | x * relu6(x + 3) / 6; not with clamp, whose gradient at the kinks is another |
| F.softplus, F.logsigmoid, F.softsign | where they agree for large x too |
| F.layer_norm, F.rms_norm | mean, variance and scaling over the last dimension, with weight and bias |
| F.softmax, F.log_softmax | exp and sum over the last dimension, less the maximum |
| F.scaled_dot_product_attention | softmax(q @ k.transpose(-2, -1) * scale + mask) @ v without active dropout |

Does not fire: intermediate results that others read; other dtypes than the input's on the way (casts); dropout inside
of attention (its random numbers would differ); a mask that depends on the inputs or has rows without any entry (the
operator gives zeros there, not NaN), or is trained; norms and softmax of tensors that are not contiguous; inside of
autocast.

Costs: attention has no second derivative on a CPU. Saves: the bytes that the single operations keep for backward.

Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016; Zhang and Sennrich, "Root Mean Square Layer
Normalization", 2019; torch.nn.functional.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import fx, nn

from fxspeed.cost.memory import step_timeline
from fxspeed.graph import runtime
from fxspeed.graph.ops import argument, module_of, name_of
from fxspeed.graph.regions import bytes_of
from fxspeed.graph.trace import Trace
from fxspeed.passes.base import Captured, Change, Pass, Skip

_POINTWISE = frozenset(
    """add sub rsub mul div true_divide neg abs square sqrt rsqrt reciprocal exp log log1p expm1 erf tanh sigmoid relu
    relu6 hardtanh softplus clamp clamp_min clamp_max maximum minimum pow where to float type_as""".split()
)
_REDUCTIONS = frozenset("mean var sum amax max".split())
_TELLING = frozenset("tanh erf exp sigmoid relu6 hardtanh clamp clamp_min clamp_max softplus rsqrt sqrt pow".split())
_POINTWISE_MODULES: dict[type[nn.Module], str] = {
    nn.Tanh: "tanh", nn.Sigmoid: "sigmoid", nn.ReLU: "relu", nn.ReLU6: "relu6", nn.Hardtanh: "hardtanh",
    nn.Softplus: "softplus",
}  # fmt: skip
#: Operators of one tensor, by the keywords that they are called with.
_FUNCTIONS: tuple[tuple[Callable, dict[str, Any]], ...] = (
    (F.gelu, {}),
    (F.gelu, {"approximate": "tanh"}),
    (F.silu, {}),
    (F.mish, {}),
    (F.hardswish, {}),
    (F.hardsigmoid, {}),
    (F.softplus, {}),
    (F.logsigmoid, {}),
    (F.softsign, {}),
)
_SLOW_ON_CPU = (F.mish,)  # measured: 1.3 times the three operations
_LONGEST = 24


@dataclasses.dataclass(frozen=True)
class _Match:
    """`inside` computes, from `inputs`, what `function(*inputs, *more, **keywords)` does."""

    inside: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    function: Callable
    call: Callable[[list[fx.Node]], tuple[tuple, dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class NativeOps(Pass):
    """Replace written-out functions, norms, softmax and attention by PyTorch's operators."""

    name: ClassVar[str] = "native_ops"

    def run(self, captured: Captured) -> list[Change | Skip]:
        train = captured.traces.get("train")
        if train is not None and captured.options.get("memory_budget") is not None:  # shares are of the user's model
            captured.options.setdefault("plain_timeline", step_timeline(train, captured.root, plain=True))
        records: dict[tuple[str, str], Change | Skip] = {}
        for trace in captured.traces.values():
            for record in _rewrite(trace, captured.root):
                records.setdefault((record.target, record.what), record)
        return list(records.values())


def _rewrite(trace: Trace, root: nn.Module) -> Iterator[Change | Skip]:
    known: dict[tuple, Any] = {}
    if trace.ambient or any(n.target is runtime.enter_autocast for n in trace.graph.nodes):
        return
    for node in reversed(list(trace.graph.nodes)):
        if node._erased or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        found = _attention(node, root) if name_of(node) in ("matmul", "bmm") else _by_value(node, root, known)
        if isinstance(found, Skip):
            yield found
        elif found is not None and (change := _replace(trace, node, found)) is not None:
            yield change


# ---------------------------------------------------------------------- by value
def _by_value(node: fx.Node, root: nn.Module, known: dict[tuple, Any]) -> _Match | None:
    """What the operations that end in `node` compute, if it is one of the operators."""
    if _operation(node, root) not in ("mul", "div", "true_divide", "add", "sub", "log", "log1p", "neg", "where"):
        return None
    cone = _cone(node, root)
    if cone is None:
        return None
    for source, inside in cone:
        names = {_operation(n, root) for n in inside}
        reduces = bool(names & _REDUCTIONS)
        if not names & _TELLING or (reduces and not source.meta["val"].is_contiguous()):
            continue
        inputs = (source, *_vectors(inside, source))
        if len(inputs) > 3 or (len(inputs) > 1 and not reduces):
            continue
        key = _key(inside, inputs, root)
        if key not in known:
            known[key] = _recognize(inside, inputs, reduces, root)
            slow = node.meta["val"].device.type == "cpu" and known[key] is not None and known[key][0] in _SLOW_ON_CPU
            if slow:
                known[key] = None
        if known[key] is not None:
            function, call = known[key]
            return _Match(inside, inputs, function, call)
    return None


def _operation(node: fx.Node, root: nn.Module) -> str:
    """The plain name of a node that value recognition can run."""
    if node.meta.get("writes") or node.meta.get("opaque") or not isinstance(node.meta.get("val"), torch.Tensor):
        return ""
    if node.op == "call_module":
        module = module_of(node, root)
        plain = module is not None and not getattr(module, "inplace", False)
        return _POINTWISE_MODULES.get(type(module), "") if plain else ""
    if (True in node.args[1:] and name_of(node) in ("relu", "hardtanh")) or node.kwargs.get("inplace"):
        return ""
    if node.target is getattr:
        return ""
    return name_of(node).removeprefix("special_")


def _cone(node: fx.Node, root: nn.Module) -> list[tuple[fx.Node, tuple[fx.Node, ...]]] | None:
    """Pairs of a source and the nodes that compute `node` from it alone, largest first."""
    value = node.meta["val"]

    def part(n: fx.Node) -> bool:
        val = n.meta.get("val")
        name = _operation(n, root)
        if name in _REDUCTIONS:
            return value.dim() >= 2 and _over_last(n) and val.dtype is value.dtype
        alike = isinstance(val, torch.Tensor) and val.dtype is value.dtype and val.device == value.device
        return name in _POINTWISE and alike and val.dim() == value.dim()

    if not part(node):
        return None
    inside, todo = {node}, [node]
    border: dict[fx.Node, None] = {}
    while todo:
        for n in todo.pop().all_input_nodes:
            if n in inside:
                continue
            if not isinstance(n.meta.get("val"), torch.Tensor):
                return None  # a number that is known only when the model runs
            if part(n) and len(inside) < _LONGEST:
                inside.add(n)
                todo.append(n)
            else:
                border[n] = None
    ordered = _in_order(inside, node)
    found: list[tuple[fx.Node, tuple[fx.Node, ...]]] = []
    for source in (*border, *ordered):
        if source is node or source.meta["val"].shape != value.shape or source.meta["val"].dtype is not value.dtype:
            continue
        between = _between(source, node, inside)
        if between is not None and len(between) >= 2:
            found.append((source, between))
    return sorted(found, key=lambda pair: -len(pair[1]))


def _in_order(inside: set[fx.Node], last: fx.Node) -> list[fx.Node]:
    """`inside` from the last to the first."""
    found: list[fx.Node] = []
    node = last
    while len(found) < len(inside) and node.op != "root":
        if node in inside:
            found.append(node)
        node = node.prev
    return found


def _between(source: fx.Node, last: fx.Node, inside: set[fx.Node]) -> tuple[fx.Node, ...] | None:
    """The nodes on the way from `source` to `last`; None where others read them, or other tensors enter."""
    taken, todo = {last}, [last]
    reached = False
    while todo:
        for n in todo.pop().all_input_nodes:
            if n is source:
                reached = True
            elif n not in taken and not _is_vector(n, last):
                if n not in inside:
                    return None
                taken.add(n)
                todo.append(n)
    if not reached or source in taken:
        return None
    if any(user not in taken for n in taken if n is not last for user in n.users):
        return None
    return tuple(reversed(_in_order(taken, last)))


def _is_vector(node: fx.Node, last: fx.Node) -> bool:
    """Whether a node is a weight or bias of the last dimension."""
    value, whole = node.meta.get("val"), last.meta["val"]
    if not isinstance(value, torch.Tensor) or value.dim() != 1 or whole.dim() < 2:
        return False
    return isinstance(value.shape[0], int) and value.shape[0] == whole.shape[-1] and value.dtype is whole.dtype


def _vectors(inside: tuple[fx.Node, ...], source: fx.Node) -> list[fx.Node]:
    found = dict.fromkeys(i for n in inside for i in n.all_input_nodes if i not in inside and i is not source)
    return list(found)


def _over_last(node: fx.Node) -> bool:
    """Whether a reduction is over the last dimension and keeps it."""
    name = name_of(node)
    dims = argument(node, 1, "dim")
    rank = node.args[0].meta["val"].dim() if node.args and isinstance(node.args[0], fx.Node) else 0
    keep = argument(node, 3 if name == "var" and len(node.args) > 3 else 2, "keepdim", False)
    if name == "max":
        return False  # gives two results
    if isinstance(dims, (list, tuple)):
        dims = dims[0] if len(dims) == 1 else None
    if name == "var":
        keep = node.kwargs.get("keepdim", keep)
    return isinstance(dims, int) and not isinstance(dims, bool) and dims % rank == rank - 1 and keep is True


def _key(inside: tuple[fx.Node, ...], inputs: tuple[fx.Node, ...], root: nn.Module) -> tuple:
    """Equal for equal operations on inputs of equal rank and width."""
    number = {n: i for i, n in enumerate((*inputs, *inside))}
    plain = lambda a: f"%{number[a]}" if isinstance(a, fx.Node) else a
    shape = inputs[0].meta["val"].shape
    width = shape[-1] if len(shape) and len(inputs) > 1 else None
    return (len(shape), str(width), inputs[0].meta["val"].dtype) + tuple(
        (
            _operation(n, root),
            str(fx.node.map_aggregate(n.args, plain)),
            str(fx.node.map_aggregate(dict(n.kwargs), plain)),
            str(module_of(n, root)) if n.op == "call_module" else "",
        )
        for n in inside
    )


def _recognize(inside: tuple[fx.Node, ...], inputs: tuple[fx.Node, ...], reduces: bool, root: nn.Module) -> Any:
    """(operator, how it is called), by value and gradient in float64."""
    if not reduces:
        grid = _grid()
        mine = _evaluated(lambda x: _run(inside, inputs, [x], root), [grid])
        if mine is None:
            return None
        for function, keywords in _FUNCTIONS:
            if _equal(mine, _evaluated(lambda x, f=function, k=keywords: f(x, **k), [grid])):
                return function, lambda nodes, k=keywords: ((nodes[0],), k)
        return None
    shape = inputs[0].meta["val"].shape
    width = shape[-1]
    if not isinstance(width, int) or width < 2:
        return None
    generator = torch.Generator().manual_seed(0)
    draw = lambda *s: torch.randn(*s, generator=generator, dtype=torch.float64)
    x = draw(*(2 for _ in shape[:-1]), width) * torch.tensor([0.5, 3.0], dtype=torch.float64).view(
        2, *[1] * (len(shape) - 1)
    )
    values = [x, *(draw(width) for _ in inputs[1:])]
    mine = _evaluated(lambda *v: _run(inside, inputs, list(v), root), values)
    if mine is None:
        return None
    for function, call in _normalizations(inside, width, len(inputs)):

        def theirs(*v: torch.Tensor, f: Callable = function, c: Callable = call) -> torch.Tensor:
            args, keywords = c(list(v))
            return f(*args, **keywords)

        if _equal(mine, _evaluated(theirs, values)):
            return function, call
    return None


def _normalizations(inside: tuple[fx.Node, ...], width: int, inputs: int) -> Iterator[tuple[Callable, Callable]]:
    """What operations with a reduction may be, as (operator, arguments from inputs)."""
    if inputs == 1:
        yield F.softmax, lambda v: ((v[0],), {"dim": -1})
        yield F.log_softmax, lambda v: ((v[0],), {"dim": -1})
    numbers = {a for n in inside for a in (*n.args, *n.kwargs.values()) if isinstance(a, float) and 0 < a < 0.1}
    ways: dict[int, list[tuple[int | None, int | None]]] = {
        1: [(None, None)],
        2: [(1, None), (None, 1)],
        3: [(1, 2), (2, 1)],
    }
    for eps in sorted(numbers) or [0.0]:
        for weight, bias in ways[inputs]:
            yield F.layer_norm, partial(_norm_call, width, eps, weight, bias, True)
            if bias is None:
                yield F.rms_norm, partial(_norm_call, width, eps, weight, None, False)


def _norm_call(
    width: int, eps: float, weight: int | None, bias: int | None, has_bias: bool, inputs: list
) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a normalization; `weight` and `bias` are numbers of inputs."""
    scale, shift = (None if i is None else inputs[i] for i in (weight, bias))
    return (inputs[0], (width,), scale, *([shift] if has_bias else [])), {"eps": eps}


def _grid() -> torch.Tensor:
    inf = float("inf")
    special = [0.0, -0.0, 3.0, -3.0, 6.0, -6.0, 20.0, -20.0, 100.0, -100.0, 800.0, -800.0, inf, -inf, float("nan")]
    return torch.cat([torch.tensor(special, dtype=torch.float64), torch.linspace(-12, 12, 385, dtype=torch.float64)])


def _run(inside: tuple[fx.Node, ...], inputs: tuple[fx.Node, ...], values: list[torch.Tensor], root: nn.Module) -> Any:
    known: dict[fx.Node, Any] = dict(zip(inputs, values, strict=True))
    for node in inside:
        args, kwargs = (fx.node.map_arg(a, known.__getitem__) for a in (node.args, dict(node.kwargs)))
        name = name_of(node)
        if name in ("to", "float", "type_as"):  # the dtype is the same before and after: it is one of no effect
            known[node] = args[0]
        elif node.op == "call_method":
            known[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        elif node.op == "call_module":
            known[node] = root.get_submodule(str(node.target))(*args, **kwargs)
        else:
            known[node] = node.target(*args, **kwargs)
    return known[inside[-1]]


def _evaluated(function: Callable, values: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """Value and gradients of a function; None where it does not run."""
    given = [v.clone().requires_grad_() for v in values]
    try:
        with torch.enable_grad():
            out = function(*given)
            if out.shape != values[0].shape or not out.requires_grad:
                return None
            weights = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape)
            gradients = torch.autograd.grad(out, given, weights, allow_unused=True)
    except (RuntimeError, TypeError, ValueError):
        return None
    return [out.detach(), *(torch.zeros_like(v) if g is None else g for g, v in zip(gradients, values, strict=True))]


def _equal(mine: list[torch.Tensor], theirs: list[torch.Tensor] | None) -> bool:
    if theirs is None:
        return False
    zeros = (mine[0] == 0) & (theirs[0] == 0)
    close = (torch.allclose(a, b, rtol=1e-9, atol=1e-12, equal_nan=True) for a, b in zip(mine, theirs, strict=True))
    return bool((torch.signbit(mine[0]) == torch.signbit(theirs[0]))[zeros].all()) and all(close)


# ---------------------------------------------------------------------- attention
def _attention(node: fx.Node, root: nn.Module) -> _Match | Skip | None:
    """softmax(q @ k^T * scale + mask) @ v that ends in `node`."""
    if len(node.args) != 2 or node.kwargs:
        return None
    weights, v = node.args
    inside = [node]

    def only(n: Any) -> bool:
        """Take a node into the match, if nothing else reads it."""
        if not isinstance(n, fx.Node) or len(n.users) != 1 or n.meta.get("writes"):
            return False
        inside.append(n)
        return True

    while only(weights) and (name_of(weights) in ("to", "float", "type_as") or _is_idle_dropout(weights, root)):
        weights = weights.args[0]
        if name_of(inside[-1]) != "dropout" and inside[-1].meta["val"].dtype is not weights.meta["val"].dtype:
            return None
    if inside[-1] is not weights or not _is_softmax(weights, root):
        return None
    scores, scale, mask = weights.args[0], 1.0, None
    while only(scores) and name_of(scores) not in ("matmul", "bmm"):
        name, args = name_of(scores), scores.args
        number = (
            args[1] if len(args) > 1 and isinstance(args[1], (int, float)) and not isinstance(args[1], bool) else None
        )
        if scores.kwargs:
            return None
        if name == "mul" and number is not None:
            scale *= number
        elif name in ("div", "true_divide") and number:
            scale /= number
        elif name == "add" and mask is None and scale == 1.0 and len(args) == 2 and isinstance(args[1], fx.Node):
            mask = ("add", args[1])
        elif name == "masked_fill" and mask is None and scale == 1.0 and args[2] == -math.inf:
            mask = ("fill", args[1])
        else:
            return None
        scores = args[0]
    if inside[-1] is not scores or len(scores.args) != 2:
        return None
    q, kt = scores.args
    if not (isinstance(kt, fx.Node) and _is_transpose(kt)):
        return None
    if kt.users.keys() == {scores}:
        inside.append(kt)
    k = kt.args[0]
    ranks = {n.meta["val"].dim() for n in (q, k, v)}
    dtypes = {n.meta["val"].dtype for n in (*inside, q, k, v)}
    if len(ranks) != 1 or min(ranks) < 3 or len(dtypes) != 1 or q.meta["val"].shape[:-2] != v.meta["val"].shape[:-2]:
        return None
    if q.meta["val"].shape[:-2] != k.meta["val"].shape[:-2]:
        return None
    inputs = (q, k, v) if mask is None else (q, k, v, mask[1])
    if mask is not None:
        if reason := _why_not(mask, root):
            return Skip(
                "native_ops", node.name, "F.scaled_dot_product_attention", reason, source=node.meta.get("source", "")
            )

    def call(nodes: list[fx.Node]) -> tuple[tuple, dict[str, Any]]:
        return tuple(nodes), {"scale": scale}

    kind = _filled_attention if mask is not None and mask[0] == "fill" else F.scaled_dot_product_attention
    return _Match(tuple(inside), inputs, kind, call)


def _filled_attention() -> None:
    """Stands for attention whose mask says what is left out, not what is taken."""


def _is_idle_dropout(node: fx.Node, root: nn.Module) -> bool:
    module = module_of(node, root)
    if isinstance(module, nn.Dropout):
        return not module.p
    return name_of(node) == "dropout" and (
        argument(node, 1, "p", 0.5) == 0 or argument(node, 2, "training", True) is False
    )


def _is_softmax(node: fx.Node, root: nn.Module) -> bool:
    module = module_of(node, root)
    rank = node.meta["val"].dim()
    if isinstance(module, nn.Softmax):
        return module.dim is not None and module.dim % rank == rank - 1
    dim = argument(node, 1, "dim")
    known = (
        set(node.kwargs) <= {"dim", "_stacklevel", "dtype"} and node.kwargs.get("dtype") is None and len(node.args) < 3
    )
    return name_of(node) == "softmax" and known and isinstance(dim, int) and dim % rank == rank - 1


def _is_transpose(node: fx.Node) -> bool:
    if node.target is getattr:
        return node.args[1] == "mT"
    rank = node.meta["val"].dim()
    dims = [a % rank for a in node.args[1:] if isinstance(a, int)]
    return name_of(node) == "transpose" and not node.kwargs and sorted(dims) == [rank - 2, rank - 1]


def _why_not(mask: tuple[str, fx.Node], root: nn.Module) -> str:
    """Why a mask cannot be handed to the operator; empty if it can."""
    if mask[1].meta["val"].requires_grad:
        return "the mask is trained: no fused kernel takes it"
    try:
        value = _constant(mask[1], root)
    except _Depends:
        return "the mask depends on the inputs: a row could be masked as a whole"
    taken = ~value.bool() if mask[0] == "fill" else value > -math.inf
    if value.dim() < 2:
        return "the mask is no matrix"
    return "" if bool(taken.any(-1).all()) else "a row of the mask is masked as a whole"


class _Depends(Exception):
    """A value depends on the inputs."""


def _constant(node: Any, root: nn.Module) -> Any:
    """The value of a node that depends on sizes, parameters and buffers alone, at the example's sizes."""
    if not isinstance(node, fx.Node):
        return node
    if node.op == "get_attr":
        try:
            return operator.attrgetter(str(node.target))(root).detach()
        except AttributeError:
            raise _Depends from None  # one of the graph's own constants
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        return int(value.node.hint)
    if isinstance(value, int):
        return value
    if node.op == "placeholder" or node.meta.get("writes") or node.op == "call_module":
        raise _Depends
    args, kwargs = (fx.node.map_arg(a, lambda n: _constant(n, root)) for a in (node.args, dict(node.kwargs)))
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)


# ---------------------------------------------------------------------- rewriting
def _replace(trace: Trace, node: fx.Node, match: _Match) -> Change | None:
    """Put the operator where `node` stands; None, and nothing done, where its result looks otherwise."""
    graph = trace.graph
    args, kwargs = match.call(list(match.inputs))
    function = match.function
    with graph.inserting_before(node):
        if function is _filled_attention:
            function = F.scaled_dot_product_attention
            taken = graph.call_function(torch.logical_not, (args[3],))
            _describe(trace, taken, node)
            args = (*args[:3], taken)
        new = graph.call_function(function, args, kwargs)
    before = sum(bytes_of(t) for t in {id(t): t for n in match.inside for t in n.meta.get("saved", ())}.values())
    _describe(trace, new, node)
    old_value, value = node.meta["val"], new.meta["val"]
    same = value.dtype is old_value.dtype and value.shape == old_value.shape
    laid_out = value.stride() == old_value.stride() or all(name_of(u) == "transpose" for u in node.users)
    if not (same and laid_out):
        graph.erase_node(new)
        return None
    node.replace_all_uses_with(new)
    for each in sorted(match.inside, key=list(graph.nodes).index, reverse=True):
        if not each.users:
            graph.erase_node(each)
    saved = max(before - sum(map(bytes_of, new.meta["saved"])), 0)
    label = f"F.{function.__name__}" + (f"(approximate={kwargs['approximate']!r})" if "approximate" in kwargs else "")
    what = f"{len(match.inside)} operations are {label}"
    return Change("native_ops", new.name, what, "one operator, equal in float64", {"bytes": saved} if saved else {})


def _describe(trace: Trace, new: fx.Node, old: fx.Node) -> None:
    """Value and kept tensors of a new node that stands where `old` stood."""
    assert trace.fake_mode is not None
    args, kwargs = (fx.node.map_arg(a, lambda n: n.meta["val"]) for a in (new.args, dict(new.kwargs)))
    saved: list[torch.Tensor] = []
    grad = trace.training
    with (
        trace.fake_mode,
        torch.set_grad_enabled(grad),
        torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t),
    ):
        new.meta["val"] = new.target(*args, **kwargs)
    own = {n.meta["val"].untyped_storage()._cdata for n in new.all_input_nodes if n.op == "get_attr"}
    new.meta["saved"] = tuple(t for t in saved if t.untyped_storage()._cdata not in own)
    new.meta |= {k: old.meta[k] for k in ("source", "path") if k in old.meta}
