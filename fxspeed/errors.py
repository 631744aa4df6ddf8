"""The errors that fxspeed raises on purpose."""

from __future__ import annotations


class Error(Exception):
    """Base of every error raised on purpose: what went wrong, where, and what to do."""


class BudgetError(Error):
    """No plan keeps the memory budget that was given."""


class VerificationError(Error):
    """A rewritten model differs from the model before it."""


class Differs(Error):
    """A module that stayed Python returned something else than when the graph around it was captured."""


class Untraceable(Error):
    """Code that cannot become graph nodes. Caught by capture: the module that holds it stays as it was written."""
