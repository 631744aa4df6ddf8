"""insert_norm: opt-in normalization, with a way back to the user's class."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxspeed
from fxspeed.passes.insert_norm import InsertNorm


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(128, 10),
        nn.Tanh(), nn.Linear(10, 2),
    ).double()  # fmt: skip


def x() -> torch.Tensor:
    return torch.randn(4, 3, 8, 8, dtype=torch.float64)


def by_hand(model: nn.Module) -> nn.Module:
    """The same layers with BatchNorm written in by a person."""
    layers = copy.deepcopy(model)
    norms = {0: nn.BatchNorm2d(8), 2: nn.BatchNorm2d(8), 5: nn.BatchNorm1d(10)}
    return nn.Sequential(
        *[m for i, layer in enumerate(layers) for m in (layer, *([norms[i].double()] if i in norms else []))]
    )


@pytest.mark.parametrize("passes", [["insert_norm"], ["insert_norm", "drop_bias"]])
def test_equals_norms_written_by_hand(passes):
    model, inputs = net(), x()
    result, reference = fxspeed.optimize(model, inputs, passes=passes), by_hand(model)
    assert [c.target for c in result.changes if c.pass_name == "insert_norm"] == ["0", "2", "5"]
    step = result.train_step(F.mse_loss, "sgd", lr=0.1)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(3):
        target = torch.randn(4, 2, dtype=torch.float64)
        optimizer.zero_grad()
        F.mse_loss(reference(inputs), target).backward()
        optimizer.step()
        step(inputs, target)
    for mode in (True, False):
        torch.testing.assert_close(result.module.train(mode)(inputs), reference.train(mode)(inputs))


@pytest.mark.parametrize("passes", [["insert_norm"], ["insert_norm", "drop_bias"]])
def test_the_way_back_is_exact_in_eval_mode(passes):
    model, inputs = net(), x()
    result = fxspeed.optimize(model, inputs, passes=passes)
    for _ in range(3):
        result.module(torch.randn_like(inputs) + 1)
    with torch.no_grad():
        for p in result.module.parameters():
            p.add_(torch.rand_like(p) * 0.1)
    back = net()
    back.load_state_dict(result.original_state_dict(), strict=True)
    torch.testing.assert_close(back.eval()(inputs), result.module.eval()(inputs))
    result.load_original_state_dict(model.state_dict())
    torch.testing.assert_close(result.module.eval()(inputs), model.eval()(inputs))


def test_opt_in_and_said():
    result = fxspeed.optimize(net(), x())
    assert not any(c.pass_name == "insert_norm" for c in result.changes)
    (said,) = [s for s in result.skipped if s.pass_name == "insert_norm"]
    assert "opt-in" in said.why and said.why.endswith("0, 2")
    assert not [s for s in fxspeed.optimize(by_hand(net()), x()).skipped if s.pass_name == "insert_norm"]


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.used_twice, self.bare, self.read = (nn.Conv2d(3, 3, 3, padding=1, bias=b) for b in (True, False, True))
        self.tokens = nn.Linear(8, 8)

    def forward(self, x):
        x = torch.relu(self.used_twice(torch.relu(self.used_twice(x))))
        x = F.relu(self.bare(x))
        y = self.read(x)
        return self.tokens(torch.relu(y) + y).relu()


def test_where_it_does_not_fire():
    result = fxspeed.optimize(Twice(), torch.randn(2, 3, 8, 8), passes=["insert_norm"])
    assert not result.changes
    reasons = {s.target: s.why for s in result.skipped}
    assert "several times" in reasons["used_twice"] and "no bias" in reasons["bare"]
    assert "sequences" in reasons["tokens"] and "read" not in reasons


def test_the_module_pickles_copies_and_survives_other_inputs():
    result = fxspeed.optimize(net(), x(), passes=["insert_norm"])
    module, other = result.module.eval(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    for made in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        torch.testing.assert_close(made(other), module(other), rtol=0, atol=0)
    assert {k for k in module.state_dict() if ".norm." not in k} == set(net().state_dict())


def test_the_diff_shows_it():
    diff = fxspeed.optimize(net(), x(), passes=[InsertNorm()]).diff()
    assert "+    _0_norm = self[0].norm(conv2d)" in diff and "self.0" not in diff
