"""ResNet-50 from timm in six tenths of the memory: optimize, look at the report, take a few training steps."""

import timm
import torch
import torch.nn.functional as F

import fxspeed


def main(size: int = 128, batch: int = 8, steps: int = 3) -> None:
    torch.manual_seed(0)
    model = timm.create_model("resnet50", num_classes=10)
    images, labels = torch.randn(batch, 3, size, size), torch.randint(0, 10, (batch,))
    result = fxspeed.optimize(model, images, memory_budget=0.6)
    print(result.report)
    step = result.train_step(F.cross_entropy, "sgd", lr=0.05, momentum=0.9, clip_norm=1.0)
    for i in range(steps):
        print(f"step {i}: loss {step(images, labels):.4f}")
    loss, output = step.evaluate(images, labels)
    print(f"eval: loss {loss:.4f}, logits {tuple(output.shape)}")


if __name__ == "__main__":
    main()
