"""A training step as Python that needs torch alone."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fxspeed.emit.constructors import constructor, literal
from fxspeed.emit.formatted import formatted
from fxspeed.emit.source import function_name
from fxspeed.errors import Error
from fxspeed.train import averaging, precision
from fxspeed.train.distributed import Parallel

_STAND_IN = '''
def loss_fn(output, *targets):
    """Stands for your loss{which}: the loss that the model returns, or else the mean square of its outputs."""
    if isinstance(output, dict) and output.get("loss") is not None:
        return output["loss"]
    values = output.values() if isinstance(output, dict) else [output] if isinstance(output, torch.Tensor) else output
    return sum(t.float().square().mean() for t in values if isinstance(t, torch.Tensor) and t.requires_grad)
'''
_BATCH_SIZE = '''
def batch_size(inputs):
    """Items in a micro-batch: the first dimension of its first tensor."""
    while not isinstance(inputs, torch.Tensor):
        inputs = next(iter(inputs.values() if isinstance(inputs, dict) else inputs))
    return inputs.shape[0]
'''
_NORMALIZED = '''
    def normalized(self, inputs):
        """Images as the model takes them; uint8 ones are brought to [0, 1] first."""
        if isinstance(inputs, tuple):
            return self.normalized(inputs[0]), *inputs[1:]
        if isinstance(inputs, dict):
            first = next(iter(inputs))
            return {**inputs, first: self.normalized(inputs[first])}
        image = inputs.to(self.mean.dtype)
        return ((image / 255 if inputs.dtype is torch.uint8 else image) - self.mean) / self.std
'''
_FORWARD = """
    def forward(self, inputs):
        if isinstance(inputs, dict):
            return self.model(**inputs)
        return self.model(*inputs) if isinstance(inputs, tuple) else self.model(inputs)
