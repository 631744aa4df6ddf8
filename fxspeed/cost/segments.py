"""A quick model of a step's memory when stretches of the graph are recomputed in backward, for searching plans.

`StepModel.peak` walks the nodes once forward and once backward with the lifetimes that capture found out: what each
node makes, what autograd keeps for it, when each tensor is last read. `fxspeed.cost.memory.step_timeline` then runs
the chosen plan for the exact figure.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from fxspeed.cost.flops import node_flops
from fxspeed.cost.workspace import convolution_workspace
from fxspeed.graph import runtime
from fxspeed.graph.ops import CONVOLUTIONS, module_of, name_of
from fxspeed.graph.regions import bytes_of
from fxspeed.graph.trace import Trace

Segment = tuple[int, int]  # nodes [start, stop) of StepModel.nodes


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Predicted peak in bytes above the start, and the FLOPs that recomputation adds."""

    peak: int
    extra_flops: int


class StepModel:
    """Lifetimes of a training graph's tensors. `nodes` are those that compute something, in order."""

    def __init__(self, trace: Trace, root: nn.Module):
        graph = trace.graph
        self.nodes = [n for n in graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
        self.flops = [node_flops(n, root) for n in self.nodes]
        index = {n: i for i, n in enumerate(self.nodes)}
        fixed = {
            t.untyped_storage()._cdata
            for n in graph.nodes
            if n.op in ("placeholder", "get_attr")
            for t in _tensors(n.meta.get("val"))
        }
        self.size: dict[int, int] = {}
        self.maker: dict[int, int] = {}
        self.last_read: dict[int, int] = {}
        self.reads: list[set[int]] = []
        self.makes: list[list[int]] = [[] for _ in self.nodes]
        self.saves: list[set[int]] = []
        self.needs_grad: set[int] = set()
        self.ends: set[int] = set()  # nodes that the graph returns
        for i, node in enumerate(self.nodes):
            for tensor in _tensors(node.meta.get("val")):
                key = tensor.untyped_storage()._cdata
                if key not in fixed and key not in self.maker:
                    self.maker[key], self.size[key] = i, bytes_of(tensor)
                    self.makes[i].append(key)
                if tensor.requires_grad:
                    self.needs_grad.add(key)
            reads = {
                t.untyped_storage()._cdata for a in node.all_input_nodes for t in _tensors(a.meta.get("val"))
            } - fixed
            self.reads.append(reads)
            for key in reads:
                self.last_read[key] = i
            kept = set()
            for tensor in node.meta.get("saved", ()):
                key = tensor.untyped_storage()._cdata
                if key in fixed:
                    continue
                kept.add(key)
                if key not in self.maker:
                    self.maker[key], self.size[key] = i, bytes_of(tensor)
                    self.makes[i].append(key)
            self.saves.append(kept)
        self.savers: dict[int, list[int]] = defaultdict(list)  # nodes for which autograd keeps a storage
        for i, keys in enumerate(self.saves):
            for key in keys:
                self.savers[key].append(i)
        for node in graph.output_node().all_input_nodes:
            for tensor in _tensors(node.meta.get("val")):
                self.last_read[tensor.untyped_storage()._cdata] = len(self.nodes)
            if node in index:
                self.ends.add(index[node])
        #: bytes taken inside each node beside its results: forward, backward (there with new gradients of parameters)
        self.taken = [self._taken(i, n, root) for i, n in enumerate(self.nodes)]
        self.written: dict[int, list[int]] = defaultdict(list)
        for i, node in enumerate(self.nodes):
            for target in node.meta.get("mutates", ()):
                if target.op == "get_attr" or (target not in index and target.op != "placeholder"):
                    continue
                for tensor in _tensors(target.meta.get("val")):
                    self.written[tensor.untyped_storage()._cdata].append(i)
        self._closed = [self._closes(n) for n in self.nodes]

    def _taken(self, i: int, node: fx.Node, root: nn.Module) -> tuple[int, int]:
        forward, backward = self._workspace(node, root)
        if i in self.ends and (isinstance(module_of(node, root), nn.Linear) or name_of(node) in ("linear", "addmm")):
            backward += bytes_of(node.meta["val"])  # the gradient of a sum, laid out
        return forward, backward + _gradients(node, root)

    @staticmethod
    def _workspace(node: fx.Node, root: nn.Module) -> tuple[int, int]:
        module, out = module_of(node, root), node.meta.get("val")
        if isinstance(module, nn.modules.conv._ConvNd):
            weight: torch.Tensor = module.weight
        elif name_of(node) in CONVOLUTIONS:
            weight = node.args[1].meta["val"]
        else:
            return 0, 0
        source = node.all_input_nodes[0].meta["val"]
        if not isinstance(out, torch.Tensor):
            return 0, 0
        sizes = (bytes_of(source), bytes_of(weight), bytes_of(out))
        forward, backward = (convolution_workspace(source, weight, out, sizes, b) for b in (False, True))
        return forward, backward

    @staticmethod
    def _closes(node: fx.Node) -> bool:
        """Whether a node may be part of no region."""
        return (
            bool(node.meta.get("opaque"))
            or (
                node.op == "call_function"
                and (node.target in runtime.SIDE_EFFECTS or name_of(node) == "set_grad_enabled")
            )
            or node.meta.get("constructs", False)
        )

    def valid(self, segment: Segment) -> bool:
        """Whether running the nodes again gives the same values: nothing they read or write changes in between."""
        start, stop = segment
        if any(self._closed[start:stop]):
            return False
        for i in range(start, stop):
            for key in self.reads[i]:
                if self.maker.get(key, -1) < start and any(w >= start for w in self.written.get(key, ())):
                    return False
        for key, writes in self.written.items():
            if any(start <= w < stop for w in writes) and not start <= self.maker.get(key, -1) < stop:
                return False
        return True

    def pieces(self, segment: Segment) -> list[Segment]:
        """The longest valid stretches of a segment."""
        start, stop = segment
        if start >= stop:
            return []
        if self.valid(segment):
            return [segment]
        found, at = [], start
        while at < stop:
            end = at
            while end < stop and self.valid((at, end + 1)):
                end += 1
            if end > at:
                found.append((at, end))
            at = max(end, at + 1)
        return found

    def crossing(self) -> list[int]:
        """For each position, the bytes made before it and read behind it."""
        delta = [0] * (len(self.nodes) + 2)
        for key, made in self.maker.items():
            last = self.last_read.get(key, made)
            if last > made:
                delta[made + 1] += self.size[key]
                delta[last + 1] -= self.size[key]
        total, sums = 0, []
        for d in delta[:-1]:
            total += d
            sums.append(total)
        return sums

    def _saved(self, key: int, segment: Segment) -> bool:
        """Whether autograd keeps a storage for a node of the segment."""
        return any(segment[0] <= u < segment[1] for u in self.savers[key])

    def needed(self, segment: Segment) -> int:
        """Where running a segment again may stop: behind the last node that makes what autograd keeps."""
        start, stop = segment
        needed = stop
        while needed > start and not any(
            needed - 1 <= u < stop for k in self.makes[needed - 1] for u in self.savers[k]
        ):
            needed -= 1
        return needed

    def work(self, segment: Segment, kept: frozenset[int] = frozenset()) -> int:
        """FLOPs of running a segment again without the nodes in `kept`, up to the last tensor that is needed."""
        return sum(self.flops[j] for j in range(segment[0], self.needed(segment)) if j not in kept)

    def peak(self, segments: list[Segment], kept: frozenset[int] = frozenset()) -> Estimate:
        """The peak of a step in which each of `segments` (disjoint, in order) is recomputed in backward.

        The results of the nodes in `kept` stay in memory until then and are not computed again.
        """
        n = len(self.nodes)
        inside = [-1] * n
        for s, (start, stop) in enumerate(segments):
            inside[start:stop] = [s] * (stop - start)
        holders: dict[int, int] = defaultdict(int)  # storage -> units of backward that still need it
        kept_by: list[set[int]] = []
        inputs: list[set[int]] = [set() for _ in segments]
        results: list[set[int]] = [set() for _ in segments]
        for i in range(n):
            s = inside[i]
            if s < 0:
                kept_by.append(self.saves[i])
                for key in self.saves[i]:
                    holders[key] += 1
            else:
                kept_by.append(set())
                start = segments[s][0]
                inputs[s] |= {k for k in self.reads[i] if self.maker.get(k, -1) < start}
                if i in kept:
                    results[s] |= set(self.makes[i])
        for keys in (*inputs, *results):
            for key in keys:
                holders[key] += 1
        dying: dict[int, list[int]] = defaultdict(list)
        for key, made in self.maker.items():
            dying[max(self.last_read.get(key, made), made)].append(key)
        live = peak = 0
        alive: set[int] = set()
        for i in range(n):
            for key in self.makes[i]:
                alive.add(key)
                live += self.size[key]
            peak = max(peak, live + self.taken[i][0])
            for key in dying[i]:
                if not holders.get(key) and key in alive:
                    alive.discard(key)
                    live -= self.size[key]
        grads: dict[int, int] = {}
        extra = 0

        def release(keys: set[int]) -> None:
            nonlocal live
            for key in keys:
                holders[key] -= 1
                if holders[key] <= 0 and key in alive:
                    alive.discard(key)
                    live -= self.size[key]

        i = n - 1
        entered = -1
        for key in list(alive):  # the model's outputs are dropped once the loss is made
            if not holders.get(key):
                alive.discard(key)
                live -= self.size[key]
        while i >= 0:
            s = inside[i]
            if s >= 0 and s != entered:
                entered = s
                start, stop = segments[s]
                extra += self.work(segments[s], kept)
                again = top = 0
                for j in range(start, self.needed(segments[s])):  # run again: what autograd keeps stays
                    for key in self.saves[j]:
                        holders[key] += 1
                    if j in kept:
                        continue
                    again += sum(self.size[k] for k in self.makes[j])
                    top = max(top, again + self.taken[j][0])
                    for key in self.reads[j].union(self.makes[j]):
                        passing = self.maker.get(key, -1) >= start and self.maker[key] not in kept
                        if passing and self.last_read.get(key, j) == j and not self._saved(key, segments[s]):
                            again -= self.size[key]
                for j in range(self.needed(segments[s]), stop):
                    for key in self.saves[j]:
                        holders[key] += 1
                peak = max(peak, live + top)
                for j in range(start, stop):
                    for key in self.saves[j]:
                        if key not in alive:
                            alive.add(key)
                            live += self.size[key]
                release(results[s])
            for key in self.reads[i]:
                if key in self.needs_grad and key not in grads:
                    grads[key] = self.size.get(key, 0)
                    live += grads[key]
            for key in self.makes[i]:
                if key in self.needs_grad and key not in grads:
                    grads[key] = self.size[key]
                    live += grads[key]
            peak = max(peak, live + self.taken[i][1])
            for key in self.makes[i]:
                live -= grads.pop(key, 0)
            release(kept_by[i] if s < 0 else self.saves[i])
            if s >= 0 and i == segments[s][0]:
                release(inputs[s])
            i -= 1
        return Estimate(peak, extra)


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return (
        [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)] if isinstance(value, (tuple, list, dict)) else []
    )


def _gradients(node: fx.Node, root: nn.Module) -> int:
    """Bytes of the gradients of parameters that a node's backward makes, before they are added to those there are."""
    module = module_of(node, root)
    own = (
        module.parameters()
        if module is not None
        else (a.meta.get("val") for a in node.all_input_nodes if a.op == "get_attr")
    )
    return sum(bytes_of(p) for p in own if isinstance(p, torch.Tensor) and p.requires_grad)
