"""The largest batch: predicted, proved by trial, and no trace left."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxspeed
from fxspeed.cost.measure import measured_peak


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.n, self.b = nn.Linear(64, 512), nn.BatchNorm1d(512), nn.Linear(512, 10)

    def forward(self, x):
        return self.b(F.gelu(self.n(self.a(x))))


def training_bytes(module: nn.Module, batch: int) -> int:
    """Bytes of a hand-written AdamW training with this batch."""
    module = copy.deepcopy(module)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    x, y = torch.randn(batch, 64), torch.zeros(batch, dtype=torch.long)

    def run():
        for _ in range(2):
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    own = sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
    return measured_peak(run, torch.device("cpu")) + own + x.nbytes + y.nbytes


@pytest.mark.parametrize("share", [0.4, 0.9])
def test_the_answer_fits_and_a_little_more_does_not(share):
    result = fxspeed.optimize(Net(), torch.randn(8, 64))
    limit = int(training_bytes(Net(), 512) * (1 + share))
    found = fxspeed.find_batch_size(
        result, torch.randn(8, 64), (torch.zeros(8, dtype=torch.long),), loss_fn=F.cross_entropy, limit=limit, lr=1e-3
    )
    assert found.predicted == pytest.approx(found.size, rel=0.1)
    assert training_bytes(Net(), found.size) <= 1.02 * limit and found.bytes <= limit
    assert training_bytes(Net(), math.ceil(1.05 * found.size)) > 0.99 * limit
    assert found.lr == pytest.approx(1e-3 * found.size / 8) and int(found) == found.size
    assert found.trials[0].size == found.predicted and "learning rate" in str(found)


def test_no_trace_is_left_and_the_example_serves_as_batch():
    result = fxspeed.optimize(Net(), torch.randn(8, 64))
    step = result.train_step(lambda out: out.square().mean(), "sgd", lr=0.1, momentum=0.9, accumulate=2)
    x = torch.randn(8, 64)
    for _ in range(3):
        step(x)
    before = copy.deepcopy(step.state_dict())
    rng, entries = torch.get_rng_state(), list(result.program.entries)
    found = fxspeed.find_batch_size(step, x, limit="20MB", rule="sqrt", multiple_of=16, largest=256)
    assert found.size % 16 == 0 and found.size <= 256 and found.lr == pytest.approx(0.1 * math.sqrt(found.size / 8))
    after = step.state_dict()
    assert torch.equal(torch.get_rng_state(), rng) and result.program.entries == entries
    assert after["counters"] == before["counters"] and after["gradients"]
    for part in ("module", "gradients"):
        assert all(torch.equal(v, after[part][n]) for n, v in before[part].items())
    for i, state in before["optimizer"]["state"].items():
        assert torch.equal(state["momentum_buffer"], after["optimizer"]["state"][i]["momentum_buffer"])
    result.module.a.weight.grad = torch.ones_like(result.module.a.weight)
    small = fxspeed.find_batch_size(result, limit="20MB", largest=64)
    assert small.size == 64 and bool((result.module.a.weight.grad == 1).all())


def test_a_model_of_fixed_batch_is_tried_all_the_same_and_stays_optimized():
    class Fixed(Net):
        def forward(self, x):
            return super().forward(x) * (2.0 if x.shape[0] == 8 else 1.0)

    result = fxspeed.optimize(Fixed(), torch.randn(8, 64))
    found = fxspeed.find_batch_size(result, limit="8MB", largest=4096)
    assert found.size > 8 and not result.program.eager


def test_bad_input_has_clear_errors():
    result = fxspeed.optimize(Net(), torch.randn(8, 64))
    for call, word in (
        (lambda: fxspeed.find_batch_size(result), "limit="),
        (lambda: fxspeed.find_batch_size(result, limit="1KB"), "a batch of 2 needs 0.6 MiB, more than the limit"),
        (lambda: fxspeed.find_batch_size(result, limit="1KB", multiple_of=4), "a batch of 4 needs"),
        (lambda: fxspeed.find_batch_size(result, limit="1GB", rule="cubic"), "linear"),
        (lambda: fxspeed.find_batch_size(result, limit="1GB", multiple_of=0), "multiple_of"),
        (lambda: fxspeed.find_batch_size(result.module, limit="1GB"), "not a Net"),
        (lambda: fxspeed.find_batch_size(fxspeed.optimize(Net()), limit="1GB"), "no example inputs"),
        (lambda: fxspeed.find_batch_size(result, torch.tensor(1.0), limit="1GB"), "batch dimension"),
    ):
        with pytest.raises(fxspeed.Error, match=word):
            call()
