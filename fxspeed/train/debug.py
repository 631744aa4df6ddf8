"""Debug APIs of torch that make every step slower and are easily left on."""

from __future__ import annotations

import sys
import threading

import torch


def debug_apis() -> list[str]:
    """Those that are on now, each with the call that turns it off."""
    found = []
    if torch.is_anomaly_enabled():
        found.append("autograd anomaly detection (torch.autograd.set_detect_anomaly(False))")
    if torch.autograd._profiler_enabled():
        found.append("the autograd profiler (leave torch.profiler.profile out of normal steps)")
    if torch.is_deterministic_algorithms_warn_only_enabled() or torch.are_deterministic_algorithms_enabled():
        found.append("deterministic algorithms (torch.use_deterministic_algorithms(False), if you can do without)")
    if torch.cuda.is_available() and torch.cuda.get_sync_debug_mode():
        found.append("CUDA's sync debug mode (torch.cuda.set_sync_debug_mode(0))")
    if torch.distributed.is_available() and torch.distributed.get_debug_level() != torch.distributed.DebugLevel.OFF:
        found.append("TORCH_DISTRIBUTED_DEBUG (unset it)")
    if sys.gettrace() is not None or threading.gettrace() is not None:
        found.append("a Python tracer, of a debugger or a coverage tool")
    return found
