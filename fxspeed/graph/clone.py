"""A copy of the user's model whose tensors are fake: capture runs this one, so nothing of the user's can change."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode

from fxspeed.errors import Untraceable

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


#: Libraries whose hooks are part of their models: transformers collects hidden states and attentions with them.
_LIBRARIES = ("transformers.",)


def is_users(hook: Any) -> bool:
    """Whether a hook is the user's rather than part of how a library's models work."""
    return not str(getattr(hook, "__module__", "")).startswith(_LIBRARIES)


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of the user's."""
    return any(is_users(hook) for hooks in HOOKS for hook in getattr(module, hooks).values())


def plain_view(module: nn.Module) -> nn.Module:
    """An optimized module as its user's class sees it; the tensors and children are the same."""
    original = getattr(module, "_fxspeed_class", None)
    if original is None:
        return module
    view = original.__new__(original)
    view.__dict__.update({k: v for k, v in module.__dict__.items() if k != "_fxspeed"})
    return view


def plain_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy of a model in which optimized modules are of their users' classes again."""
    programs = [p for m in module.modules() if (p := vars(m).get("_fxspeed")) is not None]
    memo.update((id(p), None) for p in programs)
    copied = copy.deepcopy(module, memo)
    for each in copied.modules():
        if "_fxspeed" in vars(each):
            del each.__dict__["_fxspeed"]
            each.__class__ = each._fxspeed_class
    for p in programs:
        del memo[id(p)]
    return copied


def without_hooks(copied: nn.Module) -> nn.Module:
    """A private copy of a model with the user's hooks gone: what they do must not happen now."""
    for module in copied.modules():
        for hooks in HOOKS:
            found = getattr(module, hooks)
            for key in [k for k, hook in found.items() if is_users(hook)]:
                del found[key]
    return copied


def _is_plain(parameter: nn.Parameter) -> bool:
    return (
        type(parameter) is nn.Parameter and type(parameter.data) is torch.Tensor and parameter.layout is torch.strided
    )


def _fake(parameter: nn.Parameter, fake_mode: FakeTensorMode) -> torch.Tensor:
    """What deepcopy would make under `FakeCopyMode`, much faster."""
    made = FakeTensor(fake_mode, torch.empty_like(parameter, device="meta", requires_grad=False), parameter.device)
    made.requires_grad_(parameter.requires_grad)
    made._is_param = True
    return made


class FakeClone:
    """`module`: a deep copy of a model in which every tensor is fake, costing no memory for weights.

    Attributes:
        module: the copy.
        tensor_paths: `id` of a fake parameter or buffer -> its path in the model.
        module_paths: `id` of a copied module -> its path.
        originals: `id` of a copied object -> the object it was copied from.
    """

    def __init__(self, model: nn.Module, fake_mode: FakeTensorMode):
        memo: dict[int, Any] = {id(p): _fake(p, fake_mode) for p in model.parameters() if _is_plain(p)}
        try:
            with FakeCopyMode(fake_mode):
                self.module: nn.Module = plain_copy(model, memo)
        except Exception as error:
            raise Untraceable(f"the model cannot be deep-copied: {type(error).__name__}: {error}") from error
        alive = {id(original): original for original in memo.get(id(memo), [])}  # what deepcopy keeps alive
        self.originals = {id(new): alive[old] for old, new in memo.items() if old in alive}
        #: ids of copied modules whose originals have hooks
        self.hooked = {id(m) for m in self.module.modules() if has_hooks(m)}
        without_hooks(self.module)
        self.tensor_paths: dict[int, str] = {}
        for path, tensor in [
            *self.module.named_parameters(remove_duplicate=False),
            *self.module.named_buffers(remove_duplicate=False),
        ]:
            self.tensor_paths.setdefault(id(tensor), path)
        self.module_paths: dict[int, str] = {}
        for path, module in self.module.named_modules():
            self.module_paths.setdefault(id(module), path)
