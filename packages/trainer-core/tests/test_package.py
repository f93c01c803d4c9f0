"""Importing the package: no heavy modules, no side effects, sorted exports."""

from __future__ import annotations

import subprocess
import sys

import hocket.trainer

_IMPORT = """
import signal, sys, threading, torch
before, handlers = set(sys.modules), [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
import hocket.trainer, hocket.trainer.callbacks, hocket.trainer.loggers, hocket.trainer.optim
brought = {name.partition(".")[0] for name in set(sys.modules) - before}
assert not brought & {"rich", "torchmetrics", "tensorboard", "wandb", "torchvision", "transformers"}
# The time of an import follows from how much it reads: torch alone brings over 1,500 modules.
assert len(set(sys.modules) - before) < 250, len(set(sys.modules) - before)
assert handlers == [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
assert threading.active_count() == 1
assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()
assert {name.split(".")[1] for name in sys.modules if name.startswith("hocket.")} == {"trainer"}
"""


def test_importing_imports_no_heavy_modules_and_has_no_side_effects():
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", _IMPORT], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


def test_exports_are_sorted_and_exist():
    assert hocket.trainer.__all__ == sorted(hocket.trainer.__all__)
    for name in hocket.trainer.__all__:
        assert getattr(hocket.trainer, name).__module__.startswith("hocket.trainer.")
