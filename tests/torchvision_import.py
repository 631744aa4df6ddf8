"""Imports torchvision beside a CPU build of torch that lacks its compiled operators."""

from __future__ import annotations

from typing import Any

import torch

_library: Any = None


def import_torchvision() -> Any:
    """torchvision; where its import fails for want of `nms`, the operators are declared first."""
    global _library
    try:
        import torchvision
    except RuntimeError:
        _library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision
    return torchvision
