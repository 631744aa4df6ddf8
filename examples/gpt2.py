"""GPT-2 from transformers, random weights: optimize with a budget, train a few steps on made-up text."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import fxspeed


def main(layers: int = 4, width: int = 128, steps: int = 5) -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=4, vocab_size=256, n_positions=128, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    tokens = (torch.arange(64).repeat(8, 1) * 3 + torch.arange(8).unsqueeze(1)) % 256
    result = fxspeed.optimize(model, kwargs={"input_ids": tokens, "labels": tokens}, memory_budget=0.6)
    print(result.report)
    step = result.train_step(
        lambda output: output.loss, "adamw", lr=3e-3, clip_norm=1.0, schedule="1cycle", total_steps=steps
    )
    for i in range(steps):
        print(f"step {i}: loss {step({'input_ids': tokens, 'labels': tokens}):.4f}")


if __name__ == "__main__":
    main()
