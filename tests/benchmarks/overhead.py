"""What fxspeed adds around the tensors' own work: `python -m tests.benchmarks.overhead [--depths 4,16,64]`.

Three tables. Calls: a forward of the optimized module against the model it came from, tiny inputs, eval mode without
gradients, interleaved. Steps: `TrainStep` against a loop written by hand, the same optimizer. Capture: seconds of
`optimize` against the number of nodes, and its memory against a forward on fake tensors.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import time
import tracemalloc
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxspeed


class Chain(nn.Module):
    """`depth` blocks of seven operations: norm, linear, GELU by hand, residual."""

    def __init__(self, depth: int, width: int = 8):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear, norm in zip(self.linears, self.norms, strict=True):
            y = linear(norm(x))
            x = x + y * torch.sigmoid(y * 1.702)
        return x


def interleaved(calls: list[Callable[[], object]], rounds: int, each: int) -> list[float]:
    """Median microseconds of each call, measured in turns."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        for _ in range(each):
            call()
    for _ in range(rounds):
        for call, found in zip(calls, times, strict=True):
            begin = time.perf_counter()
            for _ in range(each):
                call()
            found.append((time.perf_counter() - begin) / each * 1e6)
    return [statistics.median(t) for t in times]


def calls() -> None:
    print(f"{'call':24}{'eager us':>10}{'fxspeed us':>12}{'ratio':>8}")
    images = torch.randn(2, 3, 8, 8)
    convolutional = nn.Sequential(
        *(m for c in (3, 8, 8) for m in (nn.Conv2d(c, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()))
    )
    for name, model, x in [
        ("Linear", nn.Linear(8, 8), torch.randn(2, 8)),
        ("4 blocks", Chain(4), torch.randn(2, 8)),
        ("24 blocks", Chain(24), torch.randn(2, 8)),
        ("3 conv-norm-relu", convolutional, images),
    ]:
        model.eval()
        module = fxspeed.optimize(model, x, passes=["drop_bias", "remove_syncs"], verify=False).module
        with torch.no_grad():
            eager, ours = interleaved([functools.partial(model, x), functools.partial(module, x)], 60, 100)
        print(f"{name:24}{eager:10.1f}{ours:12.1f}{ours / eager:8.3f}", flush=True)


def steps() -> None:
    print(f"\n{'step':24}{'by hand us':>10}{'fxspeed us':>12}{'ratio':>8}{'more us':>9}")
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    for name in ("sgd", "adamw"):
        model = Chain(2)
        mine = copy.deepcopy(model)
        kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name]
        result = fxspeed.optimize(model, x, passes=["remove_syncs"], verify=False)
        step = result.train_step(F.mse_loss, name, lr=1e-3, clip_norm=1.0, schedule="1cycle", total_steps=10**6)
        group = step.optimizer.param_groups[0]
        optimizer = kind(mine.parameters(), lr=1e-3, **{k: group[k] for k in ("fused", "foreach") if k in group})
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, 10**6)

        def by_hand(mine=mine, optimizer=optimizer, schedule=schedule):
            loss = F.mse_loss(mine(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(mine.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            return loss.detach()

        hand, ours = interleaved([by_hand, lambda step=step: step(x, y)], 60, 30)
        print(f"{name:24}{hand:10.1f}{ours:12.1f}{ours / hand:8.3f}{ours - hand:9.1f}", flush=True)


def capture(depths: list[int]) -> None:
    print(f"\n{'capture':>8}{'nodes':>8}{'seconds':>9}{'us/node':>9}{'peak MiB':>10}{'fake forward MiB':>18}")
    for depth in depths:
        model, x = Chain(depth), torch.randn(2, 8)
        begin = time.perf_counter()
        result = fxspeed.optimize(model, x, passes=["remove_syncs"], verify=False)
        seconds = time.perf_counter() - begin
        nodes = len(result.train_graph.graph.nodes)
        del result
        peaks = []
        for run in (
            lambda model=model, x=x: fxspeed.optimize(model, x, passes=["remove_syncs"], verify=False),
            lambda model=model, x=x: fake_forward(model, x),
        ):
            tracemalloc.start()
            kept = run()
            peaks.append(tracemalloc.get_traced_memory()[1] / 2**20)
            tracemalloc.stop()
            del kept
        print(
            f"{depth:8}{nodes:8}{seconds:9.2f}{seconds / nodes * 1e6:9.0f}{peaks[0]:10.1f}{peaks[1]:18.1f}", flush=True
        )


def fake_forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(p) for name, p in model.named_parameters()}
        return torch.func.functional_call(model, fakes, (mode.from_tensor(x),))


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.benchmarks.overhead", description=__doc__)
    parser.add_argument("--depths", default="8,32,128,512,1660")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32")
    calls()
    steps()
    capture([int(d) for d in options.depths.split(",")])


if __name__ == "__main__":
    main()
