"""Capture: what a plain trace gets wrong is right here."""

from __future__ import annotations

import copy
import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxspeed
from fxspeed.graph.trace import trace
from tests.compare import assert_same, close, doubled, run

PASSES = {"passes": ["remove_syncs"], "verify": False}


class Net(nn.Module):
    """A module whose forward is a function of `self` and the inputs."""

    def __init__(self, forward, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.body = forward

    def forward(self, *args, **kwargs):
        return self.body(self, *args, **kwargs)


def check(model: nn.Module, *args, **kwargs):
    options = {k: kwargs.pop(k) for k in ("other_batch", "tol") if k in kwargs}
    model, args = doubled(model, args)
    return assert_same(model, args, kwargs, **PASSES, **options)


def test_dropout_follows_the_mode():
    check(Net(lambda s, x: F.dropout(s.a(x), 0.5, training=s.training), a=nn.Linear(4, 4)), torch.randn(6, 4))


@pytest.mark.parametrize("size", [(4, 6), (5, 7)])
def test_branch_on_a_size(size):
    def forward(self, x):
        if x.shape[0] > 4:
            x = x * 3
        return self.a(F.pad(x, (0, 8 - x.shape[1])))

    check(Net(forward, a=nn.Linear(8, 2)), torch.randn(*size))


def test_a_size_not_seen_is_captured_anew():
    model = Net(lambda s, x: s.a(x).mean((2, 3)) * x.shape[2], a=nn.Conv2d(1, 2, 3))
    result = fxspeed.optimize(model, torch.randn(2, 1, 6, 6), **PASSES)
    for size in ((2, 1, 6, 6), (3, 1, 6, 6), (2, 1, 8, 5), (2, 1, 8, 5), (4, 1, 8, 5)):
        x = torch.randn(*size)
        close(run(model, (x,)), run(result.module, (x,)), 1e-6)
    assert result.program.misses == 1


def test_len_and_float_of_sizes_stay_symbolic():
    def forward(self, x):
        return self.a(x) * (len(x) + int(x.shape[0] * 0.5))

    result = check(Net(forward, a=nn.Linear(3, 3)), torch.randn(4, 3))
    assert result.program.misses == 0


def test_cache_overflow_runs_the_model_as_written():
    model = Net(lambda s, x, k: s.a(x) * k, a=nn.Linear(3, 3))
    result = fxspeed.optimize(model, (torch.randn(2, 3), 0.5), **PASSES)
    x = torch.randn(2, 3)
    with pytest.warns(UserWarning, match="ways"):
        for k in range(12):
            close(run(model, (x, float(k))), run(result.module, (x, float(k))), 1e-6)
    assert any("ways" in s.why for s in result.skipped)


def test_modes_inside_forward_are_kept():
    def forward(self, x):
        with torch.no_grad():
            y = self.a(x)
        with torch.autocast("cpu", torch.bfloat16):
            z = self.a(x)
        with torch.inference_mode():
            w = x.exp().sum()
        return y + z.float() + w.clone()

    model = Net(forward, a=nn.Linear(4, 4))
    result = fxspeed.optimize(model, torch.randn(3, 4), **PASSES)
    x = torch.randn(3, 4)
    want, got = run(model, (x,)), run(result.module, (x,))
    close(want, got, 1e-6)
    for out in (want, got):
        out.sum().backward()
    close(model.a.weight.grad, result.module.a.weight.grad, 1e-6)
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def test_an_error_half_way_restores_the_modes():
    def forward(self, x, i):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return self.e(i) + x

    model = Net(forward, e=nn.Embedding(4, 2))
    result = fxspeed.optimize(model, (torch.randn(3, 2), torch.tensor([0, 1, 2])), **PASSES)
    with pytest.raises(IndexError):
        result.module(torch.randn(3, 2), torch.tensor([0, 1, 9]))
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def test_python_randomness_is_not_frozen():
    class Jitter(nn.Module):
        def forward(self, x):
            return x * random.random()

    model = nn.Sequential(nn.Linear(3, 3), Jitter(), nn.Linear(3, 2))
    state = random.getstate()
    result = check(model, torch.randn(4, 3))
    assert any("Jitter" in s.target for s in result.skipped)
    random.setstate(state)
    first, second = result.module(torch.ones(2, 3).double()), result.module(torch.ones(2, 3).double())
    assert not torch.equal(first, second)


def test_state_kept_in_attributes_stays_python():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x * self.calls

    result = check(nn.Sequential(nn.Linear(3, 3), Counter()), torch.randn(4, 3))
    assert any("attributes" in s.why for s in result.skipped)


def test_caches_in_attributes_are_seen_through():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.cache, self.size = nn.Linear(3, 3), None, 0

        def forward(self, x):
            if self.cache is None or self.size != x.shape[1]:
                self.size = x.shape[1]
                self.cache = torch.arange(self.size).to(x.dtype)
            return self.a(x + self.cache)

    result = check(nn.Sequential(nn.Linear(3, 3), Positions()), torch.randn(4, 3))
    assert not [s for s in result.skipped if s.pass_name == "capture"]


def test_a_first_call_that_differs_is_no_cache():
    class Scaled(nn.Module):
        def __init__(self, by_value):
            super().__init__()
            self.scale, self.by_value = None, by_value

        def forward(self, x):
            if self.scale is None:
                self.scale = x.detach().std() if self.by_value else 2.0
                x = x if self.by_value else x + 1
            return x * self.scale

    for by_value in (True, False):
        model = nn.Sequential(nn.Linear(3, 3), Scaled(by_value)).double()
        result = fxspeed.optimize(model, torch.randn(4, 3).double(), **PASSES)
        for _ in range(3):
            x = torch.randn(4, 3).double()
            close(run(model, (x,)), run(result.module, (x,)), 1e-9)


def test_a_parent_that_sets_its_childs_attributes():
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.child = nn.Sequential(nn.Linear(3, 3))
            self.child.calls = 0

        def forward(self, x):
            self.child.calls += 1
            return self.child(x) * self.child.calls

    check(Parent(), torch.randn(4, 3))


def test_hooks_fire_once_and_those_added_later_too():
    calls = []
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 2))
    result = fxspeed.optimize(model, torch.randn(2, 3), **PASSES)
    result.module[0].register_forward_hook(lambda m, i, o: calls.append(1))
    result.module(torch.randn(2, 3))
    assert calls == [1]


