"""Insert BatchNorm between a layer and the activation behind it. Opt-in: it changes what the model computes.

Rule: a convolution, or a linear layer over (batch, features), with a bias and with nothing but an activation behind
it, gets BatchNorm of its channels, initialized to weight 1 and bias 0. The layer's class becomes a subclass of its own
whose forward applies the child `norm`; parameter names stay as they are, those of the norm are new.

Does not fire when: the layer is of a subclass, hooked, parametrized or used several times; anything but an activation
reads its result; the layer works on sequences (LayerNorm's place in a block is its author's choice).

Costs: two parameters and two running statistics a channel, two passes over the activations; in training, batches of
more than one value a channel. The way back (`Optimized.original_state_dict`) folds the norm's eval form into the layer,
which is exact in eval mode; a state dict of the user's class is loaded so that eval outputs are that class's.

Source: Ioffe and Szegedy, "Batch Normalization", 2015.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.utils import parametrize

from fxspeed.graph.clone import has_hooks
from fxspeed.graph.ops import CONVOLUTION_MODULES, pointwise_name
from fxspeed.graph.trace import Trace
from fxspeed.passes.base import Captured, Change, Pass, Skip

_ACTIVATIONS = frozenset(
    """relu relu6 gelu silu mish hardswish hardsigmoid hardtanh leaky_relu elu celu selu softplus softsign logsigmoid
    tanh sigmoid tanhshrink""".split()
)


class _Normed:
    """Applies `norm` to what the layer gives."""

    norm: nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.norm(super().forward(*args, **kwargs))  # type: ignore[misc]


class NormedConv1d(_Normed, nn.Conv1d):
    """Conv1d with BatchNorm."""


class NormedConv2d(_Normed, nn.Conv2d):
    """Conv2d with BatchNorm."""


class NormedConv3d(_Normed, nn.Conv3d):
    """Conv3d with BatchNorm."""


class NormedLinear(_Normed, nn.Linear):
    """Linear with BatchNorm."""


_KINDS: dict[type[nn.Module], tuple[type[nn.Module], type[nn.Module]]] = {
    nn.Conv1d: (NormedConv1d, nn.BatchNorm1d),
    nn.Conv2d: (NormedConv2d, nn.BatchNorm2d),
    nn.Conv3d: (NormedConv3d, nn.BatchNorm3d),
    nn.Linear: (NormedLinear, nn.BatchNorm1d),
}


@dataclasses.dataclass(frozen=True)
class InsertNorm(Pass):
    """Insert BatchNorm before activations. No options."""

    name: ClassVar[str] = "insert_norm"
    edits_module: ClassVar[bool] = True
    changes_function: ClassVar[bool] = True

    def run(self, captured: Captured) -> list[Change | Skip]:
        records: list[Change | Skip] = []
        for path, source, reason in candidates(captured):
            kind = _KINDS[type(captured.root.get_submodule(path))][1].__name__
            if reason:
                records.append(Skip(self.name, path, f"insert {kind}", reason, source=source))
                continue
            captured.edits.append(InsertedNorm(path))
            why = "asked for: the activation behind it gets inputs of zero mean and unit variance"
            records.append(Change(self.name, path, f"{kind} inserted", why))
        return records


def candidates(captured: Captured) -> list[tuple[str, str, str]]:
    """Path, source line and what speaks against it (or nothing) of each layer that an activation follows bare."""
    trace = captured.traces.get("train") or next(iter(captured.traces.values()))
    found = []
    for node in trace.graph.nodes:
        if node.op != "call_module" or node.meta.get("region"):
            continue
        layer = captured.root.get_submodule(str(node.target))
        acts = [
            u for u in node.users if pointwise_name(u, captured.root) in _ACTIVATIONS or _in_place(u, captured.root)
        ]
        if type(layer) in _KINDS and acts and len(acts) == len(node.users):
            calls = [n for n in trace.graph.nodes if n.op == "call_module" and n.target == node.target]
            found.append((str(node.target), node.meta.get("source", ""), _refuse(layer, node.meta["val"], len(calls))))
    return list(dict.fromkeys(found))


def bare_convolutions(captured: Captured) -> list[str]:
    """Paths of convolutions that could have a norm and have none."""
    convolutional = lambda path: isinstance(captured.root.get_submodule(path), CONVOLUTION_MODULES)
    return [path for path, _, reason in candidates(captured) if not reason and convolutional(path)]


def _in_place(node: Any, root: nn.Module) -> bool:
    """Whether a node is an activation that writes over its input."""
    if node.op == "call_module":
        name = type(root.get_submodule(str(node.target))).__name__.lower()
        return name in _ACTIVATIONS
    return getattr(node.target, "__name__", str(node.target)).rstrip("_") in _ACTIVATIONS


def _refuse(layer: nn.Module, value: torch.Tensor, calls: int) -> str:
    if layer.bias is None:
        return "it has no bias, which the way back to the user's class needs"
    if isinstance(layer, nn.Linear) and value.dim() != 2:
        return "it works on sequences, where the place of a norm is the author's choice"
    if calls > 1:
        return "it is used several times"
    if parametrize.is_parametrized(layer) or has_hooks(layer):
        return "it is hooked or parametrized"
    return ""


@dataclasses.dataclass(frozen=True)
class InsertedNorm:
    """The edit: the layer at `path` has a child `norm`."""

    path: str

    def apply(self, module: nn.Module) -> None:
        layer = module.get_submodule(self.path)
        normed, kind = _KINDS[type(layer)]
        layer.__class__ = normed
        channels = layer.weight.shape[0]
        layer.norm = kind(channels).to(layer.weight.device, layer.weight.dtype).train(layer.training)

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        norm = self._taken(state)
        scale = norm["weight"] / (norm["running_var"] + nn.BatchNorm1d(1).eps).sqrt()
        weight, bias = state[f"{self.path}.weight"], state[f"{self.path}.bias"]
        state[f"{self.path}.weight"] = weight * scale.reshape(-1, *[1] * (weight.dim() - 1))
        state[f"{self.path}.bias"] = (bias - norm["running_mean"]) * scale + norm["bias"]

    def lacks(self, state: dict[str, torch.Tensor]) -> bool:
        return f"{self.path}.weight" in state and f"{self.path}.norm.weight" not in state

    def adopt(self, state: dict[str, torch.Tensor]) -> None:
        if not self.lacks(state):
            return
        bias = state[f"{self.path}.bias"]
        eps = nn.BatchNorm1d(1).eps
        values = {
            "weight": torch.full_like(bias, (1 + eps) ** 0.5),
            "bias": torch.zeros_like(bias),
            "running_mean": torch.zeros_like(bias),
            "running_var": torch.ones_like(bias),
            "num_batches_tracked": torch.zeros((), dtype=torch.long, device=bias.device),
        }
        state.update({f"{self.path}.norm.{name}": value for name, value in values.items()})

    def holds(self, trace: Trace, module: nn.Module) -> str:
        return ""  # the module itself has changed: every later graph has the norm

    def _taken(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The norm's entries, removed from `state`."""
        prefix = f"{self.path}.norm."
        return {key.removeprefix(prefix): state.pop(key) for key in list(state) if key.startswith(prefix)}
