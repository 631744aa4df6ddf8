"""fxspeed: rewrites a PyTorch model's training graph to be faster and smaller, and checks every rewrite."""

from fxspeed.errors import BudgetError, Error, VerificationError
from fxspeed.optimize import optimize
from fxspeed.result import Optimized

__all__ = ["BudgetError", "Error", "Optimized", "VerificationError", "optimize"]
