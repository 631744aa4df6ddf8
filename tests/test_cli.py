"""The command line: the diff on standard output and nothing else, one line for what cannot be done."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fxspeed.cli import main, parse_input

ROOT = Path(__file__).parent.parent
MODEL = """
import torch
from torch import nn

print("noise of the user's file")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        return self.bn(self.conv(x)).mean((2, 3))
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "net_in_a_file.py"
    path.write_text(MODEL)
    return path


def test_the_diff_and_nothing_else(file, capsys):
    assert main([f"{file}:Net", "--input", "2x3x8x8", "--train-step"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("--- before\n+++ after\n") and "bias=False" in out and "noise" not in out
    assert "drop_bias" in err and "noise" in err and "training step" in err


def test_the_only_candidate_and_example_inputs(file, capsys):
    file.write_text(MODEL + "\ndef example_inputs():\n    return (torch.randn(2, 3, 8, 8),)\n")
    assert main([str(file), "--color", "always"]) == 0
    assert "\x1b[32m+" in capsys.readouterr().out


def test_json(file, capsys):
    assert main([str(file), "--input", "2x3x8x8", "--json", "--no-verify"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["changes"][0]["target"] == "conv" and data["rolled_back"] == []


def test_inputs_from_a_file(file, tmp_path, capsys):
    torch.save({"x": torch.randn(2, 3, 8, 8)}, tmp_path / "inputs.pt")
    assert (
        main([str(file), "--inputs", str(tmp_path / "inputs.pt"), "--passes", "drop_bias,checkpoint{budget=1.0}"]) == 0
    )
    torch.save(torch.nn.Linear(1, 1), tmp_path / "bad.pt")  # no tensors: code would run
    capsys.readouterr()
    assert main([str(file), "--inputs", str(tmp_path / "bad.pt")]) == 2


def test_a_package(file, tmp_path, capsys):
    assert main([str(file), "--input", "2x3x8x8", "--save", str(tmp_path / "made" / "net")]) == 0
    assert (tmp_path / "made" / "net" / "weights.pt").exists() and capsys.readouterr().out.startswith("---")


def test_a_rolled_back_pass_is_exit_1(file, capsys, monkeypatch):
    from fxspeed import verify

    monkeypatch.setattr(verify, "same_in_float64", lambda before, after: "output 0 is off")
    assert main([str(file), "--input", "2x3x8x8"]) == 1
    assert "drop_bias failed verification" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["nowhere.py"], "no file"),
        (["{file}:Nett", "--input", "2x3x8x8"], "did you mean 'Net'"),
        (["{file}", "--input", "2x3xq"], "not understood"),
        (["{file}", "--input", "2x5x8x8"], "does not run on the example inputs"),
        (["{file}", "--input", "float33:2"], "no dtype"),
        (["{file}"], "no inputs"),
        (["{file}", "--input", "2x3x8x8", "--passes", "drop_bais"], "did you mean"),
        (["{file}", "--input", "2x3x8x8", "--budget", "much"], "budget"),
        (["{file}", "--input", "2x3x8x8", "--budget", "0.0001"], "smallest peak"),
        (["{file}", "--input", "2x3x8x8", "--precision", "fp8"], "precision"),
        (["{file}", "--input", "2x3x8x8", "--save", "no-name"], "no name of a Python package"),
        (["{file}", "--no-such-flag"], "unrecognized"),
        ([], "required"),
    ],
)
def test_what_cannot_be_done_is_one_line(file, arguments, word, capsys):
    assert main([a.format(file=file) for a in arguments]) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith("noise")]
    assert out == "" and len(lines) == 1 and word in lines[0]


def test_several_candidates_are_listed(file, capsys):
    file.write_text(MODEL + "\nfirst, second = Net(), Net()\n")
    assert main([str(file), "--input", "2x3x8x8"]) == 2
    assert "first, second" in capsys.readouterr().err


def test_inputs_as_text():
    name, tensor = parse_input("tokens=int64:8x128:0..50257")
    assert name == "tokens" and tensor.shape == (8, 128) and tensor.dtype is torch.int64 and int(tensor.max()) > 1000
    assert parse_input("float32:4:0..1")[1].min() >= 0 and parse_input("scalar")[1].dim() == 0


def test_six_passes_in_one_diff():
    command = [sys.executable, "-m", "fxspeed", "examples/own_model.py", "--budget", "0.6", "--precision", "bf16"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    native = "F.gelu(blocks_0_norm, approximate='tanh')"
    for trace in ("bias=False", "constant_0", native, "def fused_0", "def checkpoint_0", "autocast", "-    item = "):
        assert trace in done.stdout, trace
    assert done.stdout.startswith("--- before")
