"""Options of torchrun that the elastic agent of an older torch does not have.

`--signals-to-handle` and `--shutdown-timeout` came after torch 2.9. Newer agents read them, but apply the
shutdown timeout only if a signal ends the job: after the failure of a rank they wait 30 s for the others.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.launcher.api import LaunchConfig

from hocket.dist.launch.notices import Notices
from hocket.dist.launch.verdicts.job_findings import JobFindings
from hocket.dist.ranks.failures import FAILURE
from hocket.dist.ranks.stack_dump import process_state

DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
DEFAULT_PORT = 29500
DEFAULT_SHUTDOWN_S = 30

SURVIVORS_S = 0.3
"""Seconds between SIGTERM and SIGKILL for the other ranks, after a rank has failed by itself.

They cannot train on, and most are blocked in a collective with that rank, where SIGTERM has no effect.
"""

_HAS_OPTIONS = {"signals_to_handle", "shutdown_timeout"} <= {field.name for field in fields(LaunchConfig)}


def add_missing_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that torch's parser lacks, with the defaults of a torch that has them."""
    if _HAS_OPTIONS:
        return
    parser.add_argument("--signals-to-handle", "--signals_to_handle", default=DEFAULT_SIGNALS)
    parser.add_argument("--shutdown-timeout", "--shutdown_timeout", type=int, default=DEFAULT_SHUTDOWN_S)
    if parser.get_default("master_port") == DEFAULT_PORT:
        parser.set_defaults(master_port=None)


def _kill_stopped(context: Any) -> None:
    """Kill the ranks that SIGSTOP has stopped: they would not act on SIGTERM, and all would wait for them."""
    for local_rank, pid in context.pids().items() if context.subprocess_handlers else ():
        with contextlib.suppress(OSError):
            if process_state(pid) == "T":
                os.kill(pid, signal.SIGKILL)
                rank = context.envs[local_rank].get("RANK", local_rank)
                text = f"rank {rank} (pid {pid}) had been stopped, as by SIGSTOP, and was killed"
                print(f"hocket-launch: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def missing_options(options: argparse.Namespace, findings: JobFindings) -> Iterator[None]:
    """Apply, within the block, the options that torch's agent does not read or applies only in part.

    Args:
        options: The parsed options, with `signals_to_handle` and `shutdown_timeout`.
        findings: Gets the states of the ranks before they are ended.
    """
    context: Any = api.PContext
    close = context.close
    old_handlers: dict[signal.Signals, Any] = {}

    notices = Notices()

    def close_in_time(self: Any, death_sig: signal.Signals | None = None, _timeout: int = 0) -> None:
        found_at = time.time()
        timeout_s = notices.grace_s(self, options.shutdown_timeout)
        findings.observe(self)
        _kill_stopped(self)
        # Torch's agent names no signal where a rank has failed, or all have ended.
        if death_sig is None and findings.has_cause():
            timeout_s = min(timeout_s, SURVIVORS_S)
        close(self, death_sig, timeout_s)
        if death_sig is None:
            os.environ[FAILURE] = json.dumps({"found": found_at, "ended": time.time()})

    with notices.handled():
        try:
            for name in () if _HAS_OPTIONS else options.signals_to_handle.split(","):
                number = signal.Signals[name.strip()]
                old_handlers[number] = signal.signal(number, api._terminate_process_handler)
            context.close = close_in_time
            yield
        finally:
            context.close = close
            os.environ.pop(FAILURE, None)
            for number, handler in old_handlers.items():
                signal.signal(number, handler)
