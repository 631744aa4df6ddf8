"""Rewrites operations inside recomputed regions so that their results are kept (see `graph.recompute`)."""

from __future__ import annotations

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

from fxspeed.graph.ops import module_of, name_of
from fxspeed.graph.recompute import kept_addmm, kept_convolution, kept_linear


def can_keep(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node is an operation that `keep` knows."""
    if node.meta.get("opaque") or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    module = module_of(node, root)
    if module is not None:
        plain = not parametrize.is_parametrized(module) and len(node.args) == 1 and not node.kwargs
        if isinstance(module, nn.modules.conv._ConvNd):
            batched = node.meta["val"].dim() == len(module.kernel_size) + 2
            return plain and batched and module.padding_mode == "zeros" and not isinstance(module.padding, str)
        return plain and type(module) is nn.Linear
    name = name_of(node)
    if name == "linear":
        return not node.kwargs and all(a is None or isinstance(a, fx.Node) for a in node.args)
    if name == "addmm" and not node.kwargs and len(node.args) == 3:
        return node.args[0].meta["val"].dim() == 1
    return False


def keep(graph: fx.Graph, node: fx.Node, root: nn.Module) -> None:
    """Write `node`, which `can_keep` accepts, as the function that keeps its result."""
    module = module_of(node, root)
    if module is None:
        node.target = kept_addmm if name_of(node) == "addmm" else kept_linear
        node.op = "call_function"
        return
    path = str(node.target)
    with graph.inserting_before(node):
        weight = graph.create_node("get_attr", f"{path}.weight")
        bias = graph.create_node("get_attr", f"{path}.bias") if module.bias is not None else None
    for attribute, value in ((weight, module.weight), (bias, module.bias)):
        if attribute is not None:
            attribute.meta.update(val=value, source="", path=path)
    node.op = "call_function"
    if isinstance(module, nn.Linear):
        node.target, node.args = kept_linear, (node.args[0], weight, bias)
    else:
        options = (
            module.stride,
            module.padding,
            module.dilation,
            module.transposed,
            module.output_padding,
            module.groups,
        )
        node.target, node.args = kept_convolution, (node.args[0], weight, bias, *options)
