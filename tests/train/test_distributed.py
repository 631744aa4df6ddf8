"""Two and four gloo processes equal one process with all batches."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, multiprocessing, nn

import fxspeed


class Net(nn.Module):
    """Holds a parameter that no graph reads."""

    def __init__(self):
        super().__init__()
        self.a, self.n, self.b = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.idle = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.b(F.gelu(self.n(self.a(x)))) * self.scale


def model() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def data(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 6, generator=g).double(), torch.randint(0, 4, (4,), generator=g)) for _ in range(count)]


def _train(rank: int, world: int, folder: str, kind: str, flush: bool) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=world)
    result = fxspeed.optimize(model(), data(1)[0][0], precision="fp32")
    step = result.train_step(F.cross_entropy, lr=0.05, accumulate=2, clip_norm=0.5, distributed=kind)
    batches = data(4 * world)
    for batch in batches[rank::world]:
        step(*batch)
    if flush:  # one process has seen one micro-batch more than the others
        if rank == 0:
            step(*batches[1])
        step.flush()
    state = {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for n, p in result.module.named_parameters()
    }
    if rank == 0:
        torch.save(state, f"{folder}/state.pt")
    distributed.barrier()
    distributed.destroy_process_group()


def _alone(world: int, flush: bool) -> dict[str, torch.Tensor]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    batches = data(4 * world)
    groups = [batches[i : i + 2 * world] for i in range(0, 4 * world, 2 * world)]
    if flush:
        groups.append([batches[1]])
    for group in groups:
        optimizer.zero_grad()
        F.cross_entropy(net(torch.cat([x for x, _ in group])), torch.cat([y for _, y in group])).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    return {n: p.detach() for n, p in net.named_parameters()}


@pytest.mark.parametrize(
    ("world", "kind", "flush"),
    [
        (2, "auto", True),
        (2, "fsdp", False),
        pytest.param(4, "auto", True, marks=pytest.mark.slow),
        pytest.param(4, "fsdp", False, marks=pytest.mark.slow),
    ],
)
def test_processes_equal_one_with_all_batches(tmp_path: Path, world, kind, flush):
    multiprocessing.spawn(_train, (world, str(tmp_path), kind, flush), nprocs=world)
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    want = _alone(world, flush)
    assert found.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


def test_fsdp_asks_for_a_process_group_and_no_instance():
    assert not distributed.is_initialized() and "RANK" not in os.environ
    result = fxspeed.optimize(copy.deepcopy(model()), data(1)[0][0])
    with pytest.raises(fxspeed.Error, match="torchrun"):
        result.train_step(F.cross_entropy, distributed="fsdp")
    with pytest.raises(fxspeed.Error, match="not an instance"):
        result.train_step(F.cross_entropy, torch.optim.SGD(result.module.parameters(), lr=1), distributed="fsdp")