def test_hooks_do_not_fire_while_optimizing():
    calls = []
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 2))
    model[0].register_forward_hook(lambda m, i, o: calls.append(type(o)))
    model[1].register_forward_pre_hook(lambda m, i: calls.append(type(i[0])))
    result = fxspeed.optimize(model, torch.randn(2, 3))
    assert calls == []
    result.module(torch.randn(2, 3))
    assert calls == [torch.Tensor, torch.Tensor]


def test_a_branch_on_a_value_leaves_the_rest_captured():
    class Gate(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum() > 0 else x - 1

    result = check(nn.Sequential(nn.Linear(3, 3), Gate(), nn.Linear(3, 2)), torch.randn(4, 3))
    leaf = next(s for s in result.skipped if s.pass_name == "capture")
    assert "Gate" in leaf.target and __file__ in leaf.source and "value" in leaf.why
    assert len([n for n in result.train_graph.graph.nodes if n.op == "call_module"]) == 3


def test_a_root_that_cannot_be_captured_runs_as_written():
    model = Net(lambda s, x: s.a(x) * (2 if x.sum() > 0 else 3), a=nn.Linear(3, 3))
    result = check(model, torch.randn(4, 3))
    assert result.program.eager and result.diff() == ""


def test_scripted_functions_are_not_guessed():
    @torch.jit.script
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    class Part(nn.Module):
        def forward(self, x):
            return scaled(x)

    result = check(nn.Sequential(nn.Linear(3, 3), Part()), torch.randn(4, 3))
    assert any(s.pass_name == "capture" for s in result.skipped)


def test_the_users_own_checkpointing_stays():
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x):
            return checkpoint(self.a, x, use_reentrant=False)

    result = check(nn.Sequential(Block(), nn.Linear(3, 2)), torch.randn(4, 3))
    assert any("checkpoint" in s.why for s in result.skipped)


