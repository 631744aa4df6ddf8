"""PYTEST_DONT_REWRITE: what makes the host wait, found without a GPU."""

from __future__ import annotations

import copy
import itertools
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxspeed

HERE = __file__


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.n, self.b = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(F.gelu(self.n(self.a(x))))


class Waits(nn.Module):
    """One of each kind; the line of each is found by its mark."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 8)

    def forward(self, x):
        y = self.a(x)
        if y.mean().item() > 100:  # read
            y = y * 2
        z = y[y > 0].sum()  # mask
        t = torch.tensor([1.0, 2.0], device=x.device)  # made
        w = torch.tensor(np.ones(8)).to(x)  # array
        n = y.detach().cpu().numpy().mean()  # copy
        i = torch.arange(8)
        return (y * w)[:, i] * t.sum() + z + float(n)  # index


def line(mark: str) -> str:
    lines = Path(HERE).read_text().splitlines()
    return f"{HERE}:{next(i for i, text in enumerate(lines, 1) if text.endswith(f'# {mark}'))}"


def x() -> torch.Tensor:
    return torch.randn(4, 6)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return x(), torch.randint(0, 3, (4,))


@pytest.mark.parametrize("optimized", [False, True])
def test_each_kind_is_found_with_its_line(optimized):
    model = fxspeed.optimize(Waits(), x()) if optimized else Waits()
    found = {(f.kind, f.place) for f in fxspeed.audit(model, x()).findings if "backward" not in f.what}
    assert found == {
        ("host read", line("read")),
        ("host read", line("mask")),
        ("made from host data", line("made")),
        ("made from host data", line("array")),
        ("copy to device", line("array")),
        ("copy to host", line("copy")),
        ("copy to device", line("index")),
    }


def test_backward_is_named_by_its_forward():
    found = [f for f in fxspeed.audit(Waits(), x()).findings if "backward" in f.what]
    assert {f.place for f in found} == {line("mask"), line("index")}


PRECISIONS = ("fp32", "bf16", "fp16")
OPTIMIZERS = "adamw adam sgd rmsprop adagrad adadelta adamax nadam radam asgd rprop lamb lars".split()
SCHEDULES = (None, "1cycle", "cyclic", lambda o: torch.optim.lr_scheduler.StepLR(o, 1))


COMBINATIONS = list(itertools.product(OPTIMIZERS, SCHEDULES, (1, 3), (None, 1.0)))


def audit_combinations(precision: str, combinations: list) -> None:
    result = fxspeed.optimize(Net(), x(), precision=precision)
    inputs, targets = batch()
    for name, schedule, accumulate, clip in combinations:
        if name == "lamb" and schedule in ("1cycle", "cyclic"):
            continue  # has no momentum to cycle
        step = result.train_step(
            F.cross_entropy, name, schedule=schedule, total_steps=9 if isinstance(schedule, str) else None,
            accumulate=accumulate, clip_norm=clip, ema=0.9,
        )  # fmt: skip
        report = fxspeed.audit(step, inputs, targets)
        assert report.ok and report.host_reads == 0 and report.device == "cuda:0", f"{name} {schedule}\n{report}"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_host_read(precision):
    """Optimizers, schedules, accumulation, clipping, precision with or without a scaler: nothing waits."""
    audit_combinations(precision, COMBINATIONS[PRECISIONS.index(precision) :: 7])


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_host_read_whatever_is_combined(precision):
    audit_combinations(precision, COMBINATIONS)


def test_an_optimizer_that_reads_is_found():
    result = fxspeed.optimize(Net(), x())
    report = fxspeed.audit(result.train_step(F.cross_entropy, "adafactor"), *batch())
    assert not report.ok and report.host_reads >= 6  # torch.optim.Adafactor asks for the norm of each parameter


def test_the_loss_of_the_user_is_audited_too():
    step = fxspeed.optimize(Net(), x()).train_step(
        lambda output, target: F.cross_entropy(output, target) * float(target.max()),  # loss
    )
    (finding,) = fxspeed.audit(step, *batch()).findings
    assert finding.kind == "host read" and finding.place == line("loss")


def test_leaves_no_trace():
    step = fxspeed.optimize(Net(), x()).train_step(
        F.cross_entropy, "sgd", momentum=0.9, schedule="1cycle", total_steps=5
    )
    inputs, targets = batch()
    step(inputs, targets)
    before = copy.deepcopy(step.state_dict())
    rng = torch.get_rng_state()
    entries = list(step.result.program.entries)
    fxspeed.audit(step, inputs, targets)
    after = step.state_dict()
    assert torch.equal(rng, torch.get_rng_state())
    assert step.result.program.entries == entries and step.device == torch.device("cpu")
    torch.testing.assert_close(after["module"], before["module"], rtol=0, atol=0)
    torch.testing.assert_close(after["optimizer"]["state"], before["optimizer"]["state"], rtol=0, atol=0)
    assert after["schedule"]["last_epoch"] == before["schedule"]["last_epoch"]
    assert after["optimizer"]["param_groups"] == before["optimizer"]["param_groups"]


def test_checkpointed_and_fused_graphs():
    model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))])
    result = fxspeed.optimize(model, torch.randn(256, 64), memory_budget=0.6)
    assert fxspeed.audit(result).ok
    assert fxspeed.audit(result.train_step(F.mse_loss), torch.randn(256, 64), torch.randn(256, 64)).ok


def test_debug_apis_are_listed():
    with torch.autograd.set_detect_anomaly(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = fxspeed.audit(Net(), x())
    assert any(f.kind == "debug API" and "anomaly" in f.what for f in report.findings) and not report.ok


def test_code_that_fails_on_a_fake_device_is_audited_under_its_own_name():
    class Kernel(Net):
        def forward(self, x):
            if x.is_cuda:
                raise RuntimeError("no such kernel")
            return super().forward(x) * x.sum().item()

    report = fxspeed.audit(Kernel(), x())
    assert report.device == "cpu" and report.host_reads == 1 and "no such kernel" in report.note


def test_prints_and_gives_plain_data():
    report = fxspeed.audit(Waits(), x())
    assert line("read") in str(report)
    data = report.to_dict()
    assert data["host_reads"] == report.host_reads and len(data["findings"]) == len(report.findings)
    assert "nothing makes the host wait" in str(fxspeed.audit(Net(), x()))


def test_bad_input():
    with pytest.raises(fxspeed.Error, match="needs inputs"):
        fxspeed.audit(Net())
    with pytest.raises(fxspeed.Error, match="not a int"):
        fxspeed.audit(3, x())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fxspeed.audit(Net(), torch.randn(2, 7))