"""
_EVALUATE = '''
    def evaluate(self, inputs, *targets):
        """Loss and output in eval mode, without gradients; the mode is restored."""
        training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode():
                output = self.forward({inputs})
                return self.loss_fn(output, *targets), output
        finally:
            self.model.train(training)
'''
_MAIN = '''
def main(steps: int = 3) -> None:
    """Train a few steps on {what} and print the losses."""
    from .model import example, load

    model = load().train()
    step = TrainStep(model)
    args, kwargs = example()
    inputs = kwargs if kwargs else args
    targets = {targets}
    for _ in range(steps):
        print(f"loss {{step(inputs, *targets).item():.4f}}")


if __name__ == "__main__":
    main()
'''


def step_source(step: Any) -> str:
    """The text of a module with a class `TrainStep(model)` that steps as `step` does.

    Raises:
        Error: the step is spread over processes, or its optimizer or schedule cannot be written.
    """
    if type(step.parallel) is not Parallel:
        raise Error(f"the source of a step under {step.parallel.name} is not written; build it with distributed=None")
    loss, named = _loss(step.loss_fn)
    several, scaled, averaged = step.accumulate > 1, step.scaler is not None, step.average is not None
    said = ", ".join(f"{s.name} {s.value}" for s in step.settings if s.value is not None and s.name != "gradients")
    helpers = [loss]
    if callable(step.given_schedule):
        helpers.append(_portable(step.given_schedule, "make_schedule") or "")
    if several:
        helpers.append(_BATCH_SIZE)
    if scaled:
        helpers += [inspect.getsource(f) for f in (precision.Scaler, precision.Flag, precision._tensors)]
    if averaged:
        helpers.append(inspect.getsource(averaging.Average))
    inputs = "self.normalized(inputs)" if step._normalize is not None else "inputs"
    schedule = _schedule(step)
    parts = [
        _init(step, schedule),
        _call(step, inputs),
        _flush(step) if several else "",
        _step(step, schedule is not None),
        _NORMALIZED if step._normalize is not None else "",
        _FORWARD,
        _EVALUATE.format(inputs=inputs),
    ]
    body = "\n".join(p.strip("\n") + "\n" for p in parts if p)
    text = "\n".join(helpers) + body
    imports = ["import torch"]
    if "F." in text:
        imports.append("import torch.nn.functional as F")
    if "pytorch_optimizer" in body:
        imports.insert(0, "import pytorch_optimizer")
    imports.append("from torch import nn")
    standard = [line for word, line in (
        ("contextlib.", "import contextlib"), ("functools.", "import functools"),
        ("Iterator", "from collections.abc import Iterator"), ("Any", "from typing import Any"),
    ) if word in text]  # fmt: skip
    head = [f'"""A training step: {said}."""', "from __future__ import annotations"]
    head += ["\n".join(standard)] if standard else []
    head.append("\n".join(imports))
    targets, what = _targets(step) if named else ("()", "example inputs, with a loss that stands for yours")
    return formatted(
        "\n\n".join(head)
        + "\n\n"
        + "\n\n".join(
            part.strip("\n") + "\n"
            for part in (*helpers, f"class TrainStep:\n{body}", _MAIN.format(what=what, targets=targets))
        )
    )


def _init(step: Any, schedule: str | None) -> str:
    lines = ["self.model, self.loss_fn = model, loss_fn"]
    lines.append("self.parameters = [p for p in model.parameters() if p.requires_grad]")
    lines.append(f"self.optimizer = {_optimizer(step)}")
    if schedule is not None:
        lines.append(f"self.schedule = {schedule}")
    if step.total_steps is not None and schedule is not None:
        lines.append(f"self.total_steps = {step.total_steps}")
    if step.scaler is not None:
        lines.append("self.scaler = Scaler(self.parameters[0].device)")
        if schedule is not None:
            lines.append("self.pending = None  # whether the last step counted: asked when the answer is there")
    if step.average is not None:
        lines.append(f"self.average = Average(model, {step.average.decay})")
    if step.accumulate > 1:
        lines.append("self.seen, self.weight, self.first = 0, 0.0, 1")
    if step._normalize is not None:
        for name, value in zip(("mean", "std"), step._normalize, strict=True):
            numbers = f"torch.tensor({value.flatten().tolist()}, dtype={value.dtype}, device=self.parameters[0].device)"
            lines.append(f"self.{name} = {numbers}.reshape(-1, 1, 1)")
    return "    def __init__(self, model, loss_fn=loss_fn):\n" + textwrap.indent("\n".join(lines), " " * 8) + "\n"


def _call(step: Any, inputs: str) -> str:
    factor = "loss"
    lines = []
    if step.accumulate > 1:
        lines += ["items = batch_size(inputs)", "if self.seen == 0:", "    self.first = items"]
        lines.append("weight = items / self.first")
        factor = "(loss if weight == 1.0 else loss * weight)"
    lines.append(f"loss = self.loss_fn(self.forward({inputs}), *targets)")
    if step.scaler is not None:
        factor = f"({factor} * self.scaler.scale.to(loss.dtype))"
    lines.append(f"{factor}.backward()")
    if step.accumulate > 1:
        lines += ["self.seen += 1", "self.weight += weight", f"if self.seen == {step.accumulate}:", "    self.step()"]
    else:
        lines.append("self.step()")
    lines.append("return loss.detach()")
    each = f"{step.accumulate} of them make a step" if step.accumulate > 1 else "and the optimizer's step"
    doc = f'"""Forward and backward of one micro-batch; {each}. Returns the detached loss, on the device."""'
    return "    def __call__(self, inputs, *targets):\n" + textwrap.indent("\n".join([doc, *lines]), " " * 8) + "\n"


def _flush(step: Any) -> str:
    return '''
    def flush(self):
        """Step on an incomplete accumulation, averaged over what was seen."""
        if self.seen:
            self.step()
'''


def _step(step: Any, scheduled: bool) -> str:
    lines = ["gradients = [p.grad for p in self.parameters if p.grad is not None]"]
    if step.accumulate > 1:
        lines += ["if self.weight != 1.0:", "    torch._foreach_div_(gradients, self.weight)"]
    advance = ["self.schedule.step()"]
    if step.total_steps is not None:
        advance = ["if self.schedule.last_epoch + 1 < self.total_steps:", "    self.schedule.step()"]
    if step.scaler is not None:
        if scheduled:
            lines += ["if self.pending is not None and not self.pending:", *(f"    {line}" for line in advance)]
        lines.append("self.scaler.unscale(gradients)")
    if step.clip_norm is not None:
        lines.append(f"nn.utils.clip_grad_norm_(self.parameters, {step.clip_norm!r})")
    lines.append("self.scaler.step(self.optimizer)" if step.scaler is not None else "self.optimizer.step()")
    if step.average is not None:
        lines.append(f"self.average.update({'self.scaler.found' if step.scaler is not None else 'None'})")
    lines.append("self.optimizer.zero_grad(set_to_none=True)")
    if step.accumulate > 1:
        lines.append("self.seen, self.weight = 0, 0.0")
    if scheduled:
        lines += ["self.pending = Flag(self.scaler.found)"] if step.scaler is not None else advance
    doc = '"""One optimizer step on the gradients that are there."""'
    return "    def step(self):\n" + textwrap.indent("\n".join([doc, *lines]), " " * 8) + "\n"


# ---------------------------------------------------------------------- what the step is made of
def _optimizer(step: Any) -> str:
    optimizer = step.optimizer
    cls = type(optimizer)
    package = cls.__module__.split(".")[0]
    if getattr(torch.optim, cls.__name__, None) is cls:
        name = f"torch.optim.{cls.__name__}"
    elif package == "pytorch_optimizer":
        name = f"pytorch_optimizer.{cls.__name__}"
    else:
        raise Error(f"the optimizer {cls.__name__} is a class of yours: it cannot be written")
    signature = inspect.signature(cls.__init__).parameters
    chosen = {
        k: v
        for k, v in optimizer.defaults.items()
        if k in signature and (k == "lr" or not _same(v, signature[k].default))
    }
    own = {id(p): n for n, p in step.module.named_parameters()}
    trained = [n for n, p in step.module.named_parameters() if p.requires_grad]
    groups = []
    for group in optimizer.param_groups:
        names = [own[id(p)] for p in group["params"]]
        moved = ("params", "lr", "betas", "momentum") if step.schedule is not None else ("params",)
        differing = {
            k: v
            for k, v in group.items()
            if k in optimizer.defaults and k not in moved and not _same(v, optimizer.defaults[k])
        }
        groups.append((names, differing))
    options = ", ".join(f"{k}={_literal(v, k)}" for k, v in chosen.items())
    if len(groups) == 1 and groups[0][0] == trained and not groups[0][1]:
        return f"{name}(self.parameters, {options})"
    dims = {n: p.dim() for n, p in step.module.named_parameters()}
    rules = {"p.dim() > 1": [n for n in trained if dims[n] > 1], "p.dim() <= 1": [n for n in trained if dims[n] <= 1]}
    written = []
    for names, differing in groups:
        rule = next((r for r, found in rules.items() if found == names), None)
        chosen_by = (
            f"[p for p in self.parameters if {rule}]" if rule else f"[model.get_parameter(n) for n in {names!r}]"
        )
        if names == trained:
            chosen_by = "self.parameters"
        more = "".join(f", {k!r}: {_literal(v, k)}" for k, v in differing.items())
        written.append(f'{{"params": {chosen_by}{more}}}')
    return f"{name}([{', '.join(written)}], {options})"


def _literal(value: Any, name: str) -> str:
    try:
        return literal(value)
    except TypeError:
        raise Error(f"the optimizer's {name} is a {type(value).__name__}: it cannot be written") from None


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def _schedule(step: Any) -> str | None:
    made = step.schedule
    if made is None:
        return None
    given = step.given_schedule
    if given == "1cycle":
        options = f"max_lr={step.lr!r}, total_steps={step.total_steps}, cycle_momentum={made.cycle_momentum}"
        return f"torch.optim.lr_scheduler.OneCycleLR(self.optimizer, {options})"
    if given == "cyclic":
        options = f"base_lr={step.lr / 10!r}, max_lr={step.lr!r}, step_size_up={int(made.total_size * made.step_ratio)}"
        return f"torch.optim.lr_scheduler.CyclicLR(self.optimizer, {options}, cycle_momentum={made.cycle_momentum})"
    if _portable(given, "make_schedule") is None:
        raise Error("the schedule is a function that needs your code: it cannot be written; give a name")
    return "make_schedule(self.optimizer)"


def _loss(loss_fn: Any) -> tuple[str, bool]:
    """The definition of `loss_fn`, and whether it is the user's."""
    if isinstance(loss_fn, nn.Module):
        text = constructor(loss_fn)
        return (f"loss_fn = {text}\n", True) if text is not None else (_STAND_IN.format(which=""), False)
    if isinstance(loss_fn, functools.partial) and not loss_fn.args and _is_torchs(loss_fn.func):
        try:
            options = ", ".join(f"{k}={literal(v)}" for k, v in loss_fn.keywords.items())
        except TypeError:
            return _STAND_IN.format(which=""), False
        return f"loss_fn = functools.partial({function_name(loss_fn.func)}, {options})\n", True
    if _is_torchs(loss_fn):
        return f"loss_fn = {function_name(loss_fn)}\n", True
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    text = _portable(loss_fn, "loss_fn")
    return (text, True) if text is not None else (_STAND_IN.format(which=f" ({name})"), False)


