"""Loader tuning: which setting is chosen, that batches and state stay the same, that no process is left."""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

import fxspeed


class Slow(Dataset):
    """Each item waits, as a disk does."""

    def __init__(self, seconds: float = 0.003, length: int = 64):
        self.seconds, self.length = seconds, length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        time.sleep(self.seconds)
        return torch.full((3,), float(i)), i % 2


class Dying(Slow):
    def __getitem__(self, i):
        if torch.utils.data.get_worker_info() is not None:
            os._exit(3)
        return super().__getitem__(i)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(12.0))


@pytest.fixture(autouse=True)
def _no_process_is_left():
    yield
    assert not multiprocessing.active_children()


def test_workers_are_chosen_where_loading_waits_and_not_where_it_does_not():
    tuned = fxspeed.tune_loader(Slow(), batch_size=8, workers=(0, 2), seconds=0.5)
    assert tuned.num_workers == 2 and tuned.persistent_workers
    assert [t.workers for t in tuned.trials] == [0, 2, 2] and "ms a batch" in str(tuned.trials[0])
    assert tuned.trials[1].seconds < tuned.trials[0].seconds
    assert torch.equal(torch.cat([x[:, 0] for x, _ in tuned]), torch.arange(64.0))
    tuned._iterator._shutdown_workers()
    quick = fxspeed.tune_loader(TensorDataset(torch.arange(64.0)), batch_size=8, workers=(0, 2), seconds=0.2)
    assert quick.num_workers == 0


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_loader_stays_what_it_was(shuffle):
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(Slow(0.001), 8, shuffle=shuffle, drop_last=True, generator=generator)
    state, rng = generator.get_state(), torch.get_rng_state()
    tuned = fxspeed.tune_loader(loader, workers=(2,), seconds=0.1)
    assert torch.equal(generator.get_state(), state) and torch.equal(torch.get_rng_state(), rng)
    assert (tuned.batch_size, tuned.drop_last, tuned.num_workers) == (8, True, 2) and not tuned.persistent_workers
    got = torch.cat([x for x, _ in tuned])
    generator.set_state(state)
    assert torch.equal(got, torch.cat([x for x, _ in loader]))


def test_a_batch_sampler_is_kept():
    loader = DataLoader(Slow(0), batch_sampler=BatchSampler(SequentialSampler(range(10)), 4, False))
    tuned = fxspeed.tune_loader(loader, workers=(0,), seconds=0.05)
    assert [len(y) for _, y in tuned] == [4, 4, 2]


def test_with_a_step_it_leaves_no_trace():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    result = fxspeed.optimize(model, torch.randn(8, 3))
    step = result.train_step(F.cross_entropy, schedule="1cycle", total_steps=3)
    step(torch.randn(8, 3), torch.ones(8, dtype=torch.long))
    before = {n: t.clone() for n, t in result.module.state_dict().items()}
    schedule = step.schedule
    tuned = fxspeed.tune_loader(DataLoader(Slow(0), 8), step, workers=(0, 1), seconds=0.1)
    assert step.steps == 1 and step.schedule is schedule and schedule.last_epoch == 1
    assert all(torch.equal(before[n], t) for n, t in result.module.state_dict().items())
    assert tuned.device == torch.device("cpu")


def test_items_of_a_stream_come_once():
    tuned = fxspeed.tune_loader(Stream(), batch_size=4, seconds=0.1)
    assert {t.workers for t in tuned.trials} == {0, 1}
    assert torch.equal(torch.cat(list(tuned)), torch.arange(12.0))
    if tuned._iterator is not None:
        tuned._iterator._shutdown_workers()


def test_what_cannot_go_to_workers_stays_here_with_a_clear_word():
    tuned = fxspeed.tune_loader(Dying(0), batch_size=8, workers=(0, 2), seconds=0.1)
    assert tuned.num_workers == 0 and "a worker died" in tuned.trials[1].problem
    dataset = Slow(0)
    dataset.transform = lambda x: x
    tuned = fxspeed.tune_loader(dataset, workers=(0, 1), seconds=0.1, multiprocessing_context="spawn", num_workers=1)
    assert tuned.num_workers == 0 and "cannot be sent to workers" in tuned.trials[1].problem


def test_bad_input_has_clear_errors():
    class Broken(Slow):
        def __getitem__(self, i):
            raise OSError("disk is gone")

    for call, word in (
        (lambda: fxspeed.tune_loader(TensorDataset(torch.zeros(0))), "no batches"),
        (lambda: fxspeed.tune_loader(Broken(), workers=(0, 1)), "disk is gone"),
        (lambda: fxspeed.tune_loader(Slow(), workers=(-1,)), "at least 0"),
        (lambda: fxspeed.tune_loader(Slow(), batchsize=3), "batchsize"),
        (lambda: fxspeed.tune_loader(DataLoader(Slow()), batch_size=3), "options go with a dataset"),
    ):
        with pytest.raises(fxspeed.Error, match=word):
            call()
