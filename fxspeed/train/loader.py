"""Data loading that keeps up: worker counts measured, pinned memory, prefetch to the device."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fxspeed.errors import Error
from fxspeed.graph.state import preserved_rng
from fxspeed.graph.structure import tensors_in
from fxspeed.train.batch import split, to_device
from fxspeed.train.progress import progress
from fxspeed.train.snapshot import fresh, no_trace
from fxspeed.train.step import TrainStep

#: A setting must be this much faster to be preferred to one with fewer workers.
_MARGIN = 0.95


@dataclasses.dataclass(frozen=True)
class Trial:
    """One setting tried: seconds for a batch (the median), or why it does not work."""

    workers: int
    prefetch_factor: int | None
    seconds: float
    problem: str = ""

    def __str__(self) -> str:
        figure = self.problem or f"{1e3 * self.seconds:.2f} ms a batch"
        ahead = f", {self.prefetch_factor} batches ahead each" if self.prefetch_factor else ""
        return f"{self.workers} workers{ahead}: {figure}"


class TunedLoader(DataLoader):
    """A DataLoader whose batches come to the device ahead of their use.

    On CUDA the copy of the next batch runs on a stream of its own, out of pinned memory, while the step works on the
    one before. On a CPU it is a plain DataLoader.

    Attributes:
        trials: what was measured.
        device: where batches arrive, or None for where they are made.
    """

    trials: tuple[Trial, ...] = ()
    device: torch.device | None = None

    def __iter__(self) -> Any:
        batches = super().__iter__()
        if self.device is None or self.device.type != "cuda":
            return batches
        return _ahead(batches, self.device)


def _ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Batches on the device, each copied while the one before is in use."""
    stream = torch.cuda.Stream(device)

    def copied() -> Any:
        batch = next(batches, None)
        with torch.cuda.stream(stream):
            return batch, to_device(batch, device)

    host, ready = copied()
    while host is not None:
        torch.cuda.current_stream(device).wait_stream(stream)
        for tensor in tensors_in(ready):
            tensor.record_stream(torch.cuda.current_stream(device))
        now = ready
        host, ready = copied()
        yield now


def tune_loader(
    dataset_or_loader: Dataset | DataLoader,
    step: TrainStep | None = None,
    *,
    workers: Sequence[int] | None = None,
    seconds: float = 2.0,
    **loader_options: Any,
) -> TunedLoader:
    """Measure how many workers load fastest, and return a loader that has them.

    The batches are those of the given loader in the same order: dataset, sampler, batch size, collation and generators
    are its own; persistent workers too, since a dataset that is changed between epochs would not change in them (a
    dataset given without a loader gets them). Random augmentations inside workers draw from the workers' own seeds,
    as always with DataLoader.

    Args:
        dataset_or_loader: a DataLoader, or a dataset to which `loader_options` (batch_size, shuffle, ...) apply.
        step: the step to feed. Then a batch is timed with its training step, since workers and step share the
            processor, and batches arrive on the step's device. It leaves no trace in the step.
        workers: counts to try; default 0, 1, 2, 4, ... up to the processor's cores. For an IterableDataset only those
            that cannot yield items twice: the loader's own, and with 0 there also 1.
        seconds: time for each setting.

    Source: the PyTorch performance tuning guide, "Enable asynchronous data loading and augmentation".

    Raises:
        Error: there are no batches, or the dataset fails in this process too.
    """
    if isinstance(dataset_or_loader, DataLoader):
        if loader_options:
            raise Error(f"{', '.join(loader_options)}: options go with a dataset; this loader has its own")
        options = _options_of(dataset_or_loader)
    else:
        options = {"dataset": dataset_or_loader, **loader_options}
    try:
        given = DataLoader(**options)
    except (TypeError, ValueError) as error:
        raise Error(f"no DataLoader can be made of these options: {error}") from error
    device = step.device if step is not None else torch.device("cuda") if torch.cuda.is_available() else None
    options["pin_memory"] = given.pin_memory or (device is not None and device.type == "cuda")
    options["persistent_workers"] = not isinstance(dataset_or_loader, DataLoader) or given.persistent_workers
    counts = _counts(given, workers)
    with preserved_rng(), no_trace(step) if step is not None else contextlib.nullcontext():
        trials = [_try({**options, **_parallel(n)}, step, seconds) for n in progress(counts, "loader workers")]
        working = [t for t in trials if not t.problem]
        if not working:
            raise Error(f"no setting can load a batch: {trials[0].problem}")
        best = _best(working)
        if best.workers:  # more batches ahead even out those that take long
            trials.append(_try({**options, **_parallel(best.workers, 4)}, step, seconds))
            best = _best([best, trials[-1]])
    made = TunedLoader(**{**options, **_parallel(best.workers, best.prefetch_factor)})
    made.trials, made.device = tuple(trials), device
    return made


