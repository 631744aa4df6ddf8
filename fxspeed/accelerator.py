"""A fake accelerator: real values on the CPU, with a record of what would have been on a device.

A storage is "on the device" if it was put there (parameters, inputs) or computed from something there. Python sees the
device's name (`x.device`, `x.is_cuda`); the dispatcher sees CPU tensors. So code runs as it does on a GPU, and each
place where the host would wait for the device, or where bytes would travel between the two, is reported.
"""

from __future__ import annotations

import contextlib
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fxspeed.graph.inputs import GUARD
from fxspeed.graph.structure import tensors_in

_aten = torch.ops.aten
#: Operators whose result's shape, or whose error check, the host reads from the device.
_WAITS = {
    getattr(_aten, name): name.lstrip("_")
    for name in """nonzero nonzero_numpy equal _unique _unique2 unique_dim unique_consecutive masked_select bincount
    _linalg_check_errors""".split()
}
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}
_PYTHON = {"tolist": "tolist()", "numpy": "numpy()", "__array__": "numpy()"}
_MOVES = ("to", "cpu", "cuda")
_ORIGIN = "fxspeed"  # metadata of autograd's nodes: the line of their forward
_GRAPH = "<eval_with_key>"  # the file name of code that torch.fx generates
_TORCH, _OWN = (str(Path(file).parent) for file in (torch.__file__, __file__))
_STDLIB, _SITE = (sysconfig.get_path(name) for name in ("stdlib", "purelib"))


