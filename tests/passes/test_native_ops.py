"""native_ops: what people write out, in several spellings, becomes the operator; what only looks like it stays."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxspeed
from tests.compare import assert_same, doubled


class Net(nn.Module):
    """A function behind a linear layer; weight, bias and a causal mask for those that want them."""

    def __init__(self, body, **parts):
        super().__init__()
        self.body, self.first = body, nn.Linear(8, 8)
        self.w, self.b = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
        self.register_buffer("seen", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.body(self, self.first(x)) * 1.5


def standardized(x, eps=1e-5):
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(((x - mean) ** 2).mean(-1, keepdim=True) + eps)


def standardized_by_var(x, eps=1e-6):
    variance, mean = x.var(dim=-1, unbiased=False, keepdim=True), x.mean(dim=-1, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + eps)


def heads(x):
    b, t, c = x.shape
    return [f.view(b, t, 2, c // 2).transpose(1, 2) for f in (x, x * 1.1, x - 0.3)]


def joined(x):
    b, _, t, _ = x.shape
    return x.transpose(1, 2).reshape(b, t, -1)


def attention(s, x, mask=None, drop=0.0):
    q, k, v = heads(x)
    scores = q @ k.transpose(-2, -1) / math.sqrt(k.shape[-1])
    if mask is not None:
        scores = mask(s, scores)
    return joined(F.dropout(F.softmax(scores, dim=-1), drop, s.training) @ v)


def causal(s, scores):
    t = scores.shape[-1]
    return scores.masked_fill(s.seen[:, :, :t, :t] == 0, float("-inf"))


def causal_sum(s, scores):
    t = scores.shape[-1]
    return scores + torch.full((t, t), float("-inf"), dtype=scores.dtype).triu(1)


def by_rms(x, statistics):
    return x * torch.rsqrt(statistics.pow(2).mean(-1, keepdim=True) + 1e-6)


ROOT = math.sqrt(2 / math.pi)
_SPELLINGS = [
    ("gelu", lambda s, x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))),
    ("gelu", lambda s, x: x * 0.5 * (1.0 + torch.erf(x * 0.7071067811865476))),
    ("gelu", lambda s, x: x * (torch.special.erf(x / 2**0.5) + 1) / 2),
    ("gelu(approximate='tanh')", lambda s, x: 0.5 * x * (1 + torch.tanh(ROOT * (x + 0.044715 * x**3)))),
    ("gelu(approximate='tanh')", lambda s, x: x / 2 * (1 + (ROOT * x * (1 + 0.044715 * x * x)).tanh())),
    ("gelu(approximate='tanh')", lambda s, x: 0.5 * x * (1 + s.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0))))),
    ("silu", lambda s, x: x * torch.sigmoid(x)),
    ("silu", lambda s, x: x.sigmoid().mul(x)),
    ("silu", lambda s, x: s.sigmoid(x) * x * (x + 1)),
    ("hardswish", lambda s, x: x * F.relu6(x + 3) / 6),
    ("hardswish", lambda s, x: x * s.relu6(x + 3.0) * (1 / 6)),
    ("layer_norm", lambda s, x: s.w * standardized(x) + s.b),
    ("layer_norm", lambda s, x: standardized_by_var(x) * s.w + s.b),
    ("layer_norm", lambda s, x: s.b + standardized_by_var(x, 1e-12) * (1 + s.w)),
    ("layer_norm", lambda s, x: standardized(x, 1e-3)),
    ("rms_norm", lambda s, x: s.w * by_rms(x, x)),
    ("rms_norm", lambda s, x: x / torch.sqrt(torch.mean(x * x, -1, keepdim=True) + 1e-5) * (1 + s.w)),
    ("rms_norm", lambda s, x: x.to(x.dtype) * (x.square().sum(-1, keepdim=True) / 8 + 1e-5) ** -0.5),
    ("softmax", lambda s, x: (x - x.amax(-1, True)).exp() / (x - x.amax(-1, True)).exp().sum(-1, keepdim=True)),
    ("scaled_dot_product_attention", attention),
    ("scaled_dot_product_attention", lambda s, x: attention(s, x, causal)),
    ("scaled_dot_product_attention", lambda s, x: attention(s, x, causal_sum)),
]  # fmt: skip


@pytest.mark.parametrize(("operator", "body"), _SPELLINGS, ids=[f"{o}-{i}" for i, (o, _) in enumerate(_SPELLINGS)])
def test_spellings(operator, body):
    torch.manual_seed(0)
    model, (x,) = doubled(Net(body, tanh=nn.Tanh(), sigmoid=nn.Sigmoid(), relu6=nn.ReLU6()), (torch.randn(3, 5, 8),))
    result = assert_same(model, (x,), passes=["native_ops"], tol=1e-10)
    assert {c.what.partition(" are F.")[2] for c in result.changes} == {operator}, result.report
    assert not result.broken


_ALIKE = [
    ("a coarser approximation", lambda s, x: x * torch.sigmoid(1.702 * x)),
    ("other constants", lambda s, x: 0.5 * x * (1 + torch.tanh(0.79 * (x + 0.044715 * x**3)))),
    ("overflows for large x", lambda s, x: torch.log(1 + torch.exp(x))),
    ("a gradient of NaN far below zero", lambda s, x: x / (1 + torch.exp(-x))),
    ("another gradient at the kinks", lambda s, x: x * (x + 3).clamp(0, 6) / 6),
    ("no gradient through the statistics", lambda s, x: by_rms(x, x.detach())),
    ("the unbiased variance", lambda s, x: (x - x.mean(-1, True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5)),
    ("another dimension", lambda s, x: standardized(x.mT).mT),
    ("dropout in attention", lambda s, x: attention(s, x, drop=0.3) if s.training else x),
    ("softmax over the queries", lambda s, x: joined((heads(x)[0] @ heads(x)[1].mT).softmax(-2) @ heads(x)[2])),
]  # fmt: skip


@pytest.mark.parametrize(("why", "body"), _ALIKE, ids=[w.replace(" ", "_") for w, _ in _ALIKE])
def test_what_only_looks_like_it_stays(why, body):
    torch.manual_seed(0)
    model, (x,) = doubled(Net(body), (torch.randn(3, 5, 8),))
    result = assert_same(model, (x,), passes=["native_ops"], tol=1e-10)
    assert not result.changes, f"{why}: {result.changes}"


def test_intermediate_results_that_others_read_stay():
    def body(s, x):
        inner = torch.erf(x / math.sqrt(2))
        return 0.5 * x * (1 + inner) + inner

    model, (x,) = doubled(Net(body), (torch.randn(3, 5, 8),))
    assert not assert_same(model, (x,), passes=["native_ops"]).changes


def test_masks_of_the_inputs_and_trained_ones_stay_and_say_so():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.bias = nn.Linear(8, 8), nn.Parameter(torch.randn(5, 5))

        def forward(self, x, mask=None):
            q, k, v = heads(self.first(x))
            return joined((q @ k.mT * 0.5 + (self.bias if mask is None else mask)).softmax(-1) @ v)

    for args, word in (((torch.randn(3, 5, 8),), "is trained"), ((torch.randn(3, 5, 8), torch.zeros(5, 5)), "inputs")):
        result = fxspeed.optimize(Masked(), args, passes=["native_ops"])
        (skip,) = (s for s in result.skipped if s.pass_name == "native_ops")
        assert not result.changes and word in skip.why and skip.source.startswith(__file__)


def test_less_is_kept_and_budgets_speak_of_the_users_model():
    blocks = nn.Sequential(*(Net(lambda s, x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))) for _ in range(3)))
    x = torch.randn(512, 8)
    result = fxspeed.optimize(blocks, x, passes=["native_ops", "checkpoint"], memory_budget=0.95)
    assert sum(c.saves["bytes"] for c in result.changes) >= 3 * 2 * x.numel() * 4
    assert result.report.to_dict()["memory"]["plain"]["peak"] > 12 * x.numel() * 4


def test_inside_of_autocast_nothing_is_rewritten():
    def body(s, x):
        with torch.autocast("cpu", torch.bfloat16):
            return x * torch.sigmoid(x)

    assert not fxspeed.optimize(Net(body), torch.randn(3, 8), passes=["native_ops"]).changes


def test_golden(golden):
    model = Net(lambda s, x: attention(s, s.w * standardized(x) + s.b, causal))
    golden("native_ops.diff", fxspeed.optimize(model, torch.randn(3, 5, 8), passes=["native_ops"]).diff())
