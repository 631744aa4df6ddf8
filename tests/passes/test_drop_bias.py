"""drop_bias: fires where the norm cancels the bias, nowhere else, and finds the way back."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxspeed
from tests.compare import assert_same, close, doubled, run

ONLY = {"passes": ["drop_bias"]}


def trained(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if getattr(module, "running_mean", None) is not None:
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model


def check(model: nn.Module, x: torch.Tensor) -> fxspeed.Optimized:
    model, (x,) = doubled(trained(model), (x,))
    return assert_same(model, (x,), **ONLY)


@pytest.mark.parametrize(
    ("layer", "norm", "shape"),
    [
        (nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), (3, 2, 6)),
        (nn.Conv2d(2, 4, 3, groups=2), nn.BatchNorm2d(4, affine=False), (3, 2, 6, 6)),
        (nn.Conv3d(2, 4, 3), nn.BatchNorm3d(4, momentum=None), (3, 2, 4, 4, 4)),
        (nn.ConvTranspose2d(2, 4, 3, 2, 1, 1), nn.BatchNorm2d(4), (3, 2, 4, 4)),
        (nn.Conv2d(2, 4, 3), nn.SyncBatchNorm(4), (3, 2, 6, 6)),
        (nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (3, 2, 6, 6)),
        (nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), (3, 2, 6, 6)),
        (nn.Linear(5, 4), nn.BatchNorm1d(4), (6, 5)),
    ],
)
def test_fires(layer, norm, shape):
    if isinstance(norm, nn.SyncBatchNorm):
        pytest.skip("SyncBatchNorm runs on a GPU only")
    result = check(nn.Sequential(layer, norm, nn.ReLU()), torch.randn(shape))
    assert "0.bias" not in dict(result.module.named_parameters())
    assert [c.target for c in result.changes] == ["0"]


class Skip(nn.Module):
    def __init__(self, forward, **parts):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        for name, part in parts.items():
            setattr(self, name, part)
        self.body = forward

    def forward(self, x):
        return self.body(self, x)


@pytest.mark.parametrize(
    ("forward", "parts", "reason"),
    [
        (lambda s, x: s.bn(y := s.conv(x)) + y, {}, "reads its result too"),
        (lambda s, x: s.bn(s.conv(x)) + s.conv.bias.sum(), {}, "read elsewhere"),
        (lambda s, x: s.bn(s.conv(x)) + s.bn(s.other(x)), {"other": nn.Conv2d(2, 4, 1)}, "several layers"),
        (lambda s, x: s.bn(s.conv(x)) * s.bn.running_mean.sum(), {}, ""),
    ],
)
def test_refuses(forward, parts, reason):
    result = check(Skip(forward, **parts), torch.randn(3, 2, 5, 5))
    if reason:
        assert "conv.bias" in dict(result.module.named_parameters())
        assert any(reason in s.why for s in result.skipped)


def test_refuses_other_norms_activations_between_and_other_axes():
    models = [
        (nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)), (3, 2, 5, 5)),
        (nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.BatchNorm2d(4)), (3, 2, 5, 5)),
        (nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(4)), (3, 4, 5)),
    ]
    for model, shape in models:
        assert "0.bias" in dict(check(model, torch.randn(shape)).module.named_parameters())


def test_refuses_frozen_shared_and_hooked():
    class Frozen(Skip):
        def train(self, mode=True):
            super().train(mode)
            self.bn.eval()
            return self

    frozen = Frozen(lambda s, x: s.bn(s.conv(x))).train()
    shared = Skip(lambda s, x: s.bn(s.conv(x)) + s.other(x), other=nn.Conv2d(2, 4, 3, padding=1))
    shared.other.bias = shared.conv.bias
    for model, word in ((frozen, "frozen"), (shared, "shared")):
        result = check(model, torch.randn(3, 2, 5, 5))
        assert any(word in s.why for s in result.skipped)
    hooked = Skip(lambda s, x: s.bn(s.conv(x)))
    hooked.conv.register_forward_hook(lambda m, i, o: o * m.bias.sum())
    assert "conv.bias" in dict(check(hooked, torch.randn(3, 2, 5, 5)).module.named_parameters())


def test_functional_norm_as_libraries_write_it():
    def forward(self, x):
        y = self.conv(x)
        self.bn.num_batches_tracked.add_(1)
        return F.batch_norm(
            y, self.bn.running_mean, self.bn.running_var, self.bn.weight, self.bn.bias, self.training, 0.1, 1e-5
        )

    result = check(Skip(forward), torch.randn(3, 2, 5, 5))
    assert "conv.bias" not in dict(result.module.named_parameters())


def test_one_layer_before_two_norms():
    result = check(
        Skip(lambda s, x: s.bn(s.conv(x)) + s.bn2(s.conv(x * 2)), bn2=nn.BatchNorm2d(4)), torch.randn(3, 2, 5, 5)
    )
    assert "conv.bias" not in dict(result.module.named_parameters())


def test_state_dict_goes_both_ways():
    model = trained(nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)))
    result = fxspeed.optimize(model, torch.randn(3, 2, 5, 5), **ONLY)
    other = trained(nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)))
    result.load_original_state_dict(other.state_dict())
    x = torch.randn(2, 2, 5, 5)
    other.eval(), result.module.eval()
    close(run(other, (x,)), run(result.module, (x,)), 1e-5)
    back = result.original_state_dict()
    assert list(back) == list(other.state_dict())
    for name, value in other.state_dict().items():
        torch.testing.assert_close(back[name], value, rtol=1e-6, atol=1e-6)
    with pytest.raises(fxspeed.Error, match="state dict"):
        result.load_original_state_dict({"0.weight": torch.zeros(1)})


def test_the_users_model_is_untouched_in_place_too():
    model = trained(nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)))
    before = copy.deepcopy(model.state_dict())
    result = fxspeed.optimize(model, torch.randn(3, 2, 5, 5), inplace=True, **ONLY)
    assert result.module[0].weight is model[0].weight
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_golden(golden):
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    golden("drop_bias.diff", fxspeed.optimize(model, torch.randn(3, 2, 5, 5), **ONLY).diff())
