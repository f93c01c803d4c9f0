"""Retries of failed calls, as `composer.utils.retry`."""

from __future__ import annotations

import functools
import inspect
import random
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any


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
