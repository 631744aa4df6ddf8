"""Mixed precision: the graph runs under autocast, with float32 islands.

Rule: matrix products and convolutions run in bfloat16 or float16 as torch.autocast's own lists say. On top of these
lists, the same on every device: operations that lose digits in low precision (softmax, losses, sums, means, norms,
exponentials, powers) get float32 inputs, and operations that autocast refuses (binary cross-entropy on
probabilities) run outside of it. Outputs keep the dtype they had.

Does not fire when: the precision is "fp32"; the graph already runs under autocast; the model is in a low-precision
or double dtype itself. With "auto": bfloat16 where the GPU has it in hardware, else float16 (with a gradient scaler in
the training step), and float32 on a CPU.

Costs: digits. Verification holds the error against that of plain autocast, both measured against float64.

Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018; torch.amp's op reference (CUDA list of operations
that autocast to float32).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from fxspeed.errors import Error
from fxspeed.graph import runtime
from fxspeed.graph.facts import refresh
from fxspeed.graph.ops import module_of, name_of
from fxspeed.graph.regions import Region
from fxspeed.graph.trace import Trace
from fxspeed.passes.base import Captured, Change, Pass, Skip

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

_FLOAT32 = frozenset(
    """
    acos asin cosh erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh tan pow softplus layer_norm group_norm
    instance_norm norm vector_norm nuclear_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss
    soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits cross_entropy dist pdist
    cdist renorm logsumexp softmax log_softmax prod cumprod cumsum sum mean var std ctc_loss rms_norm
    """.split()
)
_REFUSED = frozenset(["binary_cross_entropy"])
_FLOAT32_MODULES = (
    nn.Softmax,
    nn.LogSoftmax,
    nn.Softmax2d,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.CrossEntropyLoss,
    nn.MSELoss,
    nn.NLLLoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCEWithLogitsLoss,
    nn.KLDivLoss,
    nn.Softplus,
    nn.CTCLoss,
    nn.CosineSimilarity,
)


def choose(precision: str, device: torch.device) -> tuple[torch.dtype | None, str]:
    """The low-precision dtype for `precision` on a device, None for float32, and why.

    Raises:
        Error: unknown precision.
    """
    if precision == "fp32":
        return None, "precision is fp32"
    if precision in DTYPES:
        return DTYPES[precision], f"precision is {precision}"
    if precision != "auto":
        raise Error(f'precision {precision!r} is unknown; use "auto", "fp32", "bf16" or "fp16"')
    if device.type == "cuda":
        if torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.float16, "this GPU has no bfloat16 units"
        return torch.bfloat16, "the GPU has bfloat16 units"
    return None, f'on {device.type} low precision is used only when asked for (precision="bf16")'


@dataclasses.dataclass(frozen=True)
class Autocast(Pass):
    """Run the graph under autocast with float32 islands.

    Options: `precision`, "auto", "fp32", "bf16" or "fp16"; None takes `optimize(precision=...)`.
    """

    name: ClassVar[str] = "autocast"
    precision: str | None = None

    def run(self, captured: Captured) -> list[Change | Skip]:
        precision = self.precision or captured.options.get("precision", "auto")
        device = captured.options.get("device") or torch.device("cpu")
        dtype, why = choose(precision, device)
        whole = "the whole model"
        if dtype is None:
            return [Skip(self.name, whole, "low precision", why)]
        floats = {p.dtype for p in captured.root.parameters() if p.is_floating_point()}
        if floats - {torch.float32}:
            return [Skip(self.name, whole, "low precision", f"its parameters are {', '.join(map(str, floats))}")]
        if any(trace.ambient for trace in captured.traces.values()):
            return [Skip(self.name, whole, "low precision", "it already runs under autocast")]
        records: list[Change | Skip] = [Change(self.name, whole, f"runs under autocast in {dtype}", why)]
        seen: set[str] = set()
        for trace in captured.traces.values():
            for node, what in _rewrite(trace, captured.root, device, dtype):
                if node not in seen:
                    seen.add(node)
                    records.append(Change(self.name, node, what, "it loses digits or is refused in low precision"))
            refresh(trace, captured.root)
        captured.options["low_precision"] = dtype
        return records


def _rewrite(trace: Trace, root: nn.Module, device: torch.device, dtype: torch.dtype) -> list[tuple[str, str]]:
    graph = trace.graph
    islands = _islands(graph, trace.constants, root, device)
    first = next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))
    output = graph.output_node()
    with graph.inserting_before(first):
        _mode(graph, runtime.enter_autocast, (device.type, dtype, True, True))
    with graph.inserting_before(output):
        _mode(graph, runtime.exit_autocast, ())
        casts = {n: _float(graph, n, cast_to=n.meta["val"].dtype) for n in _float_outputs(output)}
    output.args = map_arg(output.args, lambda n: casts.get(n, n))
    for node in [n for n in graph.nodes if n.meta.get("constructs")]:  # objects that the model returns
        if any(i in casts or _is_float(i) for i in node.all_input_nodes):
            with graph.inserting_before(node):
                made = {i: _float(graph, i, cast_to=i.meta["val"].dtype) for i in node.all_input_nodes if _is_float(i)}
            node.args = map_arg(node.args, lambda n, made=made: made.get(n, n))
            node.kwargs = map_arg(node.kwargs, lambda n, made=made: made.get(n, n))
    return islands


def _islands(graph: fx.Graph, constants: dict, root: nn.Module, device: torch.device) -> list[tuple[str, str]]:
    islands: list[tuple[str, str]] = []
    for node in list(graph.nodes):
        if node.meta.get("region"):
            region = constants[str(node.target)]
            if isinstance(region, Region) and region.decorator.startswith("recomputed"):
                islands += _islands(region.graph, region.constants, root, device)
            continue
        module, name = module_of(node, root), name_of(node)
        refused = name in _REFUSED or isinstance(module, nn.BCELoss)
        if not refused and not (name in _FLOAT32 or isinstance(module, _FLOAT32_MODULES)):
            continue
        inputs = [
            n for n in node.all_input_nodes if _is_float(n) and n.op != "get_attr" and not node.meta.get("writes")
        ]
        if not inputs:
            continue
        with graph.inserting_before(node):
            casts = {n: _float(graph, n, cast_to=torch.float32) for n in inputs if n.meta["val"].dtype is torch.float32}
            if refused:
                _mode(graph, runtime.enter_autocast, (device.type, None, False, True))
        for source, cast in casts.items():
            node.replace_input_with(source, cast)
        if refused:
            with graph.inserting_after(node):
                _mode(graph, runtime.exit_autocast, ())
        islands.append((node.name, "kept in float32" if not refused else "runs outside autocast in float32"))
    return islands


def _float_outputs(output: fx.Node) -> list[fx.Node]:
    return [n for n in output.all_input_nodes if _is_float(n) and not n.meta.get("constructs")]


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _float(graph: fx.Graph, node: fx.Node, cast_to: torch.dtype) -> fx.Node:
    cast = graph.create_node("call_method", "to", (node, cast_to))
    cast.meta = {k: v for k, v in node.meta.items() if k in ("val", "source", "path")}
    return cast


def _mode(graph: fx.Graph, function, args: tuple) -> fx.Node:
    node = graph.create_node("call_function", function, args)
    node.meta.update(val=None, source="", path="")
    return node
