"""The range test: against a loop written by hand, and that it leaves no trace."""

from __future__ import annotations

import copy
import math
import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxspeed


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.n, self.d, self.b = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 3)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls += 1
        return self.b(self.d(F.relu(self.n(self.a(x)))))


def loader(**options) -> DataLoader:
    x = torch.randn(64, 6)
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8, **options)


def everything(step: fxspeed.TrainStep) -> list:
    tensors = [*step.module.state_dict().values(), *step.module.buffers()]
    tensors += [v for s in step.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    tensors += [p.grad for p in step.module.parameters() if p.grad is not None]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in step.optimizer.param_groups]
    schedule = step.schedule.state_dict() if step.schedule else None
    schedule = schedule and {k: v for k, v in schedule.items() if not callable(v)}
    counters = (step.steps, step._seen, step._weight, step._first)
    rng = (torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist())
    return copy.deepcopy([[t.tolist() for t in tensors], groups, schedule, counters, rng])


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("schedule", [None, "1cycle"])
def test_leaves_no_trace(accumulate, schedule):
    generator = torch.Generator().manual_seed(3)
    data = loader(shuffle=True, generator=generator)
    result = fxspeed.optimize(Net(), next(iter(data))[0])
    step = result.train_step(F.cross_entropy, accumulate=accumulate, schedule=schedule, total_steps=50, ema=0.9)
    for x, y in list(data)[: 2 * accumulate + 1]:
        step(x, y)
    position, before = generator.get_state(), everything(step)
    average = copy.deepcopy(step.average.weights)
    result.module.n.eval()
    found = fxspeed.find_lr(step, data, steps=12)
    assert len(found.rates) > 2 and not result.module.n.training
    assert everything(step) == before
    assert torch.equal(generator.get_state(), position)
    assert all(torch.equal(average[n], v) for n, v in step.average.weights.items())


def test_the_curve_is_that_of_a_loop_written_by_hand():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    data = [(x, (x.sum(1) > 0).long()) for x in torch.randn(5, 32, 6).double()]
    result = fxspeed.optimize(model, data[0][0])
    groups = [{"params": result.module[0].parameters(), "lr": 0.5}, {"params": result.module[2].parameters(), "lr": 1}]
    step = result.train_step(F.cross_entropy, torch.optim.SGD(groups))
    found = fxspeed.find_lr(step, data, low=1e-4, high=1e2, steps=30, smoothing=0.8, divergence=2.0)
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=1.0)
    average, smoothed = 0.0, []
    for i, rate in enumerate(found.rates):
        assert rate == pytest.approx(1e-4 * 1e6 ** (i / 29))
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = rate / 2, rate
        optimizer.zero_grad()
        x, y = data[i % 5]
        loss = F.cross_entropy(model(x), y)
        assert found.losses[i] == pytest.approx(loss.item(), abs=1e-9)
        average = 0.8 * average + 0.2 * loss.item()
        smoothed.append(average / (1 - 0.8 ** (i + 1)))
        loss.backward()
        optimizer.step()
    assert found.smoothed == pytest.approx(smoothed)
    assert found.diverged == found.rates[-1] and smoothed[-1] > 2 * min(smoothed)
    falls = [smoothed[i + 1] - smoothed[i - 1] for i in range(1, smoothed.index(min(smoothed)) + 1)]
    assert found.suggestion == found.rates[1 + falls.index(min(falls))]
    assert 1e-2 < found.suggestion < found.diverged and float(found) == found.suggestion
    assert "diverged" in str(found)


def test_a_shared_persistent_loader_keeps_its_running_iteration():
    data = loader(num_workers=1, persistent_workers=True)
    result = fxspeed.optimize(Net(), torch.randn(8, 6))
    step = result.train_step(F.cross_entropy)
    running = iter(data)
    first = next(running)
    fxspeed.find_lr(step, data, steps=3)
    rest = list(running)
    assert len(rest) == 7 and torch.equal(torch.cat([first[0], *(b[0] for b in rest)]), data.dataset.tensors[0])
    data._iterator._shutdown_workers()


def test_bad_input_has_clear_errors():
    data = loader()
    step = fxspeed.optimize(Net(), torch.randn(8, 6)).train_step(F.cross_entropy)
    for options, word in (
        ({"low": 1, "high": 0.1}, "low < high"),
        ({"steps": 1}, "steps"),
        ({"smoothing": 1}, "smooth"),
    ):
        with pytest.raises(fxspeed.Error, match=word):
            fxspeed.find_lr(step, data, **options)
    with pytest.raises(fxspeed.Error, match="no batches"):
        fxspeed.find_lr(step, [])
    with pytest.raises(fxspeed.Error, match="iterator"):
        fxspeed.find_lr(step, iter(data))
    with pytest.raises(fxspeed.Error, match="loss is nan"):
        fxspeed.find_lr(step, [(torch.full((8, 6), math.nan), torch.zeros(8, dtype=torch.long))])
    with pytest.raises(fxspeed.Error, match=r"yields a str"):
        fxspeed.find_lr(step, ["batch"])
