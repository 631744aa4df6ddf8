"""Data-parallel training: DistributedDataParallel and fully_shard (FSDP2) around an optimized module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed, nn

from fxspeed.errors import Error
from fxspeed.graph.regions import used_parameters
from fxspeed.result import Optimized


class Parallel:
    """How a step runs in the process group. This class: alone, in one process.

    Attributes:
        model: what is called.
        why: a word for the settings.
    """

    name, why = "off", "no process group is up"

    def __init__(self, module: nn.Module):
        self.module = self.model = module

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Around the forward and backward of a micro-batch; gradients travel only on the last of an accumulation."""
        yield

    def flush(self, seen: int, items: float) -> float:
        """Make the gradients of an incomplete accumulation the same in all processes. Returns what to divide by.

        Args:
            seen: micro-batches of this process.
            items: their items, in the unit that the gradients are weighted in.
        """
        return items if seen else 0.0

    def agree(self, flag: torch.Tensor) -> None:
        """Set a flag (0 or 1) in place to 1 in all processes where it is 1 in any."""


class DDP(Parallel):
    name = "DDP"

    def __init__(self, result: Optimized, device: torch.device):
        super().__init__(result.module)
        unused = _unused(result)
        self.why = "a process group is up" + (f"; {len(unused)} parameters get no gradient" if unused else "")
        self.model: Any = nn.parallel.DistributedDataParallel(
            result.module,
            device_ids=[device.index] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            find_unused_parameters=bool(unused),
        )

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        with contextlib.nullcontext() if last else self.model.no_sync():
            yield

    def flush(self, seen: int, items: float) -> float:
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        device = parameters[0].device
        facts = torch.tensor([float(p.grad is not None) for p in parameters] + [items], device=device)
        distributed.all_reduce(facts)
        *present, total = facts.tolist()
        for parameter, count in zip(parameters, present, strict=True):
            if count:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                distributed.all_reduce(parameter.grad)
        return total


class FullyShard(Parallel):
    """Parameters, gradients and optimizer state in shards, one a process. The model's parameters become DTensors."""

    name, why = "fully_shard", "asked for; parameters and optimizer state are sharded over the processes"

    def __init__(self, result: Optimized):
        from torch.distributed.fsdp import fully_shard

        super().__init__(result.module)
        self.model: Any = fully_shard(result.module)

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        self.model.set_requires_gradient_sync(last)
        yield

    def flush(self, seen: int, items: float) -> float:
        raise Error(
            'flush() on an incomplete accumulation does not work with distributed="fsdp": gradients that have not been '
            "reduced are inside fully_shard; let the number of micro-batches be a multiple of accumulate"
        )

    def agree(self, flag: torch.Tensor) -> None:
        distributed.all_reduce(flag, distributed.ReduceOp.MAX)


def wrap(result: Optimized, distributed_option: str | None, device: torch.device) -> Parallel:
    """The process group's way to run a step.

    Raises:
        Error: "fsdp" without a process group.
    """
    up = distributed.is_available() and distributed.is_initialized()
    if distributed_option == "fsdp":
        if not up:
            raise Error(
                'distributed="fsdp" needs a process group: start with torchrun and call '
                "torch.distributed.init_process_group() first"
            )
        return FullyShard(result)
    return DDP(result, device) if up and distributed_option == "auto" else Parallel(result.module)


def _unused(result: Optimized) -> list[str]:
    """Trainable parameters that the training graph does not read; none where parts of the model stayed Python."""
    entries = [e for e in result.program.entries if e.trace.training]
    if result.program.eager or not entries:
        return []
    used = set().union(*(used_parameters(e.trace.graph, e.trace.constants, result.module) for e in entries))
    return [n for n, p in result.module.named_parameters() if p.requires_grad and id(p) not in used]
