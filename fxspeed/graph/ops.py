"""What kind of operation a node is, whichever way it was written (function, method, operator or module)."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

_OPERATOR_NAMES = {
    getattr(operator, name): plain
    for name, plain in {
        "add": "add",
        "sub": "sub",
        "mul": "mul",
        "truediv": "div",
        "floordiv": "floor_divide",
        "mod": "remainder",
        "pow": "pow",
        "matmul": "matmul",
        "and_": "bitwise_and",
        "or_": "bitwise_or",
        "xor": "bitwise_xor",
        "lt": "lt",
        "le": "le",
        "gt": "gt",
        "ge": "ge",
        "eq": "eq",
        "ne": "ne",
        "neg": "neg",
        "invert": "bitwise_not",
        "abs": "abs",
    }.items()
}

#: Elementwise operations, by the name of the function or method.
POINTWISE = frozenset(
    """
    add sub rsub mul div true_divide floor_divide remainder fmod pow neg abs sign square sqrt rsqrt reciprocal
    exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc
    sigmoid relu relu6 gelu silu mish hardswish hardsigmoid hardtanh leaky_relu elu celu selu softplus softsign
    logsigmoid tanhshrink hardshrink softshrink threshold clamp clamp_min clamp_max clip where maximum minimum
    masked_fill lerp addcmul addcdiv lt le gt ge eq ne logical_and logical_or logical_not logical_xor bitwise_and
    bitwise_or bitwise_xor bitwise_not floor ceil round trunc frac nan_to_num isnan isinf isfinite atan2 hypot
    float double half bfloat16 int long bool to type dropout
    """.split()
)

_POINTWISE_MODULES: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.GELU: "gelu",
    nn.SiLU: "silu",
    nn.Mish: "mish",
    nn.Hardswish: "hardswish",
    nn.Hardsigmoid: "hardsigmoid",
    nn.Hardtanh: "hardtanh",
    nn.LeakyReLU: "leaky_relu",
    nn.ELU: "elu",
    nn.CELU: "celu",
    nn.SELU: "selu",
    nn.Softplus: "softplus",
    nn.Softsign: "softsign",
    nn.LogSigmoid: "logsigmoid",
    nn.Tanh: "tanh",
    nn.Sigmoid: "sigmoid",
    nn.Tanhshrink: "tanhshrink",
    nn.Dropout: "dropout",
}

CONVOLUTIONS = frozenset(f"conv{t}{d}d" for t in ("", "_transpose") for d in (1, 2, 3))
CONVOLUTION_MODULES = (nn.modules.conv._ConvNd,)
FACTORIES = frozenset("tensor as_tensor from_numpy arange ones zeros full linspace eye scalar_tensor".split())
RANDOM = frozenset(
    """
    dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout dropout_ bernoulli bernoulli_ rand randn
    randint rand_like randn_like randint_like randperm multinomial normal normal_ uniform_ poisson rrelu rrelu_
    exponential_ geometric_ cauchy_ log_normal_ random_ scaled_dot_product_attention multi_head_attention_forward
    gumbel_softmax fractional_max_pool2d fractional_max_pool3d
    """.split()
)


def name_of(node: fx.Node) -> str:
    """The operation's plain name: `add` for `+`, `x.add(y)` and `torch.add(x, y)` alike. Modules have none."""
    if node.op == "call_method":
        return str(node.target)
    if node.op == "call_function":
        return _OPERATOR_NAMES.get(node.target) or getattr(node.target, "__name__", "").removeprefix("_")
    return ""


def module_of(node: fx.Node, root: nn.Module) -> nn.Module | None:
    """The user's module that the node calls, if it calls one."""
    if node.op != "call_module" or node.meta.get("region"):
        return None
    return root.get_submodule(str(node.target))


def pointwise_name(node: fx.Node, root: nn.Module) -> str:
    """The elementwise operation that the node is, or an empty string.

    In-place writes, operations on other than tensors, and casts to another device are none.
    """
    if node.meta.get("writes") or node.meta.get("opaque") or not isinstance(node.meta.get("val"), torch.Tensor):
        return ""
    module = module_of(node, root)
    if module is not None:
        kind = _POINTWISE_MODULES.get(type(module), "")
        plain = not getattr(module, "inplace", False) and not any(
            module._forward_hooks or module._forward_pre_hooks or ()
        )
        return kind if plain else ""
    name = name_of(node)
    if name not in POINTWISE or node.kwargs.get("out") is not None or node.kwargs.get("inplace"):
        return ""
    tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    if not tensors or any(t.meta["val"].device != node.meta["val"].device for t in tensors):
        return ""
    if name in ("relu", "dropout", "threshold", "hardtanh", "elu", "silu", "mish") and True in node.args[1:]:
        return name if name == "dropout" and node.args[2:] in ((True,), (True, False)) else ""
    return name


def is_random(node: fx.Node, root: nn.Module) -> bool:
    """Whether the node may draw from torch's random generator."""
    module = module_of(node, root)
    if module is None:
        return name_of(node) in RANDOM
    return any(
        isinstance(m, (nn.modules.dropout._DropoutNd, nn.RReLU, nn.MultiheadAttention, nn.RNNBase))
        for m in module.modules()
    )


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of a call by position or keyword."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def storage_of(node: fx.Node) -> int | None:
    """What tells apart the memory of a node's tensor: equal for views of the same tensor."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
