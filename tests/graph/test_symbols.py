"""Sizes that are symbolic in the graph: what holds for every shape, and what is guarded."""

import copy
import math

import hypothesis
import hypothesis.strategies as st
import torch
import torch.nn.functional as F
from torch import nn

import fxspeed
from tests.compare import close, loss_of, run


def _pad_to(x, multiple):
    return F.pad(x, (0, 0, 0, -x.shape[1] % multiple))


def _causal(x):
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    scores = (x @ x.transpose(1, 2)).masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ x


def _positions(x):
    return x + torch.arange(x.shape[1], dtype=x.dtype)[:, None] / x.shape[1]


def _windows(x):
    padded = _pad_to(x, 4)
    b, t, d = padded.shape
    return padded.view(b, t // 4, 4, d).mean(2).repeat_interleave(4, 1)[:, : x.shape[1]]


def _branch(x):
    return x[:, : x.shape[1] // 2].repeat(1, 2, 1) if x.shape[1] % 2 == 0 else x.flip(1)


def _loop(x):
    total = x
    for i in range(min(x.shape[1], 3)):
        total = total + x[:, i : i + 1] / (i + 1)
    return total


def _halves(x):
    a, b = x.split([x.shape[1] // 3, x.shape[1] - x.shape[1] // 3], 1)
    return torch.cat([b, a], 1)


#: What models do with sizes; each maps (batch, length, 4) to some (batch, length', 4).
KINDS = {
    "scale": lambda x: x / math.sqrt(x.shape[1]),
    "flatten": lambda x: x.reshape(-1, x.shape[-1]).tanh().view(x.shape[0], -1, 4),
    "merge batch": lambda x: x.transpose(0, 1).reshape(x.shape[1], -1).view(x.shape[1], -1, 4).transpose(0, 1),
    "resize": lambda x: F.interpolate(x.transpose(1, 2), size=x.shape[1] * 2 - 1).transpose(1, 2),
    "pool": lambda x: F.adaptive_avg_pool1d(x.transpose(1, 2), (x.shape[1] + 1) // 2).transpose(1, 2),
    "stride": lambda x: x[:, ::2],
    "chunk": lambda x: torch.cat(x.chunk(2, 1), 1),
    "mean over batch": lambda x: x - x.sum(0, keepdim=True) / len(x),
    "positions": _positions,
    "pad": lambda x: _pad_to(x, 3),
    "causal": _causal,
    "windows": _windows,
    "branch": _branch,
    "loop": _loop,
    "halves": _halves,
}


class Shaped(nn.Module):
    def __init__(self, kinds):
        super().__init__()
        self.kinds = kinds
        self.weights = nn.ModuleList(nn.Linear(4, 4) for _ in kinds)

    def forward(self, x):
        for kind, linear in zip(self.kinds, self.weights, strict=True):
            x = KINDS[kind](linear(x))
        return x


sizes = st.tuples(st.integers(1, 5), st.integers(1, 12))


@hypothesis.settings(max_examples=20)
@hypothesis.given(
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4),
    first=st.tuples(st.integers(2, 5), st.integers(3, 12)),
    others=st.lists(sizes, min_size=1, max_size=4),
)
def test_no_shape_gives_a_wrong_result(kinds, first, others):
    """Shapes that were never seen, sizes of 1 among them: as eager, values, gradients and errors."""
    torch.manual_seed(0)
    model = Shaped(kinds).double()
    reference = copy.deepcopy(model)
    result = fxspeed.optimize(
        model, torch.randn(*first, 4).double(), dynamic=("batch", "sequence"), passes=["remove_syncs"], verify=False
    )
    for shape in [first, *others]:
        x = torch.randn(*shape, 4, dtype=torch.float64)
        try:
            want = run(reference, (x,))
        except (RuntimeError, ValueError, IndexError, ZeroDivisionError) as refused:
            try:
                run(result.module, (x,))
            except type(refused):
                continue
            raise AssertionError(f"eager refuses {shape}: {refused}") from refused
        got = run(result.module, (x,))
        close(want, got, 1e-12)
        gradients = [
            torch.autograd.grad(loss_of(y), list(m.parameters())) for y, m in ((want, reference), (got, result.module))
        ]
        close(*gradients, 1e-10)


def test_a_general_graph_is_not_traced_again():
    general = ["scale", "flatten", "positions", "causal", "mean over batch"]
    result = fxspeed.optimize(Shaped(general), torch.randn(3, 8, 4), dynamic=("batch", "sequence"))
    for shape in [(2, 8), (3, 5), (7, 11), (5, 64)]:
        result.module(torch.randn(*shape, 4))
    assert result.module._fxspeed.misses == 0
    assert not [s for s in result.skipped if s.pass_name == "capture"]


def test_what_specializes_is_guarded_and_reported():
    model = Shaped(["branch"])
    result = fxspeed.optimize(model, torch.randn(3, 8, 4), dynamic=("batch", "sequence"))
    for length in (6, 8, 7, 9):
        x = torch.randn(3, length, 4)
        close(model(x), result.module(x), 1e-6)
    assert result.module._fxspeed.misses == 1  # odd and even
    assert any("Mod(x.shape[1], 2) == 0" in s.why for s in result.skipped)


def test_a_static_dimension_is_captured_anew():
    model = Shaped(["scale"])
    result = fxspeed.optimize(model, torch.randn(3, 8, 4))  # the batch alone is dynamic
    x = torch.randn(3, 5, 4)
    close(model(x), result.module(x), 1e-6)
    assert result.module._fxspeed.misses == 1


def test_convolutions_are_one_graph_for_all_batches():
    """torch chooses another kernel for batches of 16 and more; the graph is the same."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, groups=4), nn.ConvTranspose2d(4, 2, 2), nn.Flatten())
    result = fxspeed.optimize(model, torch.randn(4, 3, 8, 8))
    for batch in (2, 15, 16, 40):
        x = torch.randn(batch, 3, 8, 8)
        close(model(x), result.module(x), 1e-6)
    assert result.program.misses == 0
