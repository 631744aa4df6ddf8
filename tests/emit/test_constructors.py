"""Built-in modules written as calls: the values are what a person would type."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxspeed.emit.constructors import constructor

_WRITTEN = [
    "nn.Linear(3, 4)",
    "nn.Linear(3, 4, bias=False, dtype=torch.float64)",
    "nn.Conv2d(3, 8, 3, padding=1, bias=False)",
    "nn.Conv2d(4, 8, (3, 1), stride=2, padding='valid', dilation=2, groups=2, padding_mode='reflect')",
    "nn.ConvTranspose2d(3, 4, 2, stride=2)",
    "nn.BatchNorm2d(4, affine=False)",
    "nn.BatchNorm1d(4, momentum=None, track_running_stats=False)",
    "nn.LayerNorm(8, eps=1e-06, bias=False)",
    "nn.LayerNorm((8, 4))",
    "nn.GroupNorm(2, 4)",
    "nn.ReLU(inplace=True)",
    "nn.GELU(approximate='tanh')",
    "nn.Dropout(p=0.2)",
    "nn.Embedding(10, 4, padding_idx=0)",
    "nn.LSTM(3, 4, num_layers=2, batch_first=True, bidirectional=True)",
    "nn.GRU(3, 4, bias=False)",
    "nn.MultiheadAttention(8, 2, batch_first=True)",
    "nn.MultiheadAttention(8, 2, bias=False, add_bias_kv=True, kdim=4, vdim=4)",
    "nn.MaxPool2d(3, stride=2, padding=1)",
    "nn.AdaptiveAvgPool2d((1, 1))",
    "nn.Identity()",
    "nn.Upsample(scale_factor=2.0, mode='bilinear', align_corners=False)",
    "nn.Hardtanh(min_val=0, max_val=6)",
    "nn.CrossEntropyLoss(label_smoothing=0.1)",
]


@pytest.mark.parametrize("text", _WRITTEN)
def test_the_call_that_made_it(text):
    assert constructor(eval(text)) == text


def test_modules_that_no_call_of_their_class_makes():
    class Own(nn.Linear):
        pass

    changed = nn.BatchNorm2d(4)
    changed.running_mean = None
    weighted = nn.CrossEntropyLoss(weight=torch.ones(3))
    wrapped = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    assert [constructor(m) for m in (Own(3, 3), changed, weighted, wrapped)] == [None] * 4


def test_what_libraries_attach_is_left_out():
    module = nn.Linear(2, 2)
    module._is_initialized = True
    assert constructor(module) == "nn.Linear(2, 2)"
