"""Modules that stay Python: their children are still optimized, and graphs stand on both sides of them."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import fxspeed
from tests.compare import close, loss_of, run


class Block(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.one, self.two = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.tensor([0.5, 2.0])  # a constant that remove_syncs would hoist
        return self.two(self.one(x).tanh()) * scale.sum()


class Branching(nn.Module):
    """Takes one of two ways by the values it sees."""

    def __init__(self, size: int):
        super().__init__()
        self.ways = nn.ModuleList([Block(size), Block(size)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ways[int(x.abs().sum() * 1e3) % 2](x)


class Net(nn.Module):
    def __init__(self, size: int = 6):
        super().__init__()
        self.before, self.middle, self.after = Block(size), Branching(size), Block(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.middle(self.before(x)))


def equal(model: nn.Module, module: nn.Module, x: torch.Tensor) -> None:
    outputs = [run(m, (x,)) for m in (model, module)]
    close(*outputs, 1e-6)
    for m, out in zip((model, module), outputs, strict=True):
        m.zero_grad()
        loss_of(out).backward()
    gradients = [[torch.zeros(1) if p.grad is None else p.grad for p in m.parameters()] for m in (model, module)]
    close(*gradients, 1e-5)


def test_children_of_a_module_that_branches_on_values_are_rewritten():
    torch.manual_seed(1)
    model, x = Net(), torch.randn(4, 6)
    result = fxspeed.optimize(model, x)
    assert [s.target for s in result.skipped if s.pass_name == "capture"] == ["middle (Branching)"]
    taken = int(model.before(x).abs().sum() * 1e3) % 2
    programs = {path: program for path, program in result.programs() if path}
    assert set(programs) == {"middle.ways.0", "middle.ways.1"}
    assert len(programs[f"middle.ways.{taken}"].entries) == 2  # train and eval
    assert any(c.target.startswith(f"middle.ways.{taken}") for c in result.changes)
    assert f"# middle.ways.{taken}" in result.source("train")[1]
    for seed in range(6):  # the other way too, which is captured when it is first taken
        torch.manual_seed(seed)
        equal(model, result.module, torch.randn(5, 6))
    assert all(len(p.entries) == 2 for p in programs.values())


def test_children_of_a_whole_that_stays_python():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block(4)

        def forward(self, x):
            x = x[: int(x.abs().sum()) % 3 + 1]
            return self.block(x), x.tolist()

    model, x = Whole(), torch.randn(4, 4)
    result = fxspeed.optimize(model, x)
    assert result.program.eager
    assert [p for p, _ in result.programs()] == ["", "block"]
    assert any(c.target.startswith("block") for c in result.changes)
    close(run(model, (x,)), run(result.module, (x,)), 1e-6)


def test_paths_state_and_copies_stay_those_of_the_users_classes():
    model, x = Net(), torch.randn(4, 6)
    result = fxspeed.optimize(model, x)
    assert list(result.module.state_dict()) == list(model.state_dict())
    assert [n for n, _ in result.module.named_modules()] == [n for n, _ in model.named_modules()]
    assert all(isinstance(a, type(b)) for a, b in zip(result.module.modules(), model.modules(), strict=True))
    buffer = io.BytesIO()
    torch.save(result.module, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(result.module), torch.load(buffer, weights_only=False)):
        equal(model, other, x)
    again = fxspeed.optimize(result.module, x)
    equal(model, again.module, x)


def test_an_error_of_a_child_reaches_the_module_around_it_unchanged():
    class Picky(nn.Module):
        def forward(self, x):
            if x.shape[-1] != 4:
                raise KeyError("four")
            return x * 2

    class Trying(nn.Module):
        def __init__(self):
            super().__init__()
            self.picky = Picky()

        def forward(self, x):
            if float(x.sum()) > 1e9:
                return x
            try:
                return self.picky(x[:, :3])
            except KeyError:
                return self.picky(x)

    x = torch.randn(3, 4)
    result = fxspeed.optimize(Trying(), x)
    close([x * 2], [result.module(x)], 0)


def test_plain_tensors_of_a_child_are_the_modules_own():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.ones(3)  # no buffer

        def forward(self, x):
            return x * self.table

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.holder = Holder()

        def forward(self, x):
            return self.holder(x) if x.sum().item() > -1e9 else x

    x = torch.randn(2, 3)
    result = fxspeed.optimize(Around(), x)
    result.module.holder.table.mul_(3)
    close([x * 3], [result.module(x)], 1e-6)


@pytest.mark.parametrize("budget", [0.9, "1GiB"])
def test_budgets_do_not_stop_children(budget):
    model, x = Net(), torch.randn(4, 6)
    result = fxspeed.optimize(model, x, memory_budget=budget)
    equal(model, result.module, x)
    assert any(c.target.startswith("middle.") for c in result.changes)
