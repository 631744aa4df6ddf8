"""What a loader yields, as a step takes it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from fxspeed.errors import Error
from fxspeed.graph.structure import map_tensors, tensors_in


def split(batch: Any) -> tuple[Any, tuple]:
    """`(inputs, targets)` of a loader's batch: the first of a tuple or list is the inputs, the rest are targets.

    A list of inputs becomes a tuple, so that they are positional. A tensor or dict is inputs alone.

    Raises:
        Error: the batch is of another kind.
    """
    if isinstance(batch, (torch.Tensor, dict)):
        return batch, ()
    if isinstance(batch, (tuple, list)) and batch:
        first, *targets = batch
        return tuple(first) if isinstance(first, list) else first, tuple(targets)
    raise Error(
        f"the loader yields a {type(batch).__name__}; let it yield (inputs, *targets), a tensor or a dict of tensors"
    )


def to_device(tree: Any, device: torch.device) -> Any:
    """Tensors of `tree` on `device`; copies from pinned memory do not make the host wait."""
    move = lambda t: t if t.device == device else t.to(device, non_blocking=True)
    return map_tensors(tree, move, torch.Tensor)


def default_loss(output: Any, *targets: Any) -> torch.Tensor:
    """The output's `loss` if it has one, else the mean square of all floating-point tensors in it."""
    named = getattr(output, "loss", None)
    if isinstance(named, torch.Tensor):
        return named
    return torch.stack([t.float().square().mean() for t in tensors_in(output) if t.is_floating_point()]).sum()


def by_name(module: nn.Module, args: tuple) -> dict[str, Any]:
    """Positional arguments of a module's forward as keywords."""
    return dict(zip(inspect.signature(module.forward).parameters, args, strict=False))
