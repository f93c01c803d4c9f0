"""Faults that a drill injects into the ranks of a job, each after an optimizer step of one rank.

A drill names fault, rank and step in the variable `HOCKET_DRILL`. Steps are counted by a hook of torch, so
that any training loop will do. After each step every rank also writes a digest of its parameters, by which
a run is compared with the run without a fault.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

VARIABLE = "HOCKET_DRILL"
RANK_FAULTS = ("killed", "stopped", "memory", "raised", "branch", "length", "order", "slow")
"""The faults that a rank makes by itself."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_END_S = 1.0
"""Seconds for which a rank waits with its end, so that no other rank misses it in a collective."""

_installed: "FaultInjection | None" = None


class FaultInjection:
    """The part of a drill in one rank.

    Args:
        rank: Among all ranks.
        folder: The folder in which ranks write their steps.
        fault: One of `RANK_FAULTS`, or another word for none.
        fault_rank: The rank that makes it.
        step: The optimizer step after which it is made, from 1; a rank makes it once.
        steps: The number of steps of the run without a fault.
        timeout_s: The deadline of collectives.
    """

    def __init__(
        self, rank: int, *, folder: str, fault: str, fault_rank: int, step: int, steps: int, timeout_s: float
    ) -> None:
        self._rank = rank
        self._folder = Path(folder)
        self._fault = fault
        self._fault_rank = fault_rank
        self._step = step
        self._steps = steps
        self.timeout_s = timeout_s
        self._count = 0
        last = self._folder / f"last-{rank}"
        self._last = last.read_text() if last.exists() else None

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Note a step, and make the fault if it is time."""
        del args, kwargs
        self._count += 1
        digest = digest_of(optimizer)
        with (self._folder / f"steps-{self._rank}").open("a") as file:
            print(time.time(), digest, os.getpid(), file=file)
        marker = self._folder / f"made-{self._rank}"
        if self._count == self._step and not marker.exists():
            marker.write_text(str(time.time()))
            self._make(optimizer)
        if digest == self._last if self._last is not None else self._count == self._steps:
            time.sleep(_END_S)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def _make(self, optimizer: Optimizer) -> None:
        """Make the fault; in another order of collectives, all ranks have a part."""
        device = optimizer.param_groups[0]["params"][0].device
        is_own = self._rank == self._fault_rank
        if self._fault == "order":
            sizes = (5, 3) if is_own else (3, 5)
            for size in sizes:
                dist.all_reduce(torch.ones(size, device=device))
        if not is_own:
            return
        if self._fault in ("killed", "stopped"):
            os.kill(os.getpid(), signal.SIGKILL if self._fault == "killed" else signal.SIGSTOP)
        elif self._fault == "memory":
            torch.empty(1 << 50, dtype=torch.uint8, device=device)
        elif self._fault == "raised":
            raise ValueError("a drill has raised this error")
        elif self._fault == "branch":
            dist.barrier()
        elif self._fault == "length":
            sys.exit(0)
        elif self._fault == "slow":
            time.sleep(self.timeout_s * 1.5 + 5)


def digest_of(optimizer: Optimizer) -> str:
    """Return a digest of the parameters of an optimizer, of this rank's shards where they are sharded."""
    total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            flat = local.detach().contiguous().flatten()
            numbers = flat.view(_INTEGERS.get(flat.element_size(), torch.int64)).to(torch.int64)
            weights = torch.arange(1, numbers.numel() + 1, device=numbers.device)
            total = (total * 31 + int((numbers * weights).sum())) & (2**64 - 1)
    return f"{total:016x}"


def inject_faults(rank: int, timeout_s: float) -> float:
    """Install what the drill says in this process, once; return the deadline of collectives.

    Args:
        rank: Of this process, among all.
        timeout_s: The deadline that the job asks for; a drill may shorten it.
    """
    global _installed
    if VARIABLE not in os.environ:
        return timeout_s
    if _installed is None:
        _installed = FaultInjection(rank, **json.loads(os.environ[VARIABLE]))
        register_optimizer_step_post_hook(_installed)
    return min(timeout_s, _installed.timeout_s)