def test_custom_function_keeps_its_backward():
    class Triple(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return 3 * g

    check(Net(lambda s, x: Triple.apply(s.a(x)), a=nn.Linear(3, 3)), torch.randn(4, 3))


def test_in_place_writes_and_views():
    def forward(self, x, mask):
        y = self.a(x).clone()
        z = y[:, :2]
        y[:, 0] = 1.5
        y[mask] = -1.0
        y += 1
        y.mul_(2)
        return y * z.sum(), z

    check(Net(forward, a=nn.Linear(4, 4)), torch.randn(3, 4), torch.tensor([[True, False, True, False]] * 3))


def test_tied_parameters_and_shared_modules():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.e, self.out = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.out.weight = self.e.weight
            self.mix = nn.Linear(4, 4)

        def forward(self, i):
            return self.out(self.mix(self.mix(self.e(i))))

    result = check(Tied(), torch.randint(0, 7, (3, 5)))
    assert result.module.out.weight is result.module.e.weight


def test_containers_keywords_and_constants_of_closures():
    table = torch.randn(4).double()

    def forward(self, batch, *, scale=1.0, flag=None):
        a, (b, c) = batch["a"], batch["rest"]
        return {"y": self.a(a) * scale + table, "flag": flag, "rest": [b, (c,)]}

    model = Net(forward, a=nn.Linear(4, 4))
    check(model, {"a": torch.randn(2, 4), "rest": (torch.randn(2), torch.randn(2))}, scale=0.5, flag="on")


def test_plain_objects_as_outputs():
    class Answer:
        def __init__(self, x):
            self.x, self.parts = x, [x * 2]

    result = check(Net(lambda s, x: Answer(s.a(x)), a=nn.Linear(3, 3)), torch.randn(2, 3))
    assert not [s for s in result.skipped if s.pass_name == "capture"]


def test_nodes_know_their_source_and_what_autograd_keeps():
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    graph = trace(model, (torch.randn(4, 3),), {}).graph
    relu = next(n for n in graph.nodes if n.name == "_1")
    assert relu.meta["path"] == "1" and [tuple(t.shape)[1:] for t in relu.meta["saved"]] == [(5,)]
    assert all("val" in n.meta for n in graph.nodes if n.op != "output")
    model = Net(lambda s, x: s.a(x).relu(), a=nn.Linear(3, 3))
    node = next(n for n in trace(model, (torch.randn(4, 3),), {}).graph.nodes if n.target == "relu")
    assert node.meta["source"].startswith(__file__)


def test_capture_leaves_no_trace():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.5))
    before, state, python = copy.deepcopy(model.state_dict()), torch.get_rng_state(), random.getstate()
    fxspeed.optimize(model, torch.randn(2, 1, 5, 5, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == python
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert type(model).forward is nn.Sequential.forward and nn.Module.__call__ is nn.Module._wrapped_call_impl


def test_ambient_autocast_is_its_own_capture():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    result = fxspeed.optimize(model, torch.randn(2, 3), **PASSES)
    x = torch.randn(2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        want, got = run(model, (x,)), run(result.module, (x,))
    assert want.dtype is got.dtype is torch.bfloat16
    close(want, got, 1e-6)


def test_frozen_flags_are_seen():
    model = nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2), nn.Dropout(0.5))
    result = fxspeed.optimize(model, torch.randn(3, 2, 4), **PASSES)
    x = torch.randn(3, 2, 4)
    for m in (model, result.module):
        m.train()
        m[1].eval(), m[2].eval()
    close(run(model, (x,)), run(result.module, (x,)), 1e-6)


def test_requires_grad_set_in_forward():
    """As transformers' wav2vec2 does before it checkpoints: a gradient reaches the input."""

    def forward(self, x):
        h = x * 2
        if not h.requires_grad:
            h.requires_grad = True
        y = self.a(h)
        return y, h

    model = Net(forward, a=nn.Linear(4, 4))
    result = fxspeed.optimize(model, torch.randn(3, 4), **PASSES)
    assert not [s for s in result.skipped if s.pass_name == "capture"]
    x = torch.randn(5, 4)
    (y, h), (want, _) = result.module(x), model(x)
    assert torch.equal(y, want) and h.requires_grad
    y.sum().backward()
    assert result.module.a.weight.grad is not None


class Cache:
    """What transformers returns beside the logits: an object that holds tensors in lists."""

    def __init__(self):
        self.keys: list[torch.Tensor] = []
        self.seen = 0

    def update(self, key):
        self.keys.append(key)
        self.seen += key.shape[0]
        return torch.cat(self.keys, -1)


def test_objects_of_the_users_classes_as_outputs():
    def forward(self, x):
        cache = Cache()
        y = self.b(cache.update(self.a(x)))
        cache.update(y)
        return {"y": y, "cache": cache}

    model, (x,) = doubled(Net(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 3)), (torch.randn(5, 4),))
    result = fxspeed.optimize(model, x, **PASSES)
    assert not [s for s in result.skipped if s.pass_name == "capture"]
    for batch in (x, torch.cat([x, x])):
        want, got = model(batch), result.module(batch)
        assert type(got["cache"]) is Cache and got["cache"].seen == want["cache"].seen
        close([want["y"], *want["cache"].keys], [got["y"], *got["cache"].keys], 1e-12)
    assert result.module(x)["cache"] is not result.module(x)["cache"]


