"""Memory budgets kept, and what they cost: `python -m tests.benchmarks.budgets [--models gpt,resnet50] [--time]`.

For each model and budget: the measured peak as a share of the plain step's, FLOPs against the plain step, and with
`--time` the step time against it, interleaved in one run.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fxspeed
from fxspeed.graph.structure import tensors_in
from tests.peak import step_peak
from tests.torchvision_import import import_torchvision


class Block(nn.Module):
    """A transformer block with norm and GELU written by hand."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale1, self.scale2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(norm(x) * self.scale1).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        h = self.up(norm(x) * self.scale2)
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        return x + self.down(h)


def norm(x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5)


class GPT(nn.Module):
    def __init__(self, depth: int = 4, width: int = 256, vocabulary: int = 1000):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(128, width))
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(norm(x))


def gpt() -> tuple[nn.Module, tuple]:
    return GPT(), (torch.randint(0, 1000, (8, 128)),)


def gpt2() -> tuple[nn.Module, tuple]:
    import_torchvision()
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=4, n_embd=256, n_head=4, vocab_size=1000, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    return GPT2LMHeadModel(config), (torch.randint(0, 1000, (8, 128)),)


def resnet50() -> tuple[nn.Module, tuple]:
    return import_torchvision().models.resnet50(), (torch.randn(8, 3, 128, 128),)


def vit() -> tuple[nn.Module, tuple]:
    import_torchvision()
    import timm

    return timm.create_model("vit_tiny_patch16_224", img_size=160), (torch.randn(16, 3, 160, 160),)


MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, tuple]], float]] = {
    "gpt": (gpt, 0.334),
    "gpt2": (gpt2, 0.31),
    "resnet50": (resnet50, 0.42),
    "vit": (vit, 0.16),
}


def backward(model: nn.Module, args: tuple) -> None:
    torch.stack([t.sum() for t in tensors_in(model(*args)) if t.requires_grad]).sum().backward()


def flops(model: nn.Module, args: tuple) -> int:
    with FlopCounterMode(display=False) as counter:
        backward(model, args)
    return counter.get_total_flops()


def times(models: list[nn.Module], args: tuple, rounds: int = 7) -> list[float]:
    """Median seconds of a forward and backward of each, interleaved."""
    found: list[list[float]] = [[] for _ in models]
    for _ in range(rounds):
        for model, times in zip(models, found, strict=True):
            begin = time.perf_counter()
            backward(model, args)
            times.append(time.perf_counter() - begin)
    return [statistics.median(t[1:]) for t in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--budgets", default="0.7,0.5,0.35")
    parser.add_argument("--time", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(2)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32")
    print(f"{'model':10}{'budget':>8}{'peak':>8}{'FLOPs':>8}{'time':>8}{'plan s':>8}")
    for name in options.models.split(","):
        make, by_hand = MODELS[name]
        torch.manual_seed(0)
        model, args = make()
        model.train()
        plain, work = step_peak(model, args), flops(model, args)
        for budget in [*map(float, options.budgets.split(",")), by_hand]:
            begin = time.perf_counter()
            try:
                result: Any = fxspeed.optimize(
                    model, args, memory_budget=budget, precision="fp32", verify=False, passes=["checkpoint"]
                )
            except fxspeed.BudgetError as error:
                print(f"{name:10}{budget:8.2f}  {str(error)[:100]}")
                continue
            seconds = time.perf_counter() - begin
            share = step_peak(result.module, args) / plain
            ratio = flops(result.module, args) / work
            took = ""
            if options.time:
                a, b = times([model, result.module], args)
                took = f"{b / a:.3f}"
            print(f"{name:10}{budget:8.2f}{share:8.3f}{ratio:8.3f}{took:>8}{seconds:8.1f}", flush=True)


if __name__ == "__main__":
    main()
