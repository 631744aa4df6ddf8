"""Real models from timm, torchvision and transformers, whole: train, eval, another batch, five training steps."""

from __future__ import annotations

import copy

import pytest
import torch

import fxspeed
from fxspeed.graph.structure import tensors_in
from tests.compare import close, larger, run
from tests.torchvision_import import import_torchvision

torchvision = import_torchvision()
timm = pytest.importorskip("timm")
tf = pytest.importorskip("transformers")
tf.logging.set_verbosity_error()

_SMALL = dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, intermediate_size=64, vocab_size=100)
_T5 = dict(
    num_layers=2, d_model=64, d_ff=64, num_heads=4, d_kv=16, vocab_size=100, decoder_start_token_id=0, pad_token_id=0
)


def ids() -> torch.Tensor:
    return torch.randint(1, 90, (2, 16), generator=torch.Generator().manual_seed(0))


def image(size: int) -> torch.Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))


MODELS = {
    "resnet50": (lambda: timm.create_model("resnet50", num_classes=10), lambda: {"x": image(64)}),
    "mobilenetv3": (lambda: timm.create_model("mobilenetv3_large_100", num_classes=10), lambda: {"x": image(64)}),
    "convnext": (lambda: timm.create_model("convnext_tiny", num_classes=10), lambda: {"x": image(64)}),
    "swin": (
        lambda: timm.create_model("swin_tiny_patch4_window7_224", num_classes=10, img_size=112),
        lambda: {"x": image(112)},
    ),
    "densenet121": (lambda: torchvision.models.densenet121(num_classes=10), lambda: {"x": image(64)}),
    "deeplabv3": (
        lambda: torchvision.models.segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=5),
        lambda: {"x": image(64)},
    ),
    "gpt2": (
        lambda: tf.GPT2LMHeadModel(
            tf.GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=100, bos_token_id=1, eos_token_id=1)
        ),
        lambda: {"input_ids": ids(), "labels": ids()},
    ),
    "bert": (
        lambda: tf.BertForSequenceClassification(tf.BertConfig(**_SMALL)),
        lambda: {"input_ids": ids(), "attention_mask": (ids() > 20).long(), "labels": torch.tensor([0, 1])},
    ),
    "llama": (lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_SMALL)), lambda: {"input_ids": ids(), "labels": ids()}),
    "t5": (lambda: tf.T5ForConditionalGeneration(tf.T5Config(**_T5)), lambda: {"input_ids": ids(), "labels": ids()}),
    "vit": (
        lambda: tf.ViTForImageClassification(tf.ViTConfig(**_SMALL, image_size=32, patch_size=8)),
        lambda: {"pixel_values": image(32)},
    ),
}


def loss_of(output) -> torch.Tensor:
    return torch.stack([t.float().square().mean() for t in tensors_in(output) if t.requires_grad]).sum()


@pytest.mark.parametrize("name", MODELS)
def test_model(name):
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model, kwargs = make().train(), inputs()
    args = (kwargs.pop("x"),) if "x" in kwargs else ()
    result = fxspeed.optimize(model, args, kwargs)
    module = result.module
    assert not result.broken and not result.program.eager
    assert not [s for s in result.skipped if s.pass_name == "capture"], result.report
    tol = 1e-4
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-4, fused=True)
    step = result.train_step(loss_of, "adamw", lr=1e-4)
    for i in range(5):
        torch.manual_seed(i)
        want = loss_of(reference(*args, **kwargs))
        optimizer.zero_grad()
        want.backward()
        optimizer.step()
        torch.manual_seed(i)
        got = step(args or kwargs)
        torch.testing.assert_close(got, want.detach(), rtol=tol, atol=tol)
    for (key, p), q in zip(reference.named_parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-3, atol=1e-3, msg=lambda m, key=key: f"{key}: {m}")
    reference.load_state_dict(result.original_state_dict())
    reference.eval(), module.eval()
    with torch.no_grad():
        close(run(reference, args, kwargs), run(module, args, kwargs), tol)
        more_args, more = larger((args, kwargs))
        close(run(reference, more_args, more), run(module, more_args, more), tol)
    assert result.program.misses == 0, "another batch size was captured anew"
