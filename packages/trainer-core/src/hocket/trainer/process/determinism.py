"""`deterministic`: torch's deterministic kernels for as long as a trainer lives."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextlib.contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Make torch use only deterministic kernels in the whole process; restore its settings at the end.

    Args:
        device: The device of training. On CUDA, cuDNN's choice of kernels by timing is switched off, and
            cuBLAS gets a fixed workspace, which takes effect unless cuBLAS was used before.
    """
    was_on = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, workspace = torch.backends.cudnn.benchmark, os.environ.get(_WORKSPACE)
    torch.use_deterministic_algorithms(True)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = False
        os.environ.setdefault(_WORKSPACE, ":4096:8")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned_only)
        torch.backends.cudnn.benchmark = benchmark
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)
