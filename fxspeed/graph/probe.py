"""What modules return in a real run, for those that tracing cannot open."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from fxspeed.errors import Untraceable
from fxspeed.graph.clone import plain_copy, without_hooks
from fxspeed.graph.inputs import Dim, describe
from fxspeed.graph.structure import map_objects, replace_tensors, text_of


@dataclasses.dataclass(frozen=True)
class Fact:
    """One tensor that a module returned, in a run with the example batch and in one with a batch one larger."""

    sizes: tuple[tuple[int, int, int], ...]  # for each dimension: slope and offset over the batch, size seen
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def fake(self, mode: Any, batch: Any) -> torch.Tensor:
        """A fake tensor like it, its sizes written over the symbolic batch size."""
        sizes = [seen if slope == 0 or batch is None else slope * batch + offset for slope, offset, seen in self.sizes]
        with mode:
            made = torch.empty(sizes, dtype=self.dtype, device=self.device)
        return made.requires_grad_() if self.requires_grad else made


class Probe:
    """Runs a copy of the model for real, at most once, and remembers what each call of each module returned."""

    def __init__(self, model: nn.Module, args: tuple, kwargs: dict[str, Any], dynamic: tuple[Dim, ...]):
        self.model, self.args, self.kwargs, self.dynamic = model, args, kwargs, dynamic
        self.runs: list[dict[tuple[str, int], Any]] | None = None

    def run(self) -> None:
        """Run with the example inputs, and once more with a batch one larger."""
        self.runs = [self._run(0), self._run(1)]

    def outputs(self, path: str, call: int) -> Any:
        """The nested output of the `call`-th call of the module at `path`, with a `Fact` for each tensor.

        Raises:
            Untraceable: the output is nothing a graph can take apart, or the module was not reached.
        """
        assert self.runs is not None
        first, second = (run.get((path, call)) for run in self.runs)
        if first is None:
            raise Untraceable(f"{path} was not reached in a real run")
        if second is not None and (now := text_of(first)) != (then := text_of(second)):
            raise Untraceable(f"{path} returns {now}, and for another batch size {then}")
        again: list[torch.Tensor] = []
        map_objects(second, again.append, torch.Tensor)
        left = iter(again)
        grow = self._batches()

        def fact(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                raise Untraceable(f"{path} returns a {type(value).__name__}")
            other = next(left, None)
            sizes = []
            for d, size in enumerate(value.shape):
                slope = 0
                if other is not None and grow is not None:
                    if other.dim() != value.dim():
                        raise Untraceable(f"{path} returns another number of dimensions for another batch size")
                    slope = other.shape[d] - size
                sizes.append((slope, size - slope * (grow or 0), size))
            return Fact(tuple(sizes), value.dtype, value.device, value.requires_grad)

        return map_objects(first, fact)

    def _batches(self) -> int | None:
        """The example batch size, where it may change."""
        if "batch" not in self.dynamic and 0 not in self.dynamic:
            return None
        sizes = [
            leaf.value.shape[0]
            for leaf in describe(self.model.forward, self.args, self.kwargs).tensors
            if leaf.value.dim()
        ]
        return sizes[0] if sizes and sizes[0] > 1 else None

    def _run(self, more: int) -> dict[tuple[str, int], Any]:
        calls: dict[str, int] = {}
        seen: dict[tuple[str, int], Any] = {}
        if more and self._batches() is None:
            return seen
        model = without_hooks(plain_copy(self.model, {}))

        def remember(path: str):
            def hook(_module, _inputs, output):
                calls[path] = calls.get(path, -1) + 1
                seen[path, calls[path]] = map_objects(
                    output, lambda t: t.detach().requires_grad_(t.requires_grad), torch.Tensor
                )

            return hook

        for path, module in model.named_modules():
            module.register_forward_hook(remember(path))

        def example(t: torch.Tensor) -> torch.Tensor:
            t = t.detach().clone().requires_grad_(t.requires_grad)
            return torch.cat([t, t[:1]]).detach().requires_grad_(t.requires_grad) if more and t.dim() else t

        inputs = [example(leaf.value) for leaf in describe(model.forward, self.args, self.kwargs).tensors]
        args, kwargs = replace_tensors((self.args, dict(self.kwargs)), iter(inputs))
        try:
            model(*args, **kwargs)
        except Exception as error:
            if not more:
                raise
            raise Untraceable(
                f"the model does not run with a batch one larger ({type(error).__name__}: {error})"
            ) from error
        return seen
