"""The environment of the process: report, packages, ports, number types, and calls that are tried again."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import platform
import random
import socket
import sys
import time
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Any, TextIO

import psutil
import torch

from hocket.compat.composer.utils import dist

#: torch's number types by name.
STR_TO_DTYPE = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


def get_free_tcp_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as bound:
        bound.bind(("", 0))
        port: int = bound.getsockname()[1]
    return port


def import_object(name: str) -> Any:
    """Return the object that `module:attribute` names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


_is_reporting = True


def get_composer_env_dict() -> dict[str, Any]:
    """Return a description of the machine, and the versions of its software."""
    has_gpu = torch.cuda.is_available()
    return {
        "composer_version": "0.32.1",
        "composer_commit_hash": None,
        "torch_version": torch.__version__,
        "python_version": platform.python_version(),
        "node_world_size": max(1, dist.get_world_size() // dist.get_local_world_size()),
        "accelerator_model_name": torch.cuda.get_device_name() if has_gpu else None,
        "accelerators_per_node": torch.cuda.device_count() if has_gpu else dist.get_local_world_size(),
        "cuda_device_count": torch.cuda.device_count() if has_gpu else 0,
        "cpu_model_name": platform.processor() or platform.machine(),
        "cpu_core_count": psutil.cpu_count(logical=False) or os.cpu_count(),
    }


def print_env(file: TextIO | None = None) -> None:
    """Print what `get_composer_env_dict` returns; `python -m torch.utils.collect_env` prints more."""
    lines = [f"{name}: {value}" for name, value in get_composer_env_dict().items()]
    print("\n".join(lines), file=file or sys.stderr)


def enable_env_report() -> None:
    """Print a report when an exception ends the program, once `configure_excepthook` was called."""
    _set_reporting(is_on=True)


def disable_env_report() -> None:
    """Print no report when an exception ends the program."""
    _set_reporting(is_on=False)


def _set_reporting(*, is_on: bool) -> None:
    global _is_reporting
    _is_reporting = is_on


def configure_excepthook() -> None:
    """Print a report of the machine after an exception that ends the program."""
    previous_hook = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous_hook(kind, error, trace)
        if _is_reporting and not issubclass(kind, KeyboardInterrupt):
            print_env()

    sys.excepthook = report


def is_notebook() -> bool:
    """Return whether the program runs in a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


def is_xla_installed() -> bool:
    """Return whether `torch_xla` is installed."""
    return importlib.util.find_spec("torch_xla") is not None


def is_hpu_installed() -> bool:
    """Return whether Habana's package for torch is installed."""
    return importlib.util.find_spec("habana_frameworks") is not None


class VersionedDeprecationWarning(UserWarning):
    """A warning that a feature will be removed in a release.

    Args:
        message: The replacement, as a sentence.
        remove_version: The release.
    """

    def __init__(self, message: str, remove_version: str) -> None:
        super().__init__(f"{message} It will be removed in version {remove_version}.")


def retry(
    exc_class: Any = Exception,
    num_attempts: int = 3,
    initial_backoff: float = 1.0,
    max_jitter: float = 0.5,
) -> Any:
    """Return a decorator that calls a function again when it raises.

    `@retry` alone stands for `@retry()`. A function with the argument `retry_index` gets the number of the
    call, which starts at 0.

    Args:
        exc_class: The exceptions after which the function is called again: one class or several.
        num_attempts: Maximum number of calls.
        initial_backoff: Seconds before the second call; each pause is twice as long as the previous one.
        max_jitter: Maximum number of seconds, drawn at random, that are added to each pause.
    """
    if not isinstance(exc_class, (type, Sequence)):
        return retry()(exc_class)
    caught: Any = exc_class if isinstance(exc_class, type) else tuple(exc_class)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        takes_index = "retry_index" in _parameters(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            attempt = 0
            while True:
                if takes_index:
                    kwargs["retry_index"] = attempt
                try:
                    return function(*args, **kwargs)
                except caught:
                    if attempt + 1 >= num_attempts:
                        raise
                    time.sleep(initial_backoff * 2**attempt + random.random() * max_jitter)
                    attempt += 1

        return call

    return decorate


def _parameters(function: Callable[..., Any]) -> Collection[str]:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # some functions of C have no signature
        return ()
