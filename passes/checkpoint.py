"""Activation checkpointing to a memory budget: recompute stretches of the forward in backward.

Rule: the graph is cut where few bytes cross, into as many stretches as the budget needs; the plan that meets the
budget with the fewest recomputed FLOPs is taken. Each stretch runs under `torch.utils.checkpoint` (non-reentrant):
its inputs are kept, and the results of those convolutions and linear layers that cost much to compute for the bytes
they take; the rest is computed again when backward reaches it. Recomputation leaves no second trace:
buffers that a stretch writes (BatchNorm statistics) are swapped for copies meanwhile, random numbers are replayed,
autocast is as it was.

Does not fire when: no budget is given; the step fits it as it is. A stretch holds no module that capture could not
open (its side effects would happen twice), no switch of a mode, and no write into a tensor that others see.

Costs: the recomputed FLOPs, shown for each stretch. Raises BudgetError when no plan meets the budget.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; torch.utils.checkpoint.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from torch import fx, nn

from fxspeed.cost.memory import largest, resident_bytes, step_timeline
from fxspeed.cost.segments import Estimate, Segment, StepModel
from fxspeed.errors import BudgetError
from fxspeed.graph.keep import can_keep, keep
from fxspeed.graph.ops import is_random, module_of, name_of
from fxspeed.graph.recompute import recomputed
from fxspeed.graph.regions import Region, extract, free_name
from fxspeed.graph.trace import Trace
from fxspeed.passes.base import Captured, Change, Pass, Skip


@dataclasses.dataclass(eq=False)
class CheckpointRegion(Region):
    """A stretch that backward computes again. `buffers` are those it writes; `random` whether it draws numbers."""

    buffers: tuple[str, ...] = ()
    random: bool = False
    keeps: bool = False

    decorator: ClassVar[str] = "recomputed_in_backward"

    @property
    def options(self) -> str:
        named = {"buffers": self.buffers, "random": self.random, "keeps": self.keeps}
        return f"({', '.join(f'{name}={value!r}' for name, value in named.items() if value)})"

    def bind(self, root: nn.Module, body: Callable) -> Callable:
        return recomputed(body, root, self.buffers, self.random, self.keeps)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Stretches of `StepModel.nodes` to recompute, and the nodes in them whose results are kept."""

    segments: tuple[Segment, ...]
    kept: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Checkpoint(Pass):
    """Recompute stretches so that the peak of a training step stays within a budget.

    Options:
        budget: share of the plain step's peak in (0, 1], or bytes; None takes `optimize(memory_budget=...)`.
        room: share of the budget left free for what the prediction does not see.
        most: the largest number of stretches tried.
        refined: plans that are improved step by step.
        effort: how much of that is done: nodes walked for each of them.
        shares: shares of the convolutions and linear layers whose results are kept, as tried.
    """

    name: ClassVar[str] = "checkpoint"
    budget: float | int | str | None = None
    most: int = 48
    room: float = 0.025
    refined: int = 3
    effort: int = 100_000
    shares: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0)

    def run(self, captured: Captured) -> list[Change | Skip]:
        budget = self.budget if self.budget is not None else captured.options.get("memory_budget")
        trace = captured.traces.get("train")
        if budget is None or trace is None:
            return []
        root = captured.root
        plain = captured.options.get("plain_timeline") or step_timeline(trace, root, plain=True)
        captured.options["plain_timeline"] = plain
        base = 0 if isinstance(budget, float) else resident_bytes(root)
        limit = budget * plain.peak if isinstance(budget, float) else parse_bytes(budget) - base
        limit *= 1 - self.room
        if plain.peak <= limit or budget == 1.0:
            return [
                Skip(
                    self.name, "the whole model", "recompute", f"the step's peak of {_mib(plain.peak)} fits the budget"
                )
            ]
        model = StepModel(trace, root)
        plans = sorted(self._plans(model, root), key=lambda p: (p[0].extra_flops, p[0].peak))
        chosen, timeline = self._search(captured, model, plans, limit)
        if chosen is None:  # without room to spare then
            chosen, timeline = self._search(captured, model, plans, limit / (1 - self.room))
        if chosen is None:
            raise BudgetError(_refusal(budget, timeline, plain.peak, base, trace))
        return self._rewrite(trace, root, model, chosen, timeline, captured)

    def _search(self, captured: Captured, model: StepModel, plans: list, limit: float) -> tuple[Plan | None, Any]:
        """The cheapest plan whose exact peak is within the limit; without one, None and the lowest peak seen."""
        lowest = None
        margin = 1.0
        for _ in range(6):
            fitting = [p for p in plans if p[0].peak <= limit * margin]
            near = fitting[: self.refined] or sorted(plans, key=lambda p: p[0].peak)[: self.refined]
            better = [self._refine(model, p[0], p[1], limit * margin, captured.root) for p in near]
            fitting = [p for p in (*better, *fitting[:1]) if p[0].peak <= limit * margin]
            if not fitting:
                break
            estimate, plan = min(fitting, key=lambda p: (p[0].extra_flops, p[0].peak))
            timeline = self._exact(captured, model, plan)
            if timeline.peak <= limit:
                return plan, timeline
            lowest = timeline if lowest is None or timeline.peak < lowest.peak else lowest
            margin = min(margin, estimate.peak / limit) * min(limit / timeline.peak, 0.99)
        for _, plan in sorted(plans, key=lambda p: p[0].peak)[:4]:
            timeline = self._exact(captured, model, plan)
            if timeline.peak <= limit:
                return plan, timeline
            lowest = timeline if lowest is None or timeline.peak < lowest.peak else lowest
        return None, lowest

    def _refine(
        self, model: StepModel, estimate: Estimate, plan: Plan, limit: float, root: nn.Module
    ) -> tuple[Estimate, Plan]:
        """Improve a plan step by step: keep or drop single results, shift borders, leave stretches alone.

        A step is taken when it brings a peak above the limit down, or within the limit saves FLOPs.
        """
        tries = max(20, self.effort // max(len(model.nodes), 1))
        able = [i for i, n in enumerate(model.nodes) if model.makes[i] and can_keep(n, root)]

        def worth(e: Estimate) -> tuple[float, float]:
            return max(e.peak - limit, 0), e.extra_flops

        def neighbours(plan: Plan) -> Iterator[Plan]:
            covered = {i for a, b in plan.segments for i in range(a, model.needed((a, b)))}
            for i in sorted(able, key=lambda i: -model.flops[i]):
                if i in covered:
                    yield dataclasses.replace(plan, kept=plan.kept ^ {i})
            for s in range(len(plan.segments)):
                yield Plan(plan.segments[:s] + plan.segments[s + 1 :], plan.kept)
            for s, (a, b) in enumerate(plan.segments):
                for shift in (-1, 1, -2, 2, -4, 4):
                    segments = list(plan.segments)
                    segments[s] = (a, b + shift)
                    after = segments[s + 1] if s + 1 < len(segments) else None
                    if after is not None and after[0] == b:
                        segments[s + 1] = (b + shift, after[1])
                    if all(x < y for x, y in segments) and segments[s][1] <= len(model.nodes):
                        ends = [x for pair in segments for x in pair]
                        if ends == sorted(ends) and all(map(model.valid, segments[s : s + 2])):
                            yield Plan(tuple(segments), plan.kept)

        moved = True
        while moved and tries > 0:
            moved = False
            for other in neighbours(plan):
                tries -= 1
                found = model.peak(list(other.segments), other.kept)
                if worth(found) < worth(estimate):
                    estimate, plan, moved = found, other, True
                    break
                if tries <= 0:
                    break
        for segment in plan.segments:  # leave alone what saves nothing
            other = dataclasses.replace(plan, segments=tuple(s for s in plan.segments if s != segment))
            found = model.peak(list(other.segments), other.kept)
            if worth(found) <= worth(estimate):
                estimate, plan = found, other
        return estimate, plan

    def _exact(self, captured: Captured, model: StepModel, plan: Plan) -> Any:
        trial = captured.traces["train"].copy()
        by_name = {n.name: n for n in trial.graph.nodes}
        for start, stop in plan.segments:
            nodes = [by_name[n.name] for n in model.nodes[start:stop]]
            kept = {by_name[model.nodes[i].name] for i in plan.kept if start <= i < stop}
            _extract(trial, captured.root, nodes, kept)
        return step_timeline(trial, captured.root)

    def _plans(self, model: StepModel, root: nn.Module) -> Iterator[tuple[Estimate, Plan]]:
        """Ways to cut the graph, each with ways to keep: those dearest to compute for their bytes first."""
        dear = [i for i, n in enumerate(model.nodes) if can_keep(n, root) and model.makes[i]]
        dear.sort(key=lambda i: model.flops[i] / max(sum(model.size[k] for k in model.makes[i]), 1), reverse=True)
        costly = [i for i, n in enumerate(model.nodes) if name_of(n) in _COSTLY and not can_keep(n, root)]
        for segments in _around(self._cuts(model), costly):
            inside = {i for start, stop in segments for i in range(start, model.needed((start, stop)))}
            seen = set()
            for share in self.shares if dear else (0.0,):
                kept = frozenset(i for i in dear[: round(share * len(dear))] if i in inside)
                if kept not in seen:
                    seen.add(kept)
                    yield model.peak(segments, kept), Plan(tuple(segments), kept)

    def _cuts(self, model: StepModel) -> Iterator[list[Segment]]:
        """Ways to cut the graph: k stretches of like weight, of which the first m are recomputed."""
        count = len(model.nodes)
        crossing = model.crossing()
        weight = [sum(model.size[k] for k in keys) for keys in model.saves]
        sums = [0]
        for w in weight:
            sums.append(sums[-1] + w)
        total = max(sums[-1], 1)
        seen: set[tuple] = set()
        for k in (n for n in range(1, min(self.most, count) + 1) if n <= 16 or n % 4 == 0):
            cuts = [0]
            for j in range(1, k):
                low, high = total * (j - 0.4) / k, total * (j + 0.4) / k
                window = [p for p in range(cuts[-1] + 1, count) if low <= sums[p] <= high]
                if window:
                    cuts.append(min(window, key=lambda p: (crossing[p], abs(sums[p] - total * j / k))))
            cuts.append(count)
            stretches = [p for a, b in itertools.pairwise(cuts) for p in model.pieces((a, b))]
            stretches = [s for s in stretches if any(model.saves[s[0] : s[1]])]
            ends = sorted({*range(1, len(stretches) + 1)} if k <= 16 else {len(stretches), len(stretches) * 3 // 4})
            for m in ends:
                plan = stretches[:m]
                if tuple(plan) not in seen:
                    seen.add(tuple(plan))
                    yield plan
        for depth in (1, 2, 3, 4):  # module by module, as one would by hand
            prefixes: list[tuple[str, ...]] = []
            for node in model.nodes:  # numbers belong to the module around them
                own = "path" in node.meta or not prefixes
                prefixes.append(tuple(str(node.meta.get("path", "")).split(".")[:depth]) if own else prefixes[-1])
            edges = [0, *(i for i in range(1, count) if prefixes[i] != prefixes[i - 1]), count]
            stretches = [p for a, b in itertools.pairwise(edges) for p in model.pieces((a, b)) if b - a > 1]
            stretches = [s for s in stretches if any(model.saves[s[0] : s[1]])]
            for m in {len(stretches), len(stretches) * 3 // 4, len(stretches) // 2}:
                plan = stretches[:m]
                if plan and tuple(plan) not in seen:
                    seen.add(tuple(plan))
                    yield plan

    def _rewrite(self, trace: Trace, root: nn.Module, model, plan: Plan, timeline, captured) -> list[Change | Skip]:
        records: list[Change | Skip] = []
        whole = max(sum(model.flops), 1)
        for start, stop in plan.segments:
            nodes = model.nodes[start:stop]
            kept = {model.nodes[i] for i in plan.kept if start <= i < stop}
            freed = sum(
                {
                    k: model.size[k]
                    for i in range(start, stop)
                    for k in model.saves[i]
                    if model.maker[k] >= start and model.maker[k] not in plan.kept
                }.values()
            )
            work = model.work((start, stop), plan.kept)
            first, last = nodes[0], nodes[-1]
            note = f"frees {_mib(freed)}, costs {100 * work / (3 * whole):.1f}% of a step's FLOPs"
            names = f" but {', '.join(n.name for n in model.nodes[start:stop] if n in kept)}" if kept else ""
            name = _extract(trace, root, nodes, kept, note)
            records.append(
                Change(
                    self.name,
                    name,
                    f"{first.name} to {last.name} ({len(nodes)} nodes) recomputed in backward{names}",
                    "the memory budget",
                    {"bytes": freed, "flops": -work},
                )
            )
        captured.options["planned_timeline"] = timeline
        return records


#: Operations that cost much to compute and whose results cannot be kept inside a stretch.
_COSTLY = frozenset(["scaled_dot_product_attention", "matmul", "bmm", "baddbmm", "einsum"])


def _around(cuts: Iterator[list[Segment]], costly: list[int]) -> Iterator[list[Segment]]:
    """Each way to cut, and the same with the costly nodes left out of the stretches."""
    for segments in cuts:
        yield segments
        parts: list[Segment] = []
        for start, stop in segments:
            edges = [start, *(i for i in costly if start <= i < stop), stop]
            parts += [(a if a == start else a + 1, b) for a, b in itertools.pairwise(edges)]
        parts = [(a, b) for a, b in parts if a < b]
        if parts != segments:
            yield parts


def _extract(trace: Trace, root: nn.Module, nodes: list, kept: set, note: str = "") -> str:
    name = free_name(trace, "checkpoint")
    buffers: list[str] = []
    random = False
    for node in nodes:
        region = trace.constants.get(str(node.target)) if node.meta.get("region") else None
        inner = list(region.graph.nodes) if isinstance(region, Region) else [node]
        for part in inner:
            random = random or is_random(part, root)
            module = module_of(part, root)
            if module is not None and part.meta.get("writes"):
                buffers += [f"{part.target}.{b}" for b, value in module.named_buffers() if value is not None]
            buffers += [str(a.target) for a in part.meta.get("mutates", ()) if a.op == "get_attr"]
    names = {n.name for n in kept}

    def make(graph: fx.Graph, constants: dict[str, Any]) -> CheckpointRegion:
        for node in list(graph.nodes):
            if node.name in names and node.op != "placeholder":
                keep(graph, node, root)
        return CheckpointRegion(graph, constants, note, tuple(dict.fromkeys(buffers)), random, bool(kept))

    extract(
        trace,
        nodes,
        name,
        make,
    )
    return name


def as_budget(budget: float | int | str | None) -> float | int | None:
    """A budget as users write it: a share in (0, 1] as a float, or bytes as an int."""
    if budget is None or isinstance(budget, bool):
        return None
    if isinstance(budget, str):
        text = budget.strip()
        if text.replace(".", "", 1).isdigit() and "." in text:
            budget = float(text)
        else:
            budget = parse_bytes(text)
    if isinstance(budget, float) and not 0 < budget <= 1:
        raise BudgetError(f'memory budget {budget} is no share in (0, 1]; for bytes give an int or "6GiB"')
    if isinstance(budget, int) and budget <= 0:
        raise BudgetError(f"memory budget {budget} is no positive number of bytes")
    return budget


def parse_bytes(budget: int | str) -> int:
    """`"6GiB"`, `"500 MB"` or a number of bytes.

    Raises:
        BudgetError: the text is neither.
    """
    if isinstance(budget, int):
        return budget
    units = {"": 1, "b": 1} | {
        f"{p}{s}": b**e for e, p in enumerate("kmgt", 1) for s, b in (("b", 1000), ("ib", 1024), ("", 1024))
    }
    text = budget.strip().lower()
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
    try:
        return int(float(digits) * units[text[len(digits) :].strip()])
    except (ValueError, KeyError):
        raise BudgetError(f'memory budget {budget!r} is no size; write a share like 0.5, bytes, or "6GiB"') from None


def _refusal(budget: Any, timeline: Any, plain: int, base: int, trace: Trace) -> str:
    where = "; ".join(f"{_mib(size)} {label} ({source})" for size, label, source in largest(trace))
    if timeline is None:
        return f"memory budget {budget} cannot be met: no part of the graph can be recomputed. Largest tensors: {where}"
    least = timeline.peak + base
    share = f" ({timeline.peak / plain:.3f} of the plain step's)" if not base else ""
    return (
        f"memory budget {budget} cannot be met: the smallest peak that a plan reaches is {_mib(least)}{share}. "
        f"Give at least that, or a smaller batch. Largest tensors kept for backward: {where}"
    )


def _mib(size: float) -> str:
    return f"{size / 2**20:.1f} MiB" if size >= 2**19 else f"{size / 2**10:.1f} KiB"
