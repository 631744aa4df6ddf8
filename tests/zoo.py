"""Runs public model zoos through fxspeed: `python -m tests.zoo [--source timm] [--share 0.05] [--seed 0] [name ...]`.

For each model it prints whether it was captured whole (or which module stayed, and why), whether outputs, gradients
and buffers are equal in train mode, outputs in eval mode and with another batch size, what `optimize` took in
forwards of the model, and how large the graph is. The summary closes it. `--json FILE` keeps a line for each model and
passes over those that the file has already.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import json
import os
import random
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator

import numpy
import torch
from torch import nn

import fxspeed
from fxspeed.graph.structure import map_tensors, tensors_in
from tests.torchvision_import import import_torchvision

Example = tuple[Callable[[], nn.Module], Callable[[nn.Module], tuple[tuple, dict]]]


@dataclasses.dataclass
class Row:
    """What came of one model."""

    name: str
    status: str  # "whole", "part", "eager", "wrong", "error" or "skipped"
    why: str = ""
    nodes: int = 0
    seconds: float = 0.0
    forwards: float = 0.0
    difference: float = 0.0


def check(name: str, make: Callable[[], nn.Module], inputs: Callable[[nn.Module], tuple[tuple, dict]]) -> Row:
    """Optimize one model and compare it with itself."""
    torch.manual_seed(0)
    model = make().train()
    args, kwargs = inputs(model)
    if sum(p.numel() for p in model.parameters()) > 400e6:
        return Row(name, "skipped", "more than 400 million parameters")
    begin = time.perf_counter()
    try:
        _run(copy.deepcopy(model), args, kwargs)
    except Exception as error:
        return Row(name, "skipped", f"does not run in eager: {type(error).__name__}: {str(error)[:80]}")
    forward = time.perf_counter() - begin
    begin = time.perf_counter()
    result = fxspeed.optimize(model, args, kwargs, passes=["drop_bias", "remove_syncs"], verify=False, precision="fp32")
    seconds = time.perf_counter() - begin
    worst, where = 0.0, ""
    for label, got in _differences(model, result.module, args, kwargs):
        if not got <= worst:
            worst, where = got, label
    nodes = max((len(e.trace.graph.nodes) for e in result.program.entries), default=0)
    leaves = [s for s in result.skipped if s.pass_name == "capture" and "dynamic" not in s.what]
    status, why = "whole", ""
    if leaves:
        status, why = (
            ("eager" if result.program.eager else "part"),
            f"{leaves[0].target}: {leaves[0].why} [{leaves[0].source}]",
        )
    if not worst <= 2e-3:
        status, why = "wrong", f"{where} off by {worst:.1e}"
    return Row(name, status, why, nodes, seconds, seconds / max(forward, 1e-9), worst)


def _differences(model: nn.Module, module: nn.Module, args: tuple, kwargs: dict) -> Iterator[tuple[str, float]]:
    runs = []
    for each in (model, module):
        outputs = _run(each, args, kwargs)
        terms = [
            (t * torch.cos(torch.arange(t.numel(), dtype=t.dtype)).view_as(t)).mean()
            for t in outputs
            if t.requires_grad
        ]
        if terms:
            torch.stack([t.float() for t in terms]).sum().backward()
        runs.append((outputs, {n: p.grad for n, p in each.named_parameters()}))
        for p in each.parameters():
            p.grad = None
    yield "train output", _off(runs[0][0], runs[1][0])
    names = [n for n in runs[1][1] if runs[0][1][n] is not None or runs[1][1][n] is not None]
    if any((runs[0][1][n] is None) != (runs[1][1][n] is None) for n in names):
        yield "presence of a gradient", float("inf")
        return
    scale = max([float(runs[0][1][n].abs().max()) for n in names], default=0.0)
    yield (
        "gradient",
        max([float((runs[0][1][n] - runs[1][1][n]).abs().max()) for n in names], default=0.0) / (scale + 1e-12),
    )
    model.eval(), module.eval()
    with torch.no_grad():
        yield "eval output", _off(_run(model, args, kwargs), _run(module, args, kwargs))
        args, kwargs = map_tensors((args, kwargs), lambda t: torch.cat([t, t[:1]]) if t.dim() else t, torch.Tensor)
        try:
            want = _run(model, args, kwargs)
        except Exception:
            return  # the model itself takes no other batch size
        yield "eval output of a larger batch", _off(want, _run(module, args, kwargs))


def _run(model: nn.Module, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    return tensors_in(model(*args, **kwargs))


def _off(want: list[torch.Tensor], got: list[torch.Tensor]) -> float:
    if [(t.shape, t.dtype) for t in want] != [(t.shape, t.dtype) for t in got]:
        return float("inf")
    worst = 0.0
    for w, g in zip(want, got, strict=True):
        if not w.numel():
            continue
        w, g = w.detach().double(), g.detach().double()
        if not torch.equal(w.isnan(), g.isnan()):
            return float("inf")
        w, g = w.nan_to_num(), g.nan_to_num()
        worst = max(worst, float((w - g).abs().max() / (w.abs().max() + 1e-9)))
    return worst


# ---------------------------------------------------------------------- the zoos
def timm_models() -> Iterator[tuple[str, Example]]:
    """All of timm, one of each architecture family first."""
    import_torchvision()
    import timm

    names = timm.list_models()
    families: dict[str, list[str]] = {}
    for name in names:
        families.setdefault(timm.models.model_entrypoint(name).__module__, []).append(name)
    order = [names[i] for i in range(max(map(len, families.values()))) for names in families.values() if i < len(names)]
    for name in order:

        def make(name: str = name) -> nn.Module:
            return timm.create_model(name)

        def inputs(model: nn.Module) -> tuple[tuple, dict]:
            size = model.default_cfg.get("input_size", (3, 224, 224))
            small = (size[0], 96, 96)
            if not model.default_cfg.get("fixed_input_size") and _runs(model, torch.randn(2, *small)):
                size = small
            return (torch.randn(2, *size),), {}

        yield name, (make, inputs)


def torchvision_models() -> Iterator[tuple[str, Example]]:
    torchvision = import_torchvision()
    for name in torchvision.models.list_models():

        def make(name: str = name) -> nn.Module:
            extra = (
                {"weights_backbone": None}
                if name.split("_")[0] in ("deeplabv3", "fcn", "lraspp") or "rcnn" in name
                else {}
            )
            extra = (
                {"weights_backbone": None}
                if name.startswith(("ssd", "retinanet", "fcos", "keypoint", "mask"))
                else extra
            )
            return torchvision.models.get_model(name, weights=None, **extra)

        def inputs(model: nn.Module, name: str = name) -> tuple[tuple, dict]:
            kind = type(model).__module__
            if ".detection" in kind:
                boxes = torch.tensor([[4.0, 4.0, 60.0, 60.0]])
                target = {"boxes": boxes, "labels": torch.tensor([1]), "masks": torch.ones(1, 96, 96, dtype=torch.uint8),
                          "keypoints": torch.ones(1, 17, 3)}  # fmt: skip
                return ([torch.rand(3, 96, 96) for _ in range(2)], [dict(target) for _ in range(2)]), {}
            if ".video" in kind:
                size = (16, 224, 224) if "mvit" in name or "swin" in name else (8, 64, 64)
                return (torch.randn(2, 3, *size),), {}
            if ".optical_flow" in kind:
                return (torch.randn(2, 3, 128, 128), torch.randn(2, 3, 128, 128)), {"num_flow_updates": 2}
            for size in (96, 224, 299, 384, 518):
                if _runs(model, torch.randn(2, 3, size, size)):
                    return (torch.randn(2, 3, size, size),), {}
            return (torch.randn(2, 3, 224, 224),), {}

        yield name, (make, inputs)


def _runs(model: nn.Module, x: torch.Tensor) -> bool:
    """Whether a copy of the model runs on `x`, on the meta device."""
    try:
        with torch.no_grad(), torch.device("meta"):
            copy.deepcopy(model).to("meta")(x.to("meta"))
        return True
    except Exception:
        return False


def sources() -> dict[str, Callable[[], Iterator[tuple[str, Example]]]]:
    from tests.zoo_transformers import transformers_models

    return {"timm": timm_models, "torchvision": torchvision_models, "transformers": transformers_models}


class _TooLong(BaseException):
    pass


def _too_long(*_: object) -> None:
    raise _TooLong


def main() -> int:
    signal.signal(signal.SIGALRM, _too_long)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--source", choices=("timm", "torchvision", "transformers"), action="append")
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=10**9)
    parser.add_argument("--json")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    known: dict[str, Row] = {}
    if options.json and os.path.exists(options.json):
        with open(options.json) as file:
            known = {r["name"]: Row(**r) for r in map(json.loads, file)}
    rows: list[Row] = []
    chooser = random.Random(options.seed)
    for source, make in sources().items():
        if options.source and source not in options.source:
            continue
        chosen = [m for m in make() if not options.names or m[0] in options.names]
        if options.share < 1:
            chosen = chooser.sample(chosen, max(1, round(options.share * len(chosen))))
        for name, (build, inputs) in chosen[: options.most]:
            row = known.get(f"{source}/{name}")
            if row is None:
                signal.alarm(240)
                try:
                    row = check(f"{source}/{name}", build, inputs)
                except _TooLong:
                    row = Row(f"{source}/{name}", "skipped", "takes more than four minutes here")
                except Exception as error:
                    row = Row(f"{source}/{name}", "error", f"{type(error).__name__}: {str(error)[:200]}")
                signal.alarm(0)
                gc.collect()
                print(
                    f"{row.status:8}{row.name:52}{row.nodes:6} nodes {row.seconds:6.1f} s {row.forwards:6.1f} forwards "
                    f"{row.difference:8.1e} {row.why}",
                    flush=True,
                )
                if options.json:
                    with open(options.json, "a") as file:
                        file.write(json.dumps(dataclasses.asdict(row)) + "\n")
            rows.append(row)
    counts = Counter(r.status for r in rows)
    ran = sum(n for s, n in counts.items() if s != "skipped")
    right = ran - counts["wrong"] - counts["error"]
    print(", ".join(f"{n} {s}" for s, n in counts.most_common()))
    if ran:
        print(f"right {100 * right / ran:.1f}%, whole {100 * counts['whole'] / ran:.1f}% of {ran}")
    return 1 if counts["wrong"] or counts["error"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
