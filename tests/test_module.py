"""The drop-in module: the user's class in all that others rely on."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import nn

import fxspeed
from tests.compare import close, run


class Net(nn.Module):
    """A network with a bias to drop, a constant to hoist, a method and attributes of its own."""

    size = 4

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.drop = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.1)
        self.head = nn.Linear(4, 2)
        self.note = {"a": 1}

    def forward(self, x, scale: float = 1.0):
        x = torch.relu(self.bn(self.conv(x - torch.tensor(0.5))))
        return self.head(self.drop(x.mean((2, 3)))) * scale

    def hello(self):
        return self.note["a"] + self.size


@pytest.fixture
def pair():
    model = Net()
    model.bn.running_mean.normal_()
    x = torch.randn(4, 3, 6, 6)
    return model, fxspeed.optimize(model, x), x


def test_it_is_of_the_users_class(pair):
    model, result, _ = pair
    module = result.module
    assert isinstance(module, Net) and type(module).__name__ == "Net" and module.hello() == 5
    assert inspect.signature(module.forward) == inspect.signature(model.forward)
    assert [n for n, _ in module.named_modules()] == [n for n, _ in model.named_modules()]
    assert set(dict(model.named_parameters())) - set(dict(module.named_parameters())) == {"conv.bias"}
    assert str(module).startswith("Net(")


@pytest.mark.parametrize("mode", ["pickle", "deepcopy", "torch.save"])
def test_copies_run_the_same(pair, mode):
    _, result, x = pair
    module = result.module
    module(x)
    if mode == "pickle":
        other = pickle.loads(pickle.dumps(module))
    elif mode == "deepcopy":
        other = copy.deepcopy(module)
    else:
        buffer = io.BytesIO()
        torch.save(module, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    other.bn.running_mean.copy_(module.bn.running_mean)
    close(run(module, (x,)), run(other, (x,)), 0)
    misses = other._fxspeed.misses
    other.eval(), module.eval()
    close(run(module, (x,)), run(other, (x,)), 0)
    assert other._fxspeed.misses == misses, "the copy captured anew"
    with torch.no_grad():
        other.head.weight.add_(1)
    assert not torch.equal(run(module, (x,)), run(other, (x,)))


def test_pickling_with_regions():
    model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(32, 32), nn.GELU())])
    x = torch.randn(64, 32)
    module = fxspeed.optimize(model, x, memory_budget=0.7, passes=["checkpoint"]).module
    other = pickle.loads(pickle.dumps(module))
    for m in (module, other):
        m(x).square().sum().backward()
    for p, q in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_to_half_and_double(pair):
    model, result, x = pair
    model.eval(), result.module.eval()
    close(
        run(copy.deepcopy(model).double(), (x.double(),)),
        run(copy.deepcopy(result.module).double(), (x.double(),)),
        1e-6,
    )
    close(run(model.bfloat16(), (x.bfloat16(),)), run(result.module.bfloat16(), (x.bfloat16(),)), 3e-2)


def test_the_users_state_dict_loads_into_the_module(pair):
    _, result, x = pair
    other = Net()
    other.bn.running_mean.normal_()
    result.module.load_state_dict(other.state_dict())
    other.eval(), result.module.eval()
    close(run(other, (x,)), run(result.module, (x,)), 1e-5)


def test_a_replaced_head_is_used(pair):
    model, result, x = pair
    head = nn.Linear(4, 7)
    model.head, result.module.head = head, head
    model.eval(), result.module.eval()
    close(run(model, (x,)), run(result.module, (x,)), 1e-5)


def test_constants_follow_the_module_to_its_device(pair):
    _, result, _ = pair
    moved = copy.deepcopy(result.module).to("meta")
    constants = [v for e in moved._fxspeed.entries for v in e.trace.constants.values()]
    assert constants and all(v.device.type == "meta" for v in constants)


def test_without_inputs_the_first_call_is_captured():
    model, x = Net(), torch.randn(4, 3, 6, 6)
    result = fxspeed.optimize(model)
    assert not result.program.entries
    with pytest.raises(fxspeed.Error, match="no call has been captured"):
        _ = result.train_graph
    close(run(model, (x,)), run(result.module, (x,)), 1e-6)
    assert {c.pass_name for c in result.changes} == {"drop_bias", "remove_syncs"}
    assert "constant_0" in result.diff() and "bias=False" in result.diff()
    assert "conv.bias" not in dict(result.module.named_parameters())
    assert "conv.bias" in result.original_state_dict() and len(result.program.entries) == 2
    model.eval(), result.module.eval()
    close(run(model, (x,)), run(result.module, (x,)), 1e-5)
    assert result.program.misses == 1


def test_distributed_data_parallel(tmp_path):
    model, x = Net(), torch.randn(4, 3, 6, 6)
    model.drop.p = 0.0
    result = fxspeed.optimize(model, x)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(result.module)
        wrapped(x).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    model(x).sum().backward()
    new = dict(result.module.named_parameters())
    for name, p in model.named_parameters():
        if name in new:
            torch.testing.assert_close(new[name].grad, p.grad, rtol=1e-4, atol=1e-5)


def test_compiled_by_the_user():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    result = fxspeed.optimize(model, torch.randn(3, 4))
    x = torch.randn(3, 4)
    compiled = torch.compile(result.module, backend="eager")
    close(model(x), compiled(x), 1e-6)


class Gate(nn.Module):
    """What it returns beside the tensor depends on values; it counts its calls and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.seen += x.detach().mean()
        positive = bool(x.mean() > 0)
        return x * torch.rand(()), positive, x.abs() if positive else None


class Gated(nn.Module):
    """Batch statistics before the gate, and a branch on what the gate returns behind it."""

    def __init__(self):
        super().__init__()
        self.bn, self.gate, self.head = nn.BatchNorm1d(4), Gate(), nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x):
        self.total += x.detach().sum(0)
        y, positive, more = self.gate(self.head(self.bn(x)))
        return y + more if positive else y - 1


@pytest.mark.filterwarnings("ignore:fxspeed")
def test_a_module_that_stays_python_may_return_another_structure():
    torch.manual_seed(0)
    model = Gated()
    with torch.no_grad():
        model.head.bias.fill_(3.0)
    result = fxspeed.optimize(model, torch.randn(6, 4))
    (trained,) = (e for e in result.program.entries if e.trace.training)
    module = result.module
    for bias, retired in ((3.0, False), (-3.0, True), (3.0, True)):
        for each in (model, module):
            with torch.no_grad():
                each.head.bias.fill_(bias)
        x = torch.randn(6, 4)
        found = [(run(m, (x,)), torch.get_rng_state(), *m.buffers()) for m in (model, module)]
        close(*found, 1e-6)
        assert (module.gate.calls, module.gate.seen) == (model.gate.calls, model.gate.seen)
        assert bool(trained.retired) is retired
    (why,) = (skip.why for skip in result.skipped if skip.what == "run the graphs")
    assert why.endswith("returned (Tensor, False, None) where the captured graph expects (Tensor, True, Tensor)")


def test_numbers_that_a_module_computes_from_values_are_not_frozen():
    class Scale(nn.Module):
        def forward(self, x):
            return x, float(x.detach().abs().max())

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.scale = nn.Linear(4, 4), Scale()

        def forward(self, x):
            y, most = self.scale(self.first(x))
            return y / most

    model = Scaled()
    result = fxspeed.optimize(model, torch.randn(3, 4))
    for n in (3, 5):
        x = torch.randn(n, 4)
        assert torch.equal(result.module(x), model(x))
    assert not any(e.retired for e in result.program.entries)
