"""Every example runs, and does what it says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from tests.torchvision_import import import_torchvision

import_torchvision()
EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_have_a_test():
    assert {p.stem for p in EXAMPLES.glob("*.py")} == {"resnet50", "gpt2", "own_model", "train"}


def test_resnet50(capsys):
    load("resnet50").main(size=64, batch=4, steps=1)
    out = capsys.readouterr().out
    assert "checkpoint" in out and "step 0" in out and "eval: loss" in out


def test_gpt2(capsys):
    load("gpt2").main(layers=2, width=32)
    losses = [float(line.rsplit(" ", 1)[1]) for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert len(losses) == 5 and losses[-1] < losses[0]


def test_own_model(capsys):
    load("own_model").main()
    out = capsys.readouterr().out
    assert "drop_bias" in out and "largest difference" in out


def test_train_falls_and_resumes_as_if_never_stopped():
    example = load("train")
    found = example.main(epochs=4)
    assert found["losses"][-1] < found["losses"][0] / 3 and found["accuracy"] > 0.9
    step = example.new_step(4)
    example.train(step, range(4))
    for name, value in step.state_dict()["module"].items():
        assert torch.equal(value, found["state"][name]), name