class Accelerator:
    """The record of what is on the device, and the two modes that keep it.

    Args:
        device: as Python sees it.
        entry: the code that was called by the user; frames beyond it are not searched for the user's line.

    Attributes:
        events: counts of (what it is, the operation, "file:line"), where what it is is one of "host read", "copy to
            host", "copy to device", "asynchronous copy" and "made from host data".
    """

    def __init__(self, device: str | torch.device, entry: CodeType):
        self.device, self.entry = torch.device(device), entry
        self.events: Counter[tuple[str, str, str]] = Counter()
        self.storages: dict[int, StorageWeakRef] = {}
        self.here = False  # whether tensors that the running function makes from nothing are on the device

    def where(self, frame: FrameType | None) -> str:
        """ "file:line" of the user's frame that is nearest to `frame`, through graphs to the line they came from.

        In backward that of the forward. With no frame of the user's, our own nearest one is named.
        """
        node = torch._C._current_autograd_node()
        own = ""
        while frame is not None and frame.f_code is not self.entry:
            file = frame.f_code.co_filename
            here = f"{file}:{frame.f_lineno}"
            if file.startswith(_GRAPH):
                if source := _graph_line(frame):
                    return source
            elif file.startswith(_OWN):
                own = own or (here if file != __file__ else "")
            elif not (file.startswith((_TORCH, "<")) or (file.startswith(_STDLIB) and not file.startswith(_SITE))):
                return here
            frame = frame.f_back
        return node.metadata.get(_ORIGIN, own) if node is not None else own

    def report(self, kind: str, operation: str) -> None:
        """Count an event where the running code stands."""
        if torch._C._current_autograd_node() is not None:
            operation += ", in backward"
        self.events[kind, operation, self.where(sys._getframe(1))] += 1

    def put(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are on the device."""
        for tensor in tensors:
            self.mark(tensor, True)

    def mark(self, tensor: torch.Tensor, on_device: bool) -> None:
        with torch._C.DisableTorchFunction():
            if not _is_plain(tensor):
                return
            storage = tensor.untyped_storage()
            if on_device:
                self.storages[storage._cdata] = StorageWeakRef(storage)
            else:
                self.storages.pop(storage._cdata, None)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the device."""
        with torch._C.DisableTorchFunction():
            if not _is_plain(tensor):
                return False
            known = self.storages.get(tensor.untyped_storage()._cdata)
            return known is not None and not known.expired()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Inside, torch runs as on a machine that has the device."""
        with _Functions(self), _Operators(self):
            yield


class Real(Accelerator):
    """A device that is there: what is on it is asked, waits and copies are reported all the same."""

    def mark(self, tensor: torch.Tensor, on_device: bool) -> None:
        """Tensors know where they are."""

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device.type

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with _Operators(self):
            yield


class _Operators(TorchDispatchMode):
    """Below autograd: what computes from the device is on the device; waits are reported."""

    def __init__(self, accelerator: Accelerator):
        super().__init__()
        self.accelerator = accelerator

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        mine = self.accelerator
        given = tensors_in((args, kwargs))
        there = any(map(mine.has, given)) if given else mine.here
        if given and there:
            self._look(func, args, kwargs)
        before = {t.untyped_storage()._cdata for t in given if _is_plain(t)}
        result = func(*args, **kwargs)
        for t in tensors_in(result):
            if _is_plain(t) and t.untyped_storage()._cdata not in before:
                mine.mark(t, there)
        return result

    def _look(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        report, has = self.accelerator.report, self.accelerator.has
        packet = func.overloadpacket
        if packet is _aten._local_scalar_dense:
            report("host read", "the value of a tensor")
        elif packet in _WAITS:
            report("host read", f"the result of {_WAITS[packet]}()")
        elif func is _aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            report("host read", "the output size of repeat_interleave()")
        elif packet in _INDEXING:
            indices = tensors_in(args[1])
            fills = packet is not _aten.index and len(indices) == 1 and args[2].numel() == 1  # runs as a masked fill
            if any(t.dtype in (torch.bool, torch.uint8) for t in indices) and not fills:
                report("host read", "how many elements a mask selects")
            elif has(args[0]) and not all(map(has, indices)):
                report("copy to device", "an index")
        elif packet is _aten._to_copy:  # of a device that is there
            device, place = self.accelerator.device.type, kwargs.get("device")
            if place is not None and args[0].device.type == device != torch.device(place).type:
                report("copy to host", "to()")
        elif packet is _aten.copy_ and has(args[0]) != has(args[1]):
            waits = not (kwargs.get("non_blocking") or args[2:3] == (True,))
            report(_travel(has(args[0]), waits), "copy_()")


class _Functions(TorchFunctionMode):
    """Above autograd: device arguments and attributes, moves between host and device."""

    def __init__(self, accelerator: Accelerator):
        super().__init__()
        self.accelerator = accelerator

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        mine, name = self.accelerator, getattr(func, "__name__", "")
        caller = sys._getframe(1)
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if name == "__get__" and first is not None:
            return self._attribute(func, first, caller)
        if first is not None and func is getattr(torch.Tensor, name, None):
            if name in _PYTHON and mine.has(first):
                mine.report("host read", _PYTHON[name])
            if name in _MOVES:
                return self._move(name, first, args[1:], kwargs, caller)
            if name == "pin_memory":
                return first
        place = kwargs.get("device")
        there = self._is_ours(place, caller) if place is not None else any(map(mine.has, tensors_in((args, kwargs))))
        if place is not None:
            kwargs["device"] = torch.device("cpu") if there else place
        if func in (torch.tensor, torch.as_tensor) and place is not None and there and first is None:
            mine.report("made from host data", f"torch.{name}(..., device=...)")
        elif func is torch.tensor and args and hasattr(args[0], "__array__"):
            mine.report("made from host data", "torch.tensor(array), which copies; torch.from_numpy does not")
        outer, mine.here = mine.here, there
        try:
            result = func(*args, **kwargs)
        finally:
            mine.here = outer
        for t in tensors_in(result):
            if place is not None:
                mine.mark(t, there)
            if t.grad_fn is not None and _ORIGIN not in t.grad_fn.metadata:
                t.grad_fn.metadata[_ORIGIN] = mine.where(caller)
        return result

    def _attribute(self, get: Any, tensor: torch.Tensor, caller: FrameType) -> Any:
        mine = self.accelerator
        if caller.f_code.co_filename != GUARD and mine.has(tensor):
            if get == torch.Tensor.device.__get__:
                return mine.device
            if get == torch.Tensor.is_cuda.__get__:
                return mine.device.type == "cuda"
            if get == torch.Tensor.is_cpu.__get__:
                return mine.device.type == "cpu"
        return get(tensor)

    def _is_ours(self, place: Any, caller: FrameType) -> bool:
        """Whether `device=place` means the device.

        The CPU as an object, not as a name, is where the example inputs of a graph or C++ code found the tensors.
        """
        if isinstance(place, int):
            return True
        found = isinstance(place, torch.device) and caller.f_code.co_filename.startswith((_GRAPH, _TORCH))
        return found or torch.device(place).type == self.accelerator.device.type

    def _move(self, name: str, tensor: torch.Tensor, args: tuple, kwargs: dict[str, Any], caller: FrameType) -> Any:
        """`to`, `cpu` and `cuda`: a new tensor where the place changes."""
        mine = self.accelerator
        here = there = mine.has(tensor)
        if name != "to":
            there, args = name == "cuda", ()
            kwargs = {k: v for k, v in kwargs.items() if k in ("memory_format", "non_blocking")}
        elif args and isinstance(args[0], torch.Tensor):
            there, args = mine.has(args[0]), (torch.Tensor.dtype.__get__(args[0]), *args[1:])
        elif args and not isinstance(args[0], torch.dtype) and args[0] is not None:
            there, args = self._is_ours(args[0], caller), args[1:]
        if (place := kwargs.pop("device", None)) is not None:
            there = self._is_ours(place, caller)
        with torch._C.DisableTorchFunction():
            dtype = next((a for a in (*args, kwargs.pop("dtype", None)) if isinstance(a, torch.dtype)), tensor.dtype)
            flags = [a for a in args if isinstance(a, bool)]
            waits = not (kwargs.get("non_blocking") or flags[:1] == [True])
            copy = bool(kwargs.get("copy")) or flags[1:] == [True] or here != there
            layout = kwargs.get("memory_format", torch.preserve_format)
        if here != there:
            mine.report(_travel(there, waits), f"{name}()")
        result = torch.Tensor.to(tensor, dtype, copy=copy, memory_format=layout)
        if here != there:
            mine.mark(result, there)
        return result


def _travel(to_device: bool, waits: bool) -> str:
    """The kind of a copy between host and device."""
    if not waits:
        return "asynchronous copy"
    return "copy to device" if to_device else "copy to host"


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta


def _graph_line(frame: FrameType) -> str:
    """The user's line of the node that a generated forward is at."""
    module = frame.f_locals.get("self")
    if not isinstance(module, fx.GraphModule):
        return ""
    lines = getattr(module, "_lineno_map", None) or {}
    index = lines.get(frame.f_lineno - getattr(module, "_prologue_start", 0))
    nodes = list(module.graph.nodes)
    return nodes[index].meta.get("source", "") if index is not None and index < len(nodes) else ""
