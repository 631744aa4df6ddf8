"""Verification: a pass that changes anything is caught and rolled back whole."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest
import torch
from torch import nn

import fxspeed
from fxspeed import verify
from fxspeed.graph.ops import name_of
from fxspeed.passes import Captured, Change, DropBias, Pass, RemoveSyncs


@dataclasses.dataclass(frozen=True)
class Wrong(Pass):
    """A pass with a fault of the kind that its option names."""

    name: ClassVar[str] = "wrong"
    fault: str = "output"

    def run(self, captured: Captured) -> list:
        for mode, trace in captured.traces.items():
            if self.fault == "eval" and mode == "train":
                continue
            for node in list(trace.graph.nodes):
                if self.fault in ("output", "eval") and name_of(node) == "mul":
                    node.update_arg(1, 2.000001)
                if self.fault == "gradient" and name_of(node) == "mul":
                    with trace.graph.inserting_before(node):
                        source = node.args[0]
                        cut = trace.graph.create_node("call_method", "detach", (source,))
                        cut.meta = dict(source.meta)
                    node.update_arg(0, cut)
                if self.fault == "buffer" and node.target == "1":
                    with trace.graph.inserting_after(node):
                        extra = trace.graph.node_copy(node, lambda n: n)
                        extra.meta = dict(node.meta)
                if self.fault == "crash":
                    raise ValueError("no such thing")
        return [Change(self.name, "somewhere", "a fault", "testing")]


def net() -> nn.Module:
    class Net(nn.Sequential):
        def forward(self, x):
            return super().forward(x - torch.tensor(0.1)) * 2

    return Net(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.ReLU())


@pytest.mark.parametrize("fault", ["output", "gradient", "buffer", "eval"])
@pytest.mark.parametrize("mode", [True, "full"])
def test_faults_are_rolled_back(fault, mode):
    model, x = net(), torch.randn(4, 2, 5, 5)
    result = fxspeed.optimize(model, x, passes=[DropBias(), Wrong(fault), RemoveSyncs()], verify=mode)
    assert result.broken == ("wrong",)
    assert {c.pass_name for c in result.changes} == {"drop_bias", "remove_syncs"}
    said = next(s for s in result.skipped if s.pass_name == "wrong")
    assert "rolled back" in said.what and "verification" in said.why
    torch.testing.assert_close(result.module(x), model(x))


def test_a_crash_leaves_the_graph_as_it_was():
    result = fxspeed.optimize(net(), torch.randn(4, 2, 5, 5), passes=[Wrong("crash"), "drop_bias"])
    assert [c.pass_name for c in result.changes] == ["drop_bias"]
    assert any("ValueError" in s.why for s in result.skipped)


def test_without_verification_nothing_is_checked():
    result = fxspeed.optimize(net(), torch.randn(4, 2, 5, 5), passes=[Wrong("output")], verify=False)
    assert result.broken == () and len(result.changes) == 1


def test_cost_is_at_most_four_forwards_and_backwards(monkeypatch):
    runs: list[bool] = []
    original = verify._run
    monkeypatch.setattr(verify, "_run", lambda m, c, i, backward: runs.append(backward) or original(m, c, i, backward))
    fxspeed.optimize(net(), torch.randn(4, 2, 5, 5), precision="bf16")
    backward = sum(runs)
    forward = len(runs) - backward
    assert backward == 2
    assert backward + forward / 3 <= 5  # a forward is a third; those in the model's own dtype are half of that
    weights = [1.0 if b else 1 / 3 for b in runs]
    assert sum(weights) - forward / 3 / 2 <= 4


def test_low_precision_worse_than_autocasts_is_rolled_back():
    @dataclasses.dataclass(frozen=True)
    class Coarse(Pass):
        name: ClassVar[str] = "coarse"

        def run(self, captured: Captured) -> list:
            for trace in captured.traces.values():
                for node in list(trace.graph.nodes):
                    if name_of(node) == "mul":
                        with trace.graph.inserting_after(node):
                            low = trace.graph.create_node("call_method", "to", (node, torch.float8_e4m3fn))
                            low.meta = dict(node.meta)
                        with trace.graph.inserting_after(low):
                            back = trace.graph.create_node("call_method", "to", (low, torch.float32))
                            back.meta = dict(node.meta)
                        node.replace_all_uses_with(back, lambda user, low=low: user is not low)
            captured.options["low_precision"] = torch.bfloat16
            return [Change(self.name, "mul", "in eight bits", "testing")]

    result = fxspeed.optimize(net(), torch.randn(4, 2, 5, 5), passes=[Coarse()])
    assert result.broken == ("coarse",)


def test_a_fault_in_recomputation_is_seen(monkeypatch):
    from fxspeed.passes import checkpoint

    original = checkpoint.CheckpointRegion.bind

    def faulty(self, root, body):
        calls = []

        def twice_as_much(*inputs):
            calls.append(1)
            return body(*inputs) if len(calls) % 2 else body(*(i * 2 for i in inputs))

        return original(self, root, twice_as_much)

    monkeypatch.setattr(checkpoint.CheckpointRegion, "bind", faulty)
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())])
    result = fxspeed.optimize(model, torch.randn(64, 32), passes=["checkpoint{budget=0.9}"])
    assert result.broken == ("checkpoint",)