def _options_of(loader: DataLoader) -> dict[str, Any]:
    """The arguments that make a loader like this one."""
    names = ("dataset", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator")
    options = {name: getattr(loader, name) for name in (*names, "num_workers", "in_order")}
    if not loader.num_workers:
        del options["multiprocessing_context"]
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        options.update(batch_size=loader.batch_size, drop_last=loader.drop_last)
        if not isinstance(loader.dataset, IterableDataset):
            options.update(sampler=loader.sampler)
    elif loader.batch_size is None:
        options.update(batch_sampler=loader.batch_sampler)
    else:
        options.update(batch_size=loader.batch_size, drop_last=loader.drop_last, sampler=loader.sampler)
    return options


def _counts(loader: DataLoader, workers: Sequence[int] | None) -> list[int]:
    if workers is not None:
        bad = [w for w in workers if not isinstance(w, int) or w < 0]
        if bad or not workers:
            raise Error(f"workers is {workers!r}; give whole numbers of at least 0, as in (0, 2, 4)")
        return list(dict.fromkeys(workers))
    if isinstance(loader.dataset, IterableDataset):
        return sorted({loader.num_workers, 1} if loader.num_workers == 0 else {loader.num_workers})
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    powers = [2**i for i in range(10) if 2**i < cores]
    return sorted({0, *powers, cores, loader.num_workers})


def _parallel(workers: int, prefetch_factor: int | None = None) -> dict[str, Any]:
    """Options of a number of workers."""
    if not workers:
        return {"num_workers": 0, "timeout": 0, "multiprocessing_context": None, "persistent_workers": False}
    return {"num_workers": workers, "prefetch_factor": prefetch_factor or 2}


def _best(trials: Sequence[Trial]) -> Trial:
    """The fastest, fewer workers and less memory before a gain within the noise."""
    best = trials[0]
    for trial in trials[1:]:
        if not trial.problem and trial.seconds < _MARGIN * best.seconds:
            best = trial
    return best


def _try(options: dict[str, Any], step: TrainStep | None, seconds: float) -> Trial:
    """Time batches of one setting. No process is left behind."""
    workers, ahead = options["num_workers"], options.get("prefetch_factor")
    try:
        with fresh(DataLoader(**options)) as loader:
            return Trial(workers, ahead, _seconds_a_batch(loader, step, seconds))
    except Error:
        raise
    except Exception as error:
        return Trial(workers, ahead, 0.0, _problem(error))


def _problem(error: Exception) -> str:
    text = str(error).strip()
    if "pickle" in text.lower() or isinstance(error, pickle.PicklingError):
        return f"the dataset cannot be sent to workers ({text}); define its classes and functions at module level"
    if "exited unexpectedly" in text:
        return f"a worker died ({text}); it was killed, or ran out of memory or of shared memory in /dev/shm"
    return f"{type(error).__name__}: {text.splitlines()[-1] if text else ''}"


def _seconds_a_batch(loader: Iterable[Any], step: TrainStep | None, seconds: float) -> float:
    """Mean seconds from a batch to the next; starting the workers is left out."""
    begin, done = 0.0, 0
    while not done or time.perf_counter() - begin < seconds:
        empty = True
        for batch in loader:
            empty = False
            if step is not None:
                inputs, targets = split(batch)
                step(inputs, *targets)
            if not begin:
                begin = time.perf_counter()
                continue
            done += 1
            if time.perf_counter() - begin > seconds:
                break
        if empty:
            raise Error("the loader has no batches")
    if step is not None and step.device.type == "cuda":
        torch.cuda.synchronize(step.device)
    return (time.perf_counter() - begin) / done
