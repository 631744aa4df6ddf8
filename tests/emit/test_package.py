"""Saved packages: they run where fxspeed is not, and train as the module they were written from."""

from __future__ import annotations

import ast
import copy
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxspeed
from tests.compare import close, doubled
from tests.zoo.language import transformers_models

#: Runs in a process of its own, in which fxspeed cannot be imported.
_ELSEWHERE = """
import sys
sys.modules["fxspeed"] = None
import torch
import saved
data = torch.load("data.pt", weights_only=True)
model = saved.load().train()
step = saved.TrainStep(model)
torch.manual_seed(0)
losses = [step(*batch) for batch in data["batches"]]
model.eval()
with torch.no_grad():
    output = model(*data["inputs"])
torch.save({"losses": losses, "state": model.state_dict(), "output": output}, "done.pt")
"""


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.gamma = nn.Parameter(torch.ones(width, 1, 1))
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, x):
        return x + self.gamma * F.relu(self.norm(self.conv(x))) * self.scale


class Net(nn.Module):
    """Blocks to recompute, a frozen norm, tied weights, a constant, dropout, a tuple."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.blocks = nn.ModuleList(Block(8) for _ in range(5))
        self.drop = nn.Dropout(0.2)
        self.self = nn.ModuleDict({"a-b": nn.Linear(8, 8)})  # names that are no identifiers, or worse
        self.head = nn.Linear(8, 8)
        self.head.weight = self.self["a-b"].weight
        self.stem[1].weight.requires_grad_(False)
        self.mean = torch.tensor([0.4, 0.5, 0.6]).view(1, 3, 1, 1)

    def forward(self, x):
        x = self.stem(x - self.mean.to(x.dtype) - torch.tensor(0.1, dtype=x.dtype))
        for block in self.blocks:
            x = block(x)
        x = self.drop(x.mean((2, 3)))
        return self.head(self.self["a-b"](x)), x


def loss_of_first(output, target):
    return F.cross_entropy(output[0], target)


def test_it_trains_the_same_where_fxspeed_is_not(tmp_path):
    torch.manual_seed(0)
    model, (x,) = doubled(Net(), (torch.randn(4, 3, 8, 8),))
    model.stem[1].eval()  # frozen statistics inside of a model that trains
    result = fxspeed.optimize(model, x, memory_budget=0.7)
    assert {"drop_bias", "checkpoint"} <= {c.pass_name for c in result.changes}
    step = result.train_step(loss_of_first, "adamw", lr=1e-2, accumulate=2, clip_norm=1.0)
    result.save(tmp_path / "saved")
    assert {p.name for p in (tmp_path / "saved").iterdir()} == {
        "__init__.py", "__main__.py", "model.py", "step.py", "recompute.py", "weights.pt",
    }  # fmt: skip
    batches = [(torch.randn(4, 3, 8, 8).double(), torch.randint(0, 8, (4,))) for _ in range(6)]
    torch.save({"batches": batches, "inputs": (x,)}, tmp_path / "data.pt")
    subprocess.run([sys.executable, "-c", _ELSEWHERE], cwd=tmp_path, check=True)
    done = torch.load(tmp_path / "done.pt", weights_only=True)
    torch.manual_seed(0)
    close([step(*batch) for batch in batches], done["losses"], 1e-9)
    close(result.module.state_dict(), done["state"], 1e-9)
    result.module.eval()
    with torch.no_grad():
        close(result.module(x), done["output"], 1e-9)


def test_main_trains_and_other_inputs_get_a_word(tmp_path):
    result = fxspeed.optimize(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(3, 4))
    result.save(tmp_path / "saved")
    run = [sys.executable, "-m", "saved"]
    printed = subprocess.run(run, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.splitlines()
    assert len(printed) == 3 and all(line.startswith("loss ") for line in printed)
    program = "import saved, torch; saved.load()(torch.randn(3, 5))"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith("ValueError: the graph was made for inputs of another kind")


def test_compiled_regions_and_autocast(tmp_path):
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            y = self.first(x)
            return self.last(0.5 * y * (1 + torch.tanh(0.79788456 * (y + 0.044715 * y**3))))

    result = fxspeed.optimize(
        Chain(), torch.randn(8, 64), passes="fuse_pointwise{min_saved=0},autocast".split(","), precision="bf16"
    )
    assert {"fuse_pointwise", "autocast"} <= {c.pass_name for c in result.changes}
    result.save(tmp_path / "saved")  # compares what was written with the module
    text = (tmp_path / "saved" / "model.py").read_text()
    assert "@compiled_by_inductor" in text and 'with torch.autocast("cpu", torch.bfloat16):' in text


def test_outputs_of_classes_that_are_not_there(tmp_path):
    class Pair(NamedTuple):
        first: torch.Tensor
        second: torch.Tensor

    class Paired(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            return Pair(self.fc(x), ~(x > 0))

    fxspeed.optimize(Paired(), torch.randn(2, 3)).save(tmp_path / "pairs")
    program = "import pairs; out = pairs.load()(*pairs.example()[0]); print(type(out).__name__, out.second.dtype)"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "Pair torch.bool\n"


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_language_models(name, tmp_path):
    make, inputs = dict(transformers_models())[name]
    model = make()
    args, kwargs = inputs(model)
    result = fxspeed.optimize(
        model, args, kwargs, passes=["remove_syncs", "checkpoint"], memory_budget=0.8, verify=False
    )
    result.save(tmp_path / "saved")
    run = [sys.executable, "-m", "saved"]
    printed = subprocess.run(run, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.splitlines()
    assert [line.split()[0] for line in printed] == ["loss"] * 3


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    class Own(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.fc, self.kind = nn.Linear(3, 3), kind

        def forward(self, x):
            x = self.fc(x)
            return Twice.apply(x) if self.kind == "function" else (x if x.sum() > 0 else -x)

    x = torch.randn(2, 3)
    hooked = Own("function")
    hooked.fc.register_forward_hook(lambda *_: None)
    for model, word in ((Own("function"), "autograd.Function"), (Own("branch"), "there is no"), (hooked, "hooks")):
        with pytest.raises(fxspeed.Error, match=word):
            fxspeed.optimize(model, x).save(tmp_path / "saved")
    good = fxspeed.optimize(nn.Linear(3, 3), x)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    for name, word in (("full", "is there already"), ("no-name", "no name of a Python package")):
        with pytest.raises(fxspeed.Error, match=word):
            good.save(tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == ["full"] and (tmp_path / "full" / "mine.txt").read_text() == "mine"


def test_the_source_is_python_that_reads_well(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    result = fxspeed.optimize(copy.deepcopy(model), torch.randn(2, 3, 6, 6))
    result.save(tmp_path / "saved")
    text = (tmp_path / "saved" / "model.py").read_text()
    imported = {n.module or "." for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom)}
    imported |= {a.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import) for a in n.names}
    assert imported == {"__future__", "pathlib", "torch"}
    assert "drop_bias: 0: bias dropped" in text and "nn.Conv2d(3, 4, 3, bias=False)" in text
    assert max(map(len, text.splitlines())) <= 120
