"""optimize(): options, errors, result and report; and random networks through the whole pipeline."""

from __future__ import annotations

import copy
import gc
import json
import weakref

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxspeed
from tests.compare import assert_same, close, doubled, loss_of, run


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"passes": ["drop_bais"]}, "did you mean 'drop_bias'"),
        ({"passes": ["checkpoint{bugdet=1}"]}, "no option"),
        ({"precision": "int4"}, "precision"),
        ({"memory_budget": 0.0}, "share"),
        ({"memory_budget": "lots"}, "size"),
        ({"verify": "maybe"}, "verify"),
    ],
)
def test_bad_options(options, word):
    with pytest.raises(fxspeed.Error, match=word):
        fxspeed.optimize(nn.Linear(2, 2), torch.randn(2, 2), **options)


@pytest.mark.parametrize("options", [{}, {"memory_budget": 0.9}, {"precision": "bf16"}, {"passes": ["fuse_pointwise"]}])
def test_nothing_outlives_the_result(options):  # autograd's nodes, which gc cannot see into, once kept every model
    def use():
        class Mine(nn.Sequential):
            pass

        wide = [layer for k in (2, 99, 99) for layer in (nn.Linear(k, 99), nn.GELU(), nn.Tanh())]
        model, x = Mine(*net(), *wide), torch.randn(64, 3, 6, 6)
        result = fxspeed.optimize(model, (x,), **options)
        result.train_step(lambda out: out.square().mean())(x)
        assert type(result.module) is type(fxspeed.optimize(model, (x,)).module)
        kept = [*model.parameters(), *result.module.parameters()]
        return [weakref.ref(it) for it in (model, result.module, Mine, type(result.module), *kept)]

    refs = use()
    gc.collect()
    assert not [it for it in (ref() for ref in refs) if it is not None]


def test_wrong_inputs_and_wrong_models():
    with pytest.raises(fxspeed.Error, match="does not run on the example inputs"):
        fxspeed.optimize(nn.Linear(2, 2), torch.randn(2, 3))
    with pytest.raises(fxspeed.Error, match=r"nn\.Module"):
        fxspeed.optimize(lambda x: x, torch.randn(2, 3))


@pytest.mark.parametrize("kind", ["real", "meta", "fake", "dict"])
def test_kinds_of_example_inputs(kind):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    x = torch.randn(2, 3, 6, 6)
    example = {"real": x, "meta": x.to("meta"), "dict": {"input": x}}.get(kind)
    if kind == "fake":
        example = FakeTensorMode().from_tensor(x)
    result = fxspeed.optimize(model, example)
    assert [c.target for c in result.changes] == ["0"]
    close(run(model, (x,)), run(result.module, (x,)), 1e-5)


def test_result_in_words_and_data():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    result = fxspeed.optimize(model, torch.randn(2, 3, 6, 6), memory_budget=1.0)
    text = str(result.report)
    assert "drop_bias" in text and "bias dropped" in text and max(map(len, text.splitlines())) <= 80
    data = json.loads(json.dumps(result.report.to_dict()))
    assert data["changes"][0]["pass_name"] == "drop_bias" and data["memory"]["plain"]["peak"] > 0
    assert "bias=False" in result.diff() and "\x1b[" not in result.diff() and "\x1b[" in result.diff(color=True)
    assert isinstance(result.train_graph, torch.fx.GraphModule) and isinstance(result.eval_graph, torch.fx.GraphModule)


def test_nothing_to_do_is_an_empty_diff():
    result = fxspeed.optimize(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.randn(2, 3))
    assert result.diff() == "" and result.changes == ()


def test_eval_mode_and_training_flag():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    result = fxspeed.optimize(model, torch.randn(2, 3, 6, 6))
    assert not result.module.training and result.train_graph is not None


def test_a_bias_that_matters_for_other_inputs_is_no_silent_fault():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

        def forward(self, x):
            y = self.conv(x)
            return self.bn(y) + (y if x.shape[2] > 8 else 0)

    result = fxspeed.optimize(Net(), torch.randn(2, 3, 6, 6))
    with pytest.raises(fxspeed.Error, match="bias"):
        result.module(torch.randn(2, 3, 9, 9))


def test_outside_passes_are_found(monkeypatch):
    import dataclasses
    from typing import ClassVar

    from fxspeed import passes

    @dataclasses.dataclass(frozen=True)
    class Nothing(passes.Pass):
        name: ClassVar[str] = "nothing"
        much: int = 1

        def run(self, captured):
            return []

    class Point:
        def load(self):
            return Nothing

    monkeypatch.setattr(passes.importlib.metadata, "entry_points", lambda group: [Point()])
    assert passes.parse("nothing{much=3}") == Nothing(much=3)


# ---------------------------------------------------------------------- random networks
class Random(nn.Module):
    """Layers drawn at random, with skips, shared modules, in-place operations and dropout."""

    def __init__(self, plan: list[tuple[str, int]]):
        super().__init__()
        self.plan = plan
        self.layers = nn.ModuleList()
        self.shared = nn.Conv2d(4, 4, 1)
        for kind, n in plan:
            norm = {0: nn.BatchNorm2d(4), 1: nn.GroupNorm(2, 4), 2: nn.InstanceNorm2d(4)}[n % 3]
            known = {
                "conv": nn.Conv2d(4, 4, 3, padding=1, groups=1 + n % 2),
                "norm": norm,
                "relu": nn.ReLU(inplace=n % 2 == 0),
                "drop": nn.Dropout(0.1 * n),
            }
            self.layers.append(known.get(kind, nn.Identity()))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        kept = x
        for (kind, n), layer in zip(self.plan, self.layers, strict=True):
            if kind == "skip":
                x, kept = x + kept, x
            elif kind == "shared":
                x = self.shared(x)
            elif kind == "gelu":
                x = 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x**3)))
            elif kind == "inplace":
                x = x.clone()
                x[:, n % 4] *= 0.5
            elif kind == "scale":
                x = x / (1 + x.detach().abs().mean().item())
            elif kind == "shift":
                x = x - torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=x.dtype).view(1, 4, 1, 1)
            elif kind == "pad":
                x = F.max_pool2d(F.pad(x, (0, 1, 0, 1)), 2, 1)
            else:
                x = layer(x)
        return self.head(x.mean((2, 3)))


_KINDS = ["conv", "norm", "relu", "drop", "skip", "shared", "gelu", "inplace", "scale", "shift", "pad"]


@hypothesis.settings(max_examples=25)
@hypothesis.given(
    plan=st.lists(st.tuples(st.sampled_from(_KINDS), st.integers(0, 5)), min_size=1, max_size=9),
    budget=st.sampled_from([None, 0.95, 0.9]),
)
def test_random_networks_stay_equal(plan, budget):  # the default pipeline, float64
    torch.manual_seed(len(plan))
    model, (x,) = doubled(Random(plan), (torch.randn(3, 4, 6, 6),))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
    try:
        loss_of(copy.deepcopy(model)(x)).backward()
    except RuntimeError:  # eager refuses it: an in-place ReLU after another
        hypothesis.reject()
    try:
        result = assert_same(model, (x,), memory_budget=budget, tol=1e-8)
    except fxspeed.BudgetError:
        return
    assert not result.broken, result.report
