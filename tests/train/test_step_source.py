"""The step as text: it trains as the step it was written from, in float64."""

from __future__ import annotations

import copy
import functools
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxspeed
from tests.compare import close
from tests.train.test_step import data, start


def decayed(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


_OPTIONS = [
    {},
    {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1, "lr": 0.1},
    {"optimizer": torch.optim.Adam, "betas": (0.8, 0.9), "clip_norm": 0.1},
    {"schedule": "1cycle", "total_steps": 6, "accumulate": 2, "clip_norm": 1.0},
    {"schedule": "cyclic", "total_steps": 20, "optimizer": "sgd", "momentum": 0.8},
    {"schedule": decayed, "decay_norms": False, "weight_decay": 0.3},
    {"ema": 0.9, "accumulate": 3},
    {"optimizer": "rmsprop", "centered": True},
]


def made(step, result):
    """The written step, on a copy of the module."""
    space: dict = {"__name__": "written"}
    exec(compile(step.source, "<written>", "exec"), space)
    return space["TrainStep"](copy.deepcopy(result.module))


@pytest.mark.parametrize("options", _OPTIONS, ids=lambda o: "-".join(map(str, o)) or "defaults")
def test_it_trains_the_same(options):
    _, result = start()
    step = result.train_step(F.cross_entropy, **options)
    written = made(step, result)
    for x, y in data(7):
        close(step(x, y), written(x, y), 1e-12)
    if step.accumulate > 1:
        step.flush(), written.flush()
    close(result.module.state_dict(), written.model.state_dict(), 1e-12)
    if step.average is not None:
        close(step.average.weights, written.average.weights, 1e-12)
    x, y = data(1)[0]
    close(step.evaluate(x, y), written.evaluate(x, y), 1e-12)
    assert written.model.training


def test_float16_scaler_skips_the_same_steps():
    torch.manual_seed(0)
    result = fxspeed.optimize(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)), torch.randn(4, 6), precision="fp16")
    step = result.train_step(F.cross_entropy, schedule="1cycle", total_steps=9, accumulate=2)
    written = made(step, result)
    for n, (x, y) in enumerate(data(10)):
        x = x.float() * (float("inf") if n == 4 else 1)
        close(step(x, y), written(x, y), 0)
    assert step.skipped_steps == int(written.scaler.skipped) == 1
    close(result.module.state_dict(), written.model.state_dict(), 0)


def test_images_are_normalized():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 3)).double()
    result = fxspeed.optimize(model, torch.randn(2, 3, 6, 6).double())
    step = result.train_step(F.cross_entropy, normalize=([0.4, 0.5, 0.6], [0.2, 0.2, 0.3]))
    written = made(step, result)
    for _ in range(2):
        x, y = torch.randint(0, 256, (2, 3, 6, 6), dtype=torch.uint8), torch.tensor([0, 2])
        close(step(x, y), written(x, y), 1e-12)
    close(result.module.state_dict(), written.model.state_dict(), 1e-12)


def squared(output, target):
    return (output - F.one_hot(target, 3)).square().mean()


def helped(output, target):
    return squared(output, target)


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (F.cross_entropy, "loss_fn = F.cross_entropy"),
        (nn.CrossEntropyLoss(label_smoothing=0.1), "loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)"),
        (functools.partial(F.cross_entropy, label_smoothing=0.1), "functools.partial(F.cross_entropy, label_smoothing"),
        (squared, "def squared(output, target):"),
        (lambda o, t: F.cross_entropy(o * 2, t), "def loss_fn(o, t):\n    return F.cross_entropy(o * 2, t)"),
        (helped, "Stands for your loss (helped)"),
    ],
)
def test_the_loss_is_written_or_said_to_be_missing(loss, text):
    _, result = start()
    step = result.train_step(loss)
    step(*data(1)[0])
    assert text in step.source
    written = made(step, result)
    x, y = data(2)[1]
    if "Stands for" not in text:
        close(step(x, y), written(x, y), 1e-12)
    else:
        assert torch.isfinite(written(x, y))


def test_what_cannot_be_written_says_so():
    class Own(torch.optim.SGD):
        pass

    _, result = start()
    factor = 0.5
    cases = [
        ({"optimizer": Own}, "optimizer Own is a class of yours"),
        ({"schedule": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, gamma=factor)}, "schedule is a function"),
    ]
    for options, word in cases:
        with pytest.raises(fxspeed.Error, match=word):
            _ = result.train_step(F.cross_entropy, **options).source


def test_every_combination_is_python():
    _, result = start()
    choices = itertools.product(("sgd", "adamw"), (None, "1cycle"), (1, 2), (None, 1.0), (None, 0.9), (True, False))
    with warnings.catch_warnings():
        warnings.simplefilter("error", SyntaxWarning)
        for optimizer, schedule, accumulate, clip, ema, decay_norms in choices:
            step = result.train_step(
                F.cross_entropy, optimizer, schedule=schedule, total_steps=5, accumulate=accumulate, clip_norm=clip,
                ema=ema, decay_norms=decay_norms,
            )  # fmt: skip
            compile(step.source, "<written>", "exec")
