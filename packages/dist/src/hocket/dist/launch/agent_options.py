"""Options of torchrun that the elastic agent of an older torch does not have.

`--signals-to-handle` and `--shutdown-timeout` came after torch 2.9. Newer agents read them, but apply the
shutdown timeout only if a signal ends the job: after the failure of a rank they wait 30 s for the others.
"""

import argparse
import contextlib
import signal
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.launcher.api import LaunchConfig

from hocket.dist.launch.notices import Notices

DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
DEFAULT_PORT = 29500
DEFAULT_SHUTDOWN_S = 30

_HAS_OPTIONS = {"signals_to_handle", "shutdown_timeout"} <= {field.name for field in fields(LaunchConfig)}


def add_missing_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that torch's parser lacks, with the defaults of a torch that has them."""
    if _HAS_OPTIONS:
        return
    parser.add_argument("--signals-to-handle", "--signals_to_handle", default=DEFAULT_SIGNALS)
    parser.add_argument("--shutdown-timeout", "--shutdown_timeout", type=int, default=DEFAULT_SHUTDOWN_S)
    if parser.get_default("master_port") == DEFAULT_PORT:
        parser.set_defaults(master_port=None)


@contextlib.contextmanager
def missing_options(options: argparse.Namespace) -> Iterator[None]:
    """Apply, within the block, the options that torch's agent does not read or applies only in part.

    Args:
        options: The parsed options, with `signals_to_handle` and `shutdown_timeout`.
    """
    context: Any = api.PContext
    close = context.close
    old_handlers: dict[signal.Signals, Any] = {}

    notices = Notices()

    def close_in_time(self: Any, death_sig: signal.Signals | None = None, _timeout: int = 0) -> None:
        close(self, death_sig, notices.grace_s(self, options.shutdown_timeout))

    with notices.handled():
        try:
            for name in () if _HAS_OPTIONS else options.signals_to_handle.split(","):
                number = signal.Signals[name.strip()]
                old_handlers[number] = signal.signal(number, api._terminate_process_handler)
            context.close = close_in_time
            yield
        finally:
            context.close = close
            for number, handler in old_handlers.items():
                signal.signal(number, handler)
