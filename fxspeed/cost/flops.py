"""Floating-point operations of nodes, counted as torch.utils.flop_counter counts them: two for each multiply-add."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx, nn

from fxspeed.graph.ops import CONVOLUTIONS, argument, module_of, name_of
from fxspeed.graph.regions import hint


def node_flops(node: fx.Node, root: nn.Module) -> int:
    """FLOPs of one forward of a node: matrix products and convolutions, and one for each element of anything else."""
    value = _tensor(node.meta.get("val"))
    if value is None or node.op in ("placeholder", "get_attr", "output"):
        return 0
    out = _numel(value)
    module, name = module_of(node, root), name_of(node)
    if isinstance(module, nn.modules.conv._ConvNd):
        return 2 * _conv(node, value, module.weight, module.transposed)
    if isinstance(module, nn.Linear):
        return 2 * out * module.in_features
    if isinstance(module, (nn.MultiheadAttention, nn.RNNBase, nn.Bilinear)) or node.meta.get("opaque"):
        return 2 * out * sum(p.numel() for p in module.parameters()) // max(hint(value.shape[-1]), 1) if module else out
    if name in CONVOLUTIONS:
        return 2 * _conv(node, value, node.args[1].meta["val"], "transpose" in name)
    if name in ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "mv"):
        left = argument(node, 1 if name in ("addmm", "baddbmm") else 0, "input")
        return 2 * out * hint(left.meta["val"].shape[-1])
    if name == "scaled_dot_product_attention":
        query, key = node.args[0].meta["val"], node.args[1].meta["val"]
        return 4 * _numel(query) * hint(key.shape[-2])
    if name == "einsum":
        sizes = [_numel(n.meta["val"]) for n in node.all_input_nodes]
        return 2 * int(math.sqrt(max(math.prod(sizes) * out, 1))) if len(sizes) == 2 else out
    return out


def step_flops(graph: fx.Graph, constants: dict[str, Any], root: nn.Module) -> int:
    """FLOPs of one forward of a whole graph, its regions included."""
    total = 0
    for node in graph.nodes:
        if node.meta.get("region"):
            region = constants[str(node.target)]
            total += step_flops(region.graph, region.constants, root)
        else:
            total += node_flops(node, root)
    return total


def _conv(node: fx.Node, out: torch.Tensor, weight: torch.Tensor, transposed: bool) -> int:
    kernel = math.prod(hint(s) for s in weight.shape[2:])
    if transposed:
        source = _tensor(node.all_input_nodes[0].meta["val"])
        return _numel(source if source is not None else out) * hint(weight.shape[1]) * kernel
    return _numel(out) * hint(weight.shape[1]) * kernel


def _numel(value: torch.Tensor) -> int:
    return math.prod(hint(s) for s in value.shape)


def _tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (tuple, list)):
        return next((t for v in value if (t := _tensor(v)) is not None), None)
    return None
