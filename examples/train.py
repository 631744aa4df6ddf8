"""A whole training run on scikit-learn's handwritten digits, stopped half-way and resumed from its checkpoint."""

import os
import tempfile

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import fxspeed


def network() -> nn.Module:
    def block(inside: int, outside: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU())

    return nn.Sequential(block(1, 16), block(16, 32), nn.MaxPool2d(2), block(32, 32), nn.Flatten(), nn.Linear(512, 10))


def batches(epoch: int, size: int = 128) -> list[tuple[torch.Tensor, torch.Tensor]]:
    digits = load_digits()
    images = torch.as_tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.as_tensor(digits.target)
    order = torch.randperm(1500, generator=torch.Generator().manual_seed(epoch))
    return [(images[i], labels[i]) for i in order.split(size)]


def held_out() -> tuple[torch.Tensor, torch.Tensor]:
    digits = load_digits()
    return torch.as_tensor(digits.images[1500:], dtype=torch.float32).unsqueeze(1) / 16, torch.as_tensor(
        digits.target[1500:]
    )


def new_step(epochs: int) -> fxspeed.TrainStep:
    torch.manual_seed(0)
    result = fxspeed.optimize(network(), torch.randn(128, 1, 8, 8))
    return result.train_step(
        F.cross_entropy, "adamw", lr=1e-2, schedule="1cycle", total_steps=epochs * len(batches(0)), clip_norm=1.0
    )


def train(step: fxspeed.TrainStep, epochs: range) -> list[float]:
    losses = []
    for epoch in epochs:
        total = torch.zeros(())
        for images, labels in batches(epoch):
            total += step(images, labels)
        losses.append(float(total) / len(batches(epoch)))
        print(f"epoch {epoch}: loss {losses[-1]:.4f}")
    return losses


def main(epochs: int = 6) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "checkpoint.pt")
        step = new_step(epochs)
        losses = train(step, range(epochs // 2))
        torch.save(step.state_dict(), path)
        print("stopped, resumed")
        step = new_step(epochs)
        step.load_state_dict(torch.load(path, weights_only=True))
        losses += train(step, range(epochs // 2, epochs))
    images, labels = held_out()
    loss, output = step.evaluate(images, labels)
    accuracy = (output.argmax(1) == labels).float().mean()
    print(f"held out: loss {loss:.4f}, accuracy {accuracy:.3f}")
    return {"losses": losses, "accuracy": float(accuracy), "state": step.state_dict()["module"]}


if __name__ == "__main__":
    main()