@pytest.mark.parametrize("kind", [int, float, bool])
def test_python_types_as_dtypes(kind):
    model = Net(lambda s, x: s.a(x) * torch.ones(x.shape, dtype=kind) + (x > 0).to(dtype=kind), a=nn.Linear(4, 4))
    x = torch.randn(3, 4)
    result = fxspeed.optimize(model, x, **PASSES)
    assert not [s for s in result.skipped if s.pass_name == "capture"]
    close(run(model, (x,)), run(result.module, (x,)), 1e-6)


def test_grouped_matrix_products():
    """What mixtures of experts are made of."""

    def forward(self, x):
        offsets = torch.tensor([2, 6], dtype=torch.int32)
        return torch._grouped_mm(x, self.w, offs=offsets)

    model = Net(forward, w=nn.Parameter(torch.randn(2, 8, 8)))
    x = torch.randn(6, 8)
    result = fxspeed.optimize(model, x, dynamic=(), **PASSES)
    assert not [s for s in result.skipped if s.pass_name == "capture"]
    close(run(model, (x,)), run(result.module, (x,)), 0)


NAMES = ("graph", "code", "checkpoint_0", "fused_0")


def test_children_named_as_a_graph_module_names_its_own():
    def forward(self, x):
        for name in NAMES:
            x = torch.sigmoid(getattr(self, name)(x).sin()) * self.print_readable
        return x

    model = Net(forward, **{name: nn.Linear(8, 8) for name in NAMES})
    model.register_buffer("print_readable", torch.full((8,), 1.5))
    model, (x,) = doubled(model, (torch.randn(64, 8),))
    assert_same(model, (x,), passes=["checkpoint"], memory_budget=0.7)


def test_capture_copies_no_parameter():
    """Two copies of the weights would be 64 MiB; capture on fake tensors takes next to nothing."""
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])
    pointers = {p.data_ptr() for p in model.parameters()}
    made: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if type(out) in (torch.Tensor, nn.Parameter) and not out.is_meta:
                made.append(0 if out.data_ptr() in pointers else out.numel() * out.element_size())
            return out

    with Watch():
        trace(model, (torch.randn(2, 1024),), {})
    assert sum(made) < 1024 * 1024


class Cached(nn.Module):
    """Keeps what only sizes decide, moves what is in place already."""

    def __init__(self):
        super().__init__()
        self.helper, self.table, self.layer = Helper(), nn.Buffer(torch.randn(9, 4)), nn.Linear(4, 4)
        self.scale = numpy.float64(0.5)

    def forward(self, x):
        self.helper.prepare(x)
        self.table = self.table.to(x)
        self.layer = self.layer.to(x.dtype)
        return self.layer(x) * self.scale + self.table[: self.helper.length], self.layer.weight.dtype == torch.float16


class Helper(nn.Module):
    length = None

    def prepare(self, x):
        self.length = x.shape[0]


def test_attributes_that_only_cache():
    model, (x,) = doubled(Cached(), (torch.randn(3, 4),))
    result = assert_same(model, (x,), other_batch=False)
    assert not [s for s in result.skipped if s.pass_name == "capture" and s.target != "inputs"]
    assert model.helper.length is None
    half = result.module.half()  # the forward asks for a weight's dtype: captured anew
    assert half(x.half())[1] is True and result.module.double()(x)[1] is False


def test_numbers_read_as_truth_are_outputs():
    class Flag(nn.Module):
        def forward(self, x):
            return x + 1, (x < 0).any().item()

    result = fxspeed.optimize(Flag(), torch.ones(2, 2))
    assert not [s for s in result.skipped if s.pass_name == "capture"]
    assert result.module(-torch.ones(2, 2))[1] is True and result.module(torch.ones(2, 2))[1] is False
