"""A process that answers several requests, because its imports take seconds."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def worker(*command: str, env: Mapping[str, str] | None = None) -> Iterator[Callable[[Any], Any]]:
    """Start a process that answers lines of JSON; yield a function that sends one and returns the answer.

    Args:
        command: The command to run. It must end when its stdin closes; it is killed 10 s later.
        env: Variables set on top of this process's.
    """
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def ask(request: Any) -> Any:
            requests.write(json.dumps(request) + "\n")
            requests.flush()
            line = answers.readline()
            assert line, f"{command} has ended"
            return json.loads(line)

        try:
            yield ask
        finally:
            requests.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