def _is_torchs(function: Any) -> bool:
    try:
        return eval(function_name(function), {"torch": torch, "F": F}) is function
    except Exception:
        return False


def _portable(function: Callable, name: str) -> str | None:
    """The definition, by this name, of a function that needs torch, its arguments and builtins; None of any other."""
    if not inspect.isfunction(function) or function.__closure__:
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)).strip())
    except (OSError, SyntaxError, TypeError):
        return None
    kind: Any = ast.Lambda if function.__name__ == "<lambda>" else ast.FunctionDef
    found = [n for n in ast.walk(tree) if isinstance(n, kind)]
    if len(found) != 1 or getattr(found[0], "decorator_list", []):
        return None
    space = {"torch": torch, "F": F, "nn": nn}
    loaded = {n.id for n in ast.walk(found[0]) if isinstance(n, ast.Name)} - set(function.__code__.co_varnames)
    theirs = loaded & function.__globals__.keys()
    if any(function.__globals__[n] is not space.get(n) for n in theirs):
        return None
    if isinstance(found[0], ast.Lambda):
        return f"def {name}({ast.unparse(found[0].args)}):\n    return {ast.unparse(found[0].body)}\n"
    renamed = "" if function.__name__ == name else f"\n\n{name} = {function.__name__}\n"
    return f"{ast.unparse(found[0])}\n{renamed}"


def _targets(step: Any) -> tuple[str, str]:
    """Targets like those that the step has seen, and what main trains on."""
    if step.seen_targets is None:
        return "()  # your targets", "example inputs; give it targets where your loss takes them"
    written = []
    for shape, dtype in step.seen_targets:
        make = "torch.randn" if dtype.is_floating_point else "torch.zeros"
        written.append(f"{make}({tuple(shape)}, dtype={dtype})")
    return f"({', '.join(written)}{',' if len(written) == 1 else ''})", "inputs and targets of the shapes seen"
