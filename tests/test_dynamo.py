"""torch.compile with backend="fxspeed"."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import fxspeed
from tests.compare import close, doubled, loss_of, run


class Block(nn.Module):
    """Something for each pass: a chain to fuse, a constant to hoist, dropout, statistics."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.inner, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.drop, self.outer = nn.Dropout(0.2), nn.Linear(width, width)

    def forward(self, x):
        h = self.norm(self.inner(x))
        h = 0.5 * h * (1 + torch.tanh(0.79 * (h + 0.044 * h**3))) + torch.tensor(0.5)
        return x + self.outer(self.drop(h))


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def assert_equal_steps(model: nn.Module, compiled: nn.Module, *batches: torch.Tensor) -> None:
    for x in batches:
        for each in (model, compiled):
            each.zero_grad()
        outputs = [run(each, (x,)) for each in (model, compiled)]
        close(*outputs, 1e-9)
        for output in outputs:
            loss_of(output).backward()
        for (name, want), got in zip(model.named_parameters(), compiled.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-9, atol=1e-9, msg=name)
        for want, got in zip(model.buffers(), compiled.buffers(), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_steps_are_equal_in_both_modes():
    model, (x,) = doubled(nn.Sequential(Block(), Block()), (torch.randn(8, 16),))
    compiled = torch.compile(copy.deepcopy(model), backend="fxspeed")
    assert_equal_steps(model, compiled, x, x + 1)
    model.eval(), compiled.eval()
    with torch.no_grad():
        close(model(x), compiled(x), 1e-9)


@pytest.mark.parametrize("dynamic", [None, True])
def test_other_batch_sizes_compile_once_more_at_most(dynamic):
    model, (x,) = doubled(Block(), (torch.randn(8, 16),))
    counter = CompileCounterWithBackend("fxspeed")
    compiled = torch.compile(copy.deepcopy(model), backend=counter, dynamic=dynamic)
    assert_equal_steps(model, compiled, x, x[:5], x[:3], x[:7], torch.cat([x, x]))
    assert counter.frame_count <= (1 if dynamic else 2)


def test_a_size_computed_from_sizes():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            half = x.shape[0] // 2
            return x[:half] * self.scale + x[half : 2 * half].sum() / half

    model, (x,) = doubled(Halves(), (torch.randn(8, 3),))
    compiled = torch.compile(copy.deepcopy(model), backend="fxspeed", dynamic=True)
    assert_equal_steps(model, compiled, x, x[:6], x[:5])


def test_graph_breaks_and_branches_on_values():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Block(), Block()

        def forward(self, x):
            x = self.first(x)
            if x.sum() > 0:
                x = x * 2
            torch._dynamo.graph_break()
            return self.second(x)

    model, (x,) = doubled(Branches(), (torch.randn(8, 16),))
    compiled = torch.compile(copy.deepcopy(model), backend="fxspeed")
    assert_equal_steps(model, compiled, x, x - 3, x + 3)


def test_the_passes_fire(caplog):
    model, x = nn.Sequential(*[Block(64) for _ in range(3)]), torch.randn(512, 64)
    with caplog.at_level(logging.INFO, "fxspeed.dynamo"):
        compiled = torch.compile(
            model, backend="fxspeed", options={"memory_budget": 0.6, "passes": ["remove_syncs", "checkpoint"]}
        )
        compiled(x).sum().backward()
    said = {record.args[0].pass_name for record in caplog.records if isinstance(record.args[0], fxspeed.Change)}
    assert said == {"remove_syncs", "checkpoint"}


def test_unknown_options_are_refused():
    with pytest.raises(Exception, match="did you mean 'memory_budget'"):
        torch.compile(Block(), backend="fxspeed", options={"memory_budgets": 0.5})(torch.randn(4, 16))


def test_what_cannot_be_captured_runs_as_dynamo_gave_it():
    def f(x):
        return torch.nonzero(x).sum() + x.sum()

    x = torch.tensor([0.0, 1.0, 2.0, 0.0])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert torch.compile(f, backend="fxspeed")(x) == f(x)
