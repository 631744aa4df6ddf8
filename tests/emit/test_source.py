"""Graphs as readable Python."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fxspeed.emit.source import describe, render
from fxspeed.graph.trace import trace


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])
        self.table = nn.Parameter(torch.zeros(4))

    def forward(self, x, mask):
        y = self.blocks[0](x) + self.table
        y[:, 1:3] = -1.0
        y += 1
        with torch.autocast("cpu", torch.bfloat16):
            z = F.softmax(y, dim=-1)[..., None]
        b, n = x.shape
        return {"z": z.reshape(b * n, -1), "m": y.masked_fill(mask, float("-inf")).max(1).values}


def test_golden(golden):
    model = Net()
    found = trace(model, (torch.randn(3, 4), torch.zeros(3, 4, dtype=torch.bool)), {})
    golden("source.py.txt", render(found.graph, found.constants, model))


def test_shapes_in_words():
    assert describe(torch.zeros(2, 3)) == "f32[2, 3]"
    assert describe((torch.zeros(2, dtype=torch.int64), torch.zeros((), dtype=torch.bool))) == "i64[2], bool[]"
