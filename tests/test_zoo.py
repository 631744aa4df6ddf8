"""A share of the public model zoos: eight small models always, about sixty with `-m zoo`."""

import random

import pytest

from tests.zoo.__main__ import SOURCES, run

SMALL = {
    "timm": ["mobilenetv3_small_050", "test_vit"],
    "torchvision": ["shufflenet_v2_x0_5"],
    "smp": ["Unet-resnet18"],
    "transformers": ["GemmaForCausalLM", "T5ForConditionalGeneration"],
    "diffusers": ["UNet2DConditionModel"],
    "torch-geometric": ["GATConv"],
}
#: How many of each source `-m zoo` runs.
SHARES = {
    **{"timm": 20, "torchvision": 8, "smp": 4, "transformers": 16},
    **{"diffusers": 4, "x-transformers": 5, "torch-geometric": 4},
}


def _models(source):
    if source in ("smp", "diffusers", "x-transformers", "torch-geometric"):
        pytest.importorskip(
            {"smp": "segmentation_models_pytorch", "torch-geometric": "torch_geometric"}.get(
                source, source.replace("-", "_")
            ),
            reason="of the zoo's libraries",
        )
    return dict(SOURCES[source]())


@pytest.mark.parametrize(("source", "name"), [(s, n) for s, names in SMALL.items() for n in names])
def test_a_small_model_is_captured_whole_and_equal(source, name):
    row = run(f"{source}/{name}", _models(source)[name])
    assert row.status == "whole", row


@pytest.mark.zoo
@pytest.mark.parametrize("source", SHARES)
def test_a_share_of_each_zoo_is_right(source):
    models = _models(source)
    names = random.Random(1).sample(sorted(models), min(SHARES[source], len(models)))
    rows = [run(f"{source}/{name}", models[name]) for name in names]
    print(*rows, sep="\n")
    assert not [row for row in rows if row.status in ("wrong", "error")]
    assert len([row for row in rows if row.status in ("whole", "skipped")]) >= 0.9 * len(rows), rows
