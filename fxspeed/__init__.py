"""fxspeed: rewrites a PyTorch model's training graph to be faster and smaller, and checks every rewrite."""

from fxspeed.audit import Audit, Finding, audit
from fxspeed.errors import BudgetError, Error, VerificationError
from fxspeed.optimize import optimize
from fxspeed.passes.base import Change, Pass, Skip
from fxspeed.result import Optimized
from fxspeed.train.batch_size import BatchSize, find_batch_size
from fxspeed.train.loader import TunedLoader, tune_loader
from fxspeed.train.lr_finder import RangeTest, find_lr
from fxspeed.train.step import TrainStep

__all__ = [
    "Audit",
    "BatchSize",
    "BudgetError",
    "Change",
    "Error",
    "Finding",
    "Optimized",
    "Pass",
    "RangeTest",
    "Skip",
    "TrainStep",
    "TunedLoader",
    "VerificationError",
    "audit",
    "find_batch_size",
    "find_lr",
    "optimize",
    "tune_loader",
]
