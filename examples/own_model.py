"""A hand-written network with the habits that cost time and memory, before and after.

`python -m fxspeed examples/own_model.py --budget 0.6 --precision bf16` prints what fxspeed makes of it; run as a
script, it optimizes the network and compares the two.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

import fxspeed


class Block(nn.Module):
    """Convolution with a bias in front of BatchNorm, a GELU written out by hand, and a gate that no operator knows."""

    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.mix = nn.Conv2d(width, width, 1)

    def forward(self, x):
        y = self.norm(self.conv(x))
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        y = self.mix(y)
        return x + y * torch.sigmoid(1.702 * y)


class Net(nn.Module):
    def __init__(self, width: int = 32, depth: int = 6, classes: int = 10):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        mean = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1).to(x.device)
        x = self.stem(x - mean)
        for block in self.blocks:
            x = block(x)
        x = x / x.detach().norm(dim=1).mean().item()  # the host waits here for the device
        return F.log_softmax(self.head(self.drop(x.mean((2, 3)))), dim=-1)


torch.manual_seed(0)
model = Net()
example_inputs = (torch.randn(16, 3, 64, 64),)


def main() -> None:
    result = fxspeed.optimize(model, example_inputs, memory_budget=0.6)
    print(result.report)
    model.eval(), result.module.eval()
    with torch.no_grad():
        difference = (model(*example_inputs) - result.module(*example_inputs)).abs().max().item()
    print(f"largest difference of the outputs in eval mode: {difference:.1e}")


if __name__ == "__main__":
    main()
