"""Memory that operators take and give back inside themselves, as measured on CPU builds of PyTorch 2.13."""

from __future__ import annotations

import math
from typing import Any

import torch


def convolution_workspace(
    source: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, sizes: tuple[int, int, int], backward: bool
) -> int:
    """Bytes that a convolution on a CPU takes beside its results.

    In float32 and below oneDNN copies tensors into its own layout: forward the output and the weight, backward the
    input and output gradients or the weight. In float64 PyTorch unfolds the input (im2col): one column for each output
    position and kernel element.

    Args:
        source, weight, out: the tensors, for their dtype, device and kernel.
        sizes: bytes of each of them.
        backward: of the backward instead of the forward.
    """
    if out.device.type != "cpu":
        return 0
    source_bytes, weight_bytes, out_bytes = sizes
    if out.dtype is torch.float64:
        kernel = math.prod(int(s) for s in weight.shape[2:])
        return 0 if kernel == 1 else out_bytes // int(weight.shape[0]) * math.prod(int(s) for s in weight.shape[1:])
    if backward:
        return max(source_bytes + out_bytes, weight_bytes * 4 // weight.element_size())
    return out_bytes + weight_bytes


def product_workspace(args: Any) -> int:
    """Bytes that a matrix product takes to lay out factors that are expanded: the gradient of a plain sum, say."""
    expanded = [
        t
        for t in args
        if isinstance(t, torch.Tensor)
        and t.dim() > 1
        and any(s == 0 < n - 1 for s, n in zip(t.stride(), t.shape, strict=True))
    ]
    return sum(math.prod(int(n) for n in t.shape) * t.element_size() for t in expanded)
