"""Drop a bias whose effect the normalization behind it cancels.

Rule: a convolution (1d to 3d, transposed, grouped) or linear layer whose every result goes straight into BatchNorm,
SyncBatchNorm or InstanceNorm over the same channel axis loses its bias. In training the norm subtracts the batch
mean, and with it any per-channel constant; its gradient is zero. In eval the norm subtracts the running mean, which
is shifted by the bias once, so that outputs stay equal; later updates keep the shift (the running mean of `y + b` is
the running mean of `y`, plus `b`, whatever the momentum).

Does not fire when: anything else reads the layer's result or its bias; the norm is frozen in training (running
statistics: the bias has a gradient then); one norm with running statistics serves several layers; the bias is shared,
parametrized or hooked; the layer also runs inside a module that capture could not open.

Saves: the parameter, its gradient and optimizer state, one addition for each element, and the reduction that computes
the bias gradient. State dicts go both ways exactly (`Optimized.original_state_dict`).

Source: PyTorch performance tuning guide, "Disable bias for convolutions directly followed by a batch norm".
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils import parametrize

from fxspeed.errors import Error
from fxspeed.graph.ops import CONVOLUTION_MODULES, CONVOLUTIONS, argument, module_of, name_of
from fxspeed.graph.regions import bytes_of
from fxspeed.graph.trace import Trace
from fxspeed.passes.base import Captured, Change, Pass, Skip


@dataclasses.dataclass(frozen=True)
class DropBias(Pass):
    """Drop biases before BatchNorm and InstanceNorm. No options."""

    name: ClassVar[str] = "drop_bias"
    edits_module: ClassVar[bool] = True

    def run(self, captured: Captured) -> list[Change | Skip]:
        records: list[Change | Skip] = []
        for path in _layers_with_bias(captured):
            uses = {mode: _Uses(trace, captured.root, path) for mode, trace in captured.traces.items()}
            if not any(use.norms for use in uses.values()):
                continue  # no norm in sight: nothing to report
            reason = _refuse(captured, path, uses)
            source = next((n.meta.get("source", "") for use in uses.values() for n in use.calls), "")
            if reason:
                records.append(Skip(self.name, path, "drop the bias", reason, source=source))
                continue
            means = sorted({m for use in uses.values() for m in use.means})
            bias = captured.root.get_parameter(f"{path}.bias")
            captured.edits.append(DroppedBias(path, bias.detach().clone(), tuple(means)))
            for use in uses.values():
                for node in use.calls:
                    _without_bias(node)
            norms = ", ".join(sorted({_label(n) for use in uses.values() for n in use.norms}))
            output = next(bytes_of(n.meta["val"]) for use in uses.values() for n in use.calls)
            records.append(
                Change(
                    self.name,
                    path,
                    "bias dropped",
                    f"{norms} subtracts it again",
                    {"bytes": 4 * bytes_of(bias), "flops": 2 * output // bias.element_size()},
                )
            )
        return records


@dataclasses.dataclass(frozen=True)
class DroppedBias:
    """The edit: parameter `path.bias` is gone, the running means in `means` are lower by its value."""

    path: str
    bias: torch.Tensor
    means: tuple[str, ...]

    def apply(self, module: nn.Module) -> None:
        layer = module.get_submodule(self.path)
        layer.bias = None
        for name in self.means:
            owner, _, attribute = name.rpartition(".")
            norm = module.get_submodule(owner)
            mean = getattr(norm, attribute)
            setattr(norm, attribute, mean - self.bias.to(mean))

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        for name in self.means:
            if name in state:
                state[name] = state[name] + self.bias.to(state[name])
        like = state.get(f"{self.path}.weight", self.bias)
        state[f"{self.path}.bias"] = self.bias.to(like.device, like.dtype).clone()

    def lacks(self, state: dict[str, torch.Tensor]) -> bool:
        return f"{self.path}.bias" in state

    def adopt(self, state: dict[str, torch.Tensor]) -> None:
        bias = state.pop(f"{self.path}.bias", None)
        if bias is None:
            return
        for name in self.means:
            if name in state:
                state[name] = state[name] - bias.to(state[name])
        self.bias.copy_(bias)

    def holds(self, trace: Trace, module: nn.Module) -> str:
        use = _Uses(trace, module, self.path)
        return use.refused or ("another norm follows it" if not use.means <= set(self.means) else "")


class _Uses:
    """How one graph uses the layer at `path`: its calls, the norms behind them, and what speaks against dropping."""

    def __init__(self, trace: Trace, root: nn.Module, path: str):
        self.calls: list[fx.Node] = []
        self.norms: list[fx.Node] = []
        self.means: set[str] = set()
        self.refused = ""
        prefixes = {path[:i] for i, c in enumerate(path) if c == "."}
        for node in trace.graph.nodes:
            if node.op == "call_module" and node.meta.get("opaque") and (node.target in prefixes or not node.target):
                self.refused = f"it also runs inside {node.target}, which stays as it is"
            elif (node.op == "call_module" and node.target == path) or _reads_bias(node, f"{path}.bias"):
                self.calls.append(node)
            elif (
                node.op == "get_attr"
                and node.target == f"{path}.bias"
                and not all(_reads_bias(u, node.target) and node not in u.args[:2] for u in node.users)
            ):
                self.refused = "its bias is read elsewhere"
        training = trace.training
        for call in self.calls:
            if call.meta.get("opaque"):
                self.refused = "it stays as it is (hooks)"
            for user in call.users:
                problem = self._norm(user, call, root, trace, training)
                self.refused = self.refused or problem

    def _norm(self, node: fx.Node, call: fx.Node, root: nn.Module, trace: Trace, training: bool) -> str:
        """Empty if `node` is a norm that cancels the bias of `call`."""
        other = f"{node.name} reads its result too"
        if node.args[:1] != (call,) or call in node.args[1:] or call in node.kwargs.values():
            return other
        value = call.meta["val"]
        module = module_of(node, root)
        if module is not None:
            if not isinstance(module, _NormBase) or node.meta.get("opaque"):
                return other
            tracked = module.running_mean is not None
            frozen = tracked and not trace.flags.get(str(node.target), module.training)
            mean = f"{node.target}.running_mean" if tracked else None
            instance = isinstance(module, _InstanceNorm)
        elif (name := name_of(node)) in ("batch_norm", "instance_norm"):
            source = argument(node, 1, "running_mean")
            if source is not None and source.op != "get_attr":
                return other
            mean = str(source.target) if source is not None else None
            switch = argument(node, 5, "training" if name == "batch_norm" else "use_input_stats", name != "batch_norm")
            frozen = mean is not None and not switch
            instance = name == "instance_norm"
            if source is not None and len(source.users) > 1:
                self.norms.append(node)
                return "the running mean is read elsewhere"
        else:
            return other
        self.norms.append(node)
        if training and frozen:
            return "the norm is frozen: in training it does not subtract the batch mean"
        linear = _is_linear(call, root)
        rank = 2 if linear else _spatial(call, root) + 2
        if value.dim() != rank or (instance and linear):
            return "the norm works on another axis"
        if mean is not None:
            same = [
                n
                for n in trace.graph.nodes
                if n is not node
                and ((n.op == "call_module" and f"{n.target}.running_mean" == mean) or argument_is(n, mean))
            ]
            if same:
                return "the norm serves several layers"
            self.means.add(mean)
        return ""


def argument_is(node: fx.Node, mean: str) -> bool:
    """Whether a functional norm uses the running mean at this path."""
    if name_of(node) not in ("batch_norm", "instance_norm"):
        return False
    source = argument(node, 1, "running_mean")
    return isinstance(source, fx.Node) and source.target == mean


def _layers_with_bias(captured: Captured) -> list[str]:
    layers = []
    for path, module in captured.root.named_modules():
        known = isinstance(module, (*CONVOLUTION_MODULES, nn.Linear))
        if known and "bias" in module._parameters and module._parameters["bias"] is not None:
            layers.append(path)
    return [p for p in layers if p]


def _refuse(captured: Captured, path: str, uses: dict[str, _Uses]) -> str:
    root = captured.root
    layer, bias = root.get_submodule(path), root.get_parameter(f"{path}.bias")
    owners = [n for n, p in root.named_parameters(remove_duplicate=False) if p is bias]
    if len(owners) > 1:
        return f"its bias is shared with {', '.join(o for o in owners if o != f'{path}.bias')}"
    if bias._backward_hooks or getattr(bias, "_post_accumulate_grad_hooks", None):
        return "its bias has hooks"
    if parametrize.is_parametrized(layer, "bias"):
        return "its bias is parametrized"
    if "train" in uses and not uses["train"].calls:
        return "it does not run in training"
    for mode, use in uses.items():
        if use.refused:
            return use.refused
        if use.calls and not use.norms:
            return f"no norm follows it in {mode} mode"
    return ""


def _reads_bias(node: fx.Node, bias: str) -> bool:
    if name_of(node) not in (*CONVOLUTIONS, "linear") or node.op != "call_function":
        return False
    source = argument(node, 2, "bias")
    return isinstance(source, fx.Node) and source.op == "get_attr" and source.target == bias


def _without_bias(node: fx.Node) -> None:
    if node.op == "call_module":
        return  # the module itself has none any more
    if "bias" in node.kwargs:
        node.update_kwarg("bias", None)
    else:
        node.update_arg(2, None)


def _is_linear(node: fx.Node, root: nn.Module) -> bool:
    module = module_of(node, root)
    return isinstance(module, nn.Linear) if module is not None else name_of(node) == "linear"


def _spatial(node: fx.Node, root: nn.Module) -> int:
    module = module_of(node, root)
    if module is not None:
        if not isinstance(module, (*CONVOLUTION_MODULES, _ConvTransposeNd)):
            raise Error(f"{node.target} is no convolution")
        return len(module.kernel_size)
    return int(name_of(node)[-2])


def _label(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_module" else node.meta.get("path") or node.name
