"""The training step against loops written by hand, in float64."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxspeed
from fxspeed.train.precision import Scaler


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.n, self.b = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x, scale=None):
        y = self.b(F.gelu(self.n(self.a(x))))
        return y if scale is None else y * scale


def data(steps: int, batch: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [
        (torch.randn(batch, 6, generator=g).double(), torch.randint(0, 3, (batch,), generator=g)) for _ in range(steps)
    ]


def start() -> tuple[nn.Module, fxspeed.Optimized]:
    torch.manual_seed(0)
    model = Net().double()
    return copy.deepcopy(model), fxspeed.optimize(model, data(1)[0][0])


def same(model: nn.Module, module: nn.Module, tol: float = 1e-9) -> None:
    for (name, p), q in zip(model.named_parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=tol, atol=tol, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", ["adamw", "sgd", "adam", "rmsprop", "adagrad"])
def test_equals_the_loop_written_by_hand(name, accumulate, clip):
    model, result = start()
    cls = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adam": torch.optim.Adam,
           "rmsprop": torch.optim.RMSprop, "adagrad": torch.optim.Adagrad}[name]  # fmt: skip
    extra = {"momentum": 0.9} if name == "sgd" else {}
    optimizer = cls(model.parameters(), lr=1e-2, weight_decay=0.1, **extra)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1e-2, total_steps=4, cycle_momentum=name in ("sgd", "adam", "adamw")
    )
    step = result.train_step(
        F.cross_entropy, name, lr=1e-2, weight_decay=0.1, schedule="1cycle", total_steps=4, accumulate=accumulate,
        clip_norm=clip, **extra,
    )  # fmt: skip
    batches = data(4 * accumulate)
    for i in range(4):
        some = batches[i * accumulate : (i + 1) * accumulate]
        x, y = torch.cat([b[0] for b in some]), torch.cat([b[1] for b in some])
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if i < 3:
            schedule.step()
        for b in some:
            loss = step(*b)
            assert loss.dim() == 0 and not loss.requires_grad
        assert all(p.grad is None for p in result.module.parameters())
    same(model, result.module)


def test_micro_batches_of_unlike_sizes_and_flush():
    model, result = start()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = result.train_step(F.cross_entropy, "sgd", lr=0.1, accumulate=4)
    batches = [*data(1, 5), *data(1, 3), *data(1, 2)]
    x, y = torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches])
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    for b in batches:
        step(*b)
    assert step.steps == 0
    step.flush()
    step.flush()
    assert step.steps == 1
    same(model, result.module)


def test_inputs_as_tuple_and_dict_and_instances_and_classes():
    for optimizer in (torch.optim.SGD, None):
        model, result = start()
        reference = torch.optim.SGD(model.parameters(), lr=0.1)
        made = optimizer or torch.optim.SGD(result.module.parameters(), lr=0.1)
        step = result.train_step(F.cross_entropy, made, lr=0.1)
        x, y = data(1)[0]
        for inputs in ((x, torch.tensor(2.0).double()), {"x": x, "scale": torch.tensor(2.0).double()}):
            reference.zero_grad()
            F.cross_entropy(model(x, 2.0), y).backward()
            reference.step()
            step(inputs, y)
        same(model, result.module)


def test_evaluate_changes_nothing():
    _, result = start()
    step = result.train_step(F.cross_entropy)
    result.module.n.eval()
    x, y = data(1)[0]
    before = copy.deepcopy(result.module.state_dict())
    loss, output = step.evaluate(x, y)
    assert output.is_inference() and float(loss) == pytest.approx(float(F.cross_entropy(output, y)))
    assert result.module.training and not result.module.n.training
    for name, value in result.module.state_dict().items():
        assert torch.equal(value, before[name])


def test_normalize_from_uint8():
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten(), nn.Linear(32, 3)).double()
    result = fxspeed.optimize(model, torch.randn(2, 3, 4, 4).double())
    mean, std = [0.4, 0.5, 0.6], [0.2, 0.3, 0.4]
    step = result.train_step(F.cross_entropy, normalize=(mean, std))
    raw, y = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8), torch.tensor([0, 1])
    plain = (raw.double() / 255 - torch.tensor(mean).double().view(3, 1, 1)) / torch.tensor(std).double().view(3, 1, 1)
    want = F.cross_entropy(model(plain), y)
    torch.testing.assert_close(step(raw, y), want.detach())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_resuming_equals_not_stopping(accumulate):
    batches = data(7)
    options = dict(lr=1e-2, schedule="1cycle", total_steps=9, accumulate=accumulate, clip_norm=1.0)
    _, whole = start()
    step = whole.train_step(F.cross_entropy, **options)
    for b in batches:
        step(*b)
    _, first = start()
    step1 = first.train_step(F.cross_entropy, **options)
    for b in batches[:3]:
        step1(*b)
    buffer = io.BytesIO()
    torch.save(step1.state_dict(), buffer)
    buffer.seek(0)
    _, second = start()
    step2 = second.train_step(F.cross_entropy, **options)
    step2.load_state_dict(torch.load(buffer, weights_only=True))
    for b in batches[3:]:
        step2(*b)
    same(whole.module, second.module, 0)
    assert step.optimizer.param_groups[0]["lr"] == step2.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("name", ["adamw", "rmsprop"])
def test_steps_that_are_not_finite_change_nothing_but_the_scaler(name):
    result = fxspeed.optimize(Net(), torch.randn(4, 6), precision="fp16")
    step = result.train_step(F.cross_entropy, name, lr=1e-2, schedule="1cycle", total_steps=10)
    assert isinstance(step.scaler, Scaler)
    x, y = data(1)[0]
    x = x.float()
    step(x, y)
    step(x, y)
    state = copy.deepcopy((result.module.state_dict(), step.optimizer.state_dict()["state"]))
    scale, rate = float(step.scaler.scale), step.optimizer.param_groups[0]["lr"]
    step(x * float("inf"), y)
    now = (result.module.state_dict(), step.optimizer.state_dict()["state"])
    for key, value in state[0].items():
        assert torch.equal(value, now[0][key]), key
    for i, values in state[1].items():
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(now[1][i][key])), key
    assert float(step.scaler.scale) == scale / 2 and step.skipped_steps == 1
    step.state_dict()
    later = step.optimizer.param_groups[0]["lr"]
    step(x, y)
    step.state_dict()
    assert step.optimizer.param_groups[0]["lr"] != later and later != rate
    assert step.schedule.last_epoch == 3  # three steps that counted


def test_bad_input_has_clear_errors():
    _, result = start()
    x, y = data(1)[0]
    cases = [
        (lambda: result.train_step(F.cross_entropy, "adamm"), "did you mean 'adam"),
        (lambda: result.train_step(F.cross_entropy, "adamw", betass=(0, 0)), "did you mean 'betas'"),
        (lambda: result.train_step(F.cross_entropy, torch.optim.SGD([nn.Parameter(x)], lr=1)), "not result.module's"),
        (lambda: result.train_step(F.cross_entropy, schedule="1cycle"), "total_steps"),
        (lambda: result.train_step(F.cross_entropy, schedule="2cycle"), "unknown"),
        (lambda: result.train_step(F.cross_entropy, ema=1.0), "ema"),
        (lambda: result.train_step(F.cross_entropy).evaluate(x, y, averaged=True), "ema="),
        (lambda: result.train_step(F.cross_entropy, accumulate=0), "accumulate"),
        (lambda: result.train_step(F.cross_entropy, clip_norm=-1.0), "clip_norm"),
        (lambda: result.train_step(F.cross_entropy, tune=True), "not built"),
        (lambda: result.train_step(F.cross_entropy, distributed="fsdp"), "process group"),
        (lambda: result.train_step(lambda o, t: o)(x, y), "scalar"),
        (lambda: result.train_step(lambda o, t: o.detach().mean())(x, y), "does not depend"),
        (lambda: result.train_step(F.cross_entropy).load_state_dict({}), "missing"),
    ]
    for call, word in cases:
        with pytest.raises(fxspeed.Error, match=word):
            call()
    step = result.train_step(F.cross_entropy, schedule="1cycle", total_steps=2)
    step(x, y), step(x, y)
    with pytest.raises(fxspeed.Error, match="total_steps=2"):
        step(x, y)


def test_settings_say_what_and_why():
    _, result = start()
    settings = {s.name: s for s in result.train_step(F.cross_entropy, clip_norm=1.0).settings}
    assert settings["optimizer"].value == "AdamW" and "fused" in settings["optimizer"].why
    assert settings["precision"].value == "float32" and settings["clip_norm"].value == 1.0
