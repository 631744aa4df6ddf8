"""Example inputs: made real where they are fake or meta."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from fxspeed.graph.regions import hint
from fxspeed.graph.structure import map_tensors


def real_inputs(
    args: Any, kwargs: dict[str, Any] | None, model: nn.Module, device: torch.device | None
) -> tuple[tuple, dict]:
    """`args` as a tuple and `kwargs` as a dict, fake and meta tensors drawn anew on the device of the parameters.

    Floats are standard normal, integers zero (a valid index whatever the table), booleans true.
    """
    if isinstance(args, torch.Tensor):
        args = (args,)
    if isinstance(args, dict):
        args, kwargs = (), {**args, **(kwargs or {})}
    place = device or device_of(model)
    generator = torch.Generator().manual_seed(0)

    def real(t: torch.Tensor) -> torch.Tensor:
        if not (t.is_meta or isinstance(t, FakeTensor)):
            return t
        shape = [hint(s) for s in t.shape]
        if t.dtype.is_floating_point:
            made = torch.randn(shape, generator=generator).to(t.dtype)
        else:
            made = torch.ones(shape, dtype=t.dtype) if t.dtype is torch.bool else torch.zeros(shape, dtype=t.dtype)
        return made.to(place).requires_grad_(t.requires_grad)

    return map_tensors(tuple(args), real, torch.Tensor), map_tensors(dict(kwargs or {}), real, torch.Tensor)


def device_of(model: nn.Module) -> torch.device:
    """The device of the first parameter or buffer; the CPU for a model without any."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")
