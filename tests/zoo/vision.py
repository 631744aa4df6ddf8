"""All of timm and torchvision, and segmentation_models_pytorch, with random weights."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.torchvision_import import import_torchvision
from tests.zoo.check import Example, Inputs, Unfit

#: Parameters, with gradients and a copy of both, that leave room in 24 GiB.
MOST = 700_000_000
#: Smaller images pass on the meta device only.
_WHOLE_SIZE = ("mvitv2",)


def timm_models() -> Iterator[tuple[str, Example]]:
    """All of timm, one of each architecture family first. Image sizes are the smallest that a model takes."""
    import_torchvision()
    import timm

    families: dict[str, list[str]] = {}
    for name in timm.list_models():
        families.setdefault(timm.models.model_entrypoint(name).__module__, []).append(name)
    rounds = itertools.zip_longest(*families.values())
    for name in (n for names in rounds for n in names if n is not None):

        def make(name: str = name) -> nn.Module:
            options, size = _timm_size(name)
            model = timm.create_model(name, **options)
            model.zoo_size = size
            return model

        def inputs(model: nn.Module) -> Inputs:
            return (torch.randn(2, *model.zoo_size),), {}

        yield name, (make, inputs)


def _timm_size(name: str) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Options and input size of a timm model, tried on the meta device."""
    import timm

    with torch.device("meta"):
        model = timm.create_model(name)
        if (count := sum(p.numel() for p in model.parameters())) > MOST:
            raise Unfit(f"{count / 1e6:.0f} million parameters")
        channels, *_ = size = model.default_cfg.get("input_size", (3, 224, 224))
        if not model.default_cfg.get("fixed_input_size") and _runs(model, torch.empty(2, channels, 96, 96)):
            return {}, (channels, 96, 96)
        for side in () if name.startswith(_WHOLE_SIZE) else (112, 128, 192):
            try:
                small = timm.create_model(name, img_size=side)
            except Exception:
                continue
            if _runs(small, torch.empty(2, channels, side, side)):
                return {"img_size": side}, (channels, side, side)
        if not model.default_cfg.get("fixed_input_size") and _runs(model, torch.empty(2, channels, 128, 128)):
            return {}, (channels, 128, 128)
    return {}, tuple(size)


def torchvision_models() -> Iterator[tuple[str, Example]]:
    """Classification, segmentation, video, detection and optical flow."""
    torchvision = import_torchvision()
    for name in torchvision.models.list_models():

        def make(name: str = name) -> nn.Module:
            builder = torchvision.models.get_model_builder(name)
            extra = {"weights_backbone": None} if "weights_backbone" in builder.__annotations__ else {}
            with torch.device("meta"), contextlib.suppress(NotImplementedError):  # RegNet reads a number as it is built
                count = sum(p.numel() for p in torchvision.models.get_model(name, weights=None, **extra).parameters())
                if count > MOST:
                    raise Unfit(f"{count / 1e6:.0f} million parameters")
            return torchvision.models.get_model(name, weights=None, **extra)

        def inputs(model: nn.Module, name: str = name) -> Inputs:
            kind = type(model).__module__
            if ".detection" in kind:
                boxes = torch.tensor([[4.0, 4.0, 60.0, 60.0]])
                target = {"boxes": boxes, "labels": torch.tensor([1]), "masks": torch.ones(1, 96, 96, dtype=torch.uint8),
                          "keypoints": torch.ones(1, 17, 3)}  # fmt: skip
                return ([torch.rand(3, 96, 96) for _ in range(2)], [dict(target) for _ in range(2)]), {}
            if ".video" in kind:
                side = (16, 224, 224) if any(n in name for n in ("mvit", "swin", "s3d")) else (8, 64, 64)
                return (torch.randn(2, 3, *side),), {}
            if ".optical_flow" in kind:
                return (torch.randn(2, 3, 128, 128), torch.randn(2, 3, 128, 128)), {"num_flow_updates": 2}
            for size in (96, 224, 299, 384, 518):
                if _runs(model, torch.randn(2, 3, size, size)):
                    return (torch.randn(2, 3, size, size),), {}
            return (torch.randn(2, 3, 224, 224),), {}

        yield name, (make, inputs)


def segmentation_models() -> Iterator[tuple[str, Example]]:
    """Each decoder of segmentation_models_pytorch, on one or two encoders."""
    import_torchvision()
    import segmentation_models_pytorch as smp

    kinds = ("Unet", "UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet", "PAN", "DeepLabV3", "DeepLabV3Plus", "UPerNet", "Segformer")  # fmt: skip
    for kind, encoder in [
        *((k, "resnet18") for k in kinds),
        ("Unet", "timm-mobilenetv3_small_100"),
        ("Unet", "mit_b0"),
    ]:

        def make(kind: str = kind, encoder: str = encoder) -> nn.Module:
            return getattr(smp, kind)(encoder, encoder_weights=None, in_channels=3, classes=2)

        side = 128 if kind == "PAN" else 64
        yield f"{kind}-{encoder}", (make, lambda _, side=side: ((torch.randn(2, 3, side, side),), {}))


def _runs(model: nn.Module, x: torch.Tensor) -> bool:
    """Whether a copy of the model runs on `x`, on the meta device."""
    try:
        with torch.no_grad(), torch.device("meta"):
            copy.deepcopy(model).to("meta")(x.to("meta"))
        return True
    except Exception:
        return False
