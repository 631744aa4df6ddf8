"""Optimizers by name, class or instance."""

from __future__ import annotations

import difflib
import inspect
from typing import Any

import torch
from torch import nn

from fxspeed.errors import Error

_TORCH: dict[str, type[torch.optim.Optimizer]] = {
    name.lower(): cls
    for name, cls in vars(torch.optim).items()
    if inspect.isclass(cls)
    and issubclass(cls, torch.optim.Optimizer)
    and cls is not torch.optim.Optimizer
    and name != "LBFGS"
}
_EXTRA = {"lamb": "Lamb", "lars": "LARS"}


def build(
    optimizer: str | type[torch.optim.Optimizer] | torch.optim.Optimizer,
    module: nn.Module,
    lr: float,
    weight_decay: float | None,
    options: dict[str, Any],
    decay_norms: bool = True,
) -> tuple[torch.optim.Optimizer, str]:
    """The optimizer over the trainable parameters of `module`, and why it is built as it is.

    Classes that have a fused implementation for the parameters' device and dtype get it: one kernel for the whole
    step, and no read of the step count by the host.

    Without `decay_norms`, parameters of one dimension (biases, norm weights) are a group without weight decay.

    Raises:
        Error: unknown name or option; an instance over other parameters; a library that is not installed.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    if isinstance(optimizer, torch.optim.Optimizer):
        own = {id(p) for p in module.parameters()}
        stray = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
        if stray:
            raise Error(
                f"the optimizer holds {len(stray)} parameters that are not result.module's; build it over "
                "result.module.parameters(), or give its class or name"
            )
        return optimizer, "given as an instance"
    if not parameters:
        raise Error(f"{type(module).__name__} has no parameter that requires a gradient: nothing to train")
    cls: Any = _class(optimizer) if isinstance(optimizer, str) else optimizer
    if not inspect.isclass(cls) or torch.optim.Optimizer not in cls.__mro__:
        raise Error(f"optimizer {optimizer!r} is neither a name, a torch.optim.Optimizer class nor an instance of one")
    known = inspect.signature(cls.__init__).parameters
    arguments = {"lr": lr, **options}
    if weight_decay is not None:
        arguments["weight_decay"] = weight_decay
    make: Any = cls
    groups: Any = parameters
    if not decay_norms:
        matrices, vectors = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() <= 1]
        groups = [g for g in ({"params": matrices}, {"params": vectors, "weight_decay": 0.0}) if g["params"]]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
    for name in arguments:
        if name not in known and not takes_any:
            near = difflib.get_close_matches(name, known, 1)
            raise Error(f"{cls.__name__} has no option {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    why = "as asked for"
    if "fused" in known and not {"fused", "foreach", "capturable", "differentiable"} & set(options):
        try:
            return make(groups, **arguments, fused=True), "fused: one kernel a step, no host read"
        except (RuntimeError, ValueError):
            why = "foreach: no fused kernel for these parameters"
    made = make(groups, **arguments)
    if parameters[0].device.type == "cuda" and not {"capturable", "differentiable"} & set(options):
        count_on_device(made)
    return made, why


def count_on_device(optimizer: torch.optim.Optimizer) -> None:
    """Keep step counts on the device where the class can (torch calls it capturable): nothing of them is read."""
    for group in optimizer.param_groups:
        if "capturable" in group and not group.get("fused"):
            group["capturable"] = True


def _class(name: str) -> type[torch.optim.Optimizer]:
    key = name.lower()
    if key in _TORCH:
        return _TORCH[key]
    if key in _EXTRA:
        try:
            import pytorch_optimizer
        except ImportError:
            raise Error(f"optimizer {name!r} needs a library: pip install 'fxspeed[optim]'") from None
        return getattr(pytorch_optimizer, _EXTRA[key])
    near = difflib.get_close_matches(key, [*_TORCH, *_EXTRA], 1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(sorted([*_TORCH, *_EXTRA]))}"
    raise Error(f"unknown optimizer {name!r}; {hint}")
