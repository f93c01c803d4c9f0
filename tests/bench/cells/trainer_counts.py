"""Calls, context switches and bytecodes a step: `tests/bench/trainer.py --counts`.

Unlike times, they do not depend on other work of the machine; only the switches vary somewhat.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import sys
import threading
from collections import Counter
from types import FrameType
from typing import Any

import torch
from cells.trainer import CELLS, STEPS, Batches

_COLUMNS = ("training thread: Python", "C", "other threads: Python", "C")


def main(names: list[str]) -> None:
    """Print calls a step by thread, and the process's voluntary context switches."""
    torch.set_num_threads(1)
    print(f"| cell | {' | '.join(_COLUMNS)} | voluntary switches |")
    print("|---|" + "---|" * (len(_COLUMNS) + 1))
    for name in names:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            calls, switches = _count(name)
        keys = [(is_main, event) for is_main in (True, False) for event in ("call", "c_call")]
        columns = [f"{calls[key] / STEPS:.1f}" for key in keys]
        print(f"| {name} | {' | '.join(columns)} | {switches / STEPS:.2f} |")
    for name in names:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            bytecodes = _count_bytecodes(name)
        if not bytecodes:
            continue
        print(f"\n{name}: {sum(bytecodes.values()) / STEPS:.0f} bytecodes of Hocket's on the training thread")
        print("\n| function | bytecodes a step |\n|---|---|")
        for function, number in bytecodes.most_common():
            if number >= STEPS:
                print(f"| `{function}` | {number / STEPS:.0f} |")


def _count(name: str) -> tuple[Counter[tuple[bool, str]], int]:
    run = CELLS[name](Batches())
    run()  # the first round warms up
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    run()
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before
    calls: Counter[tuple[bool, str]] = Counter()
    training = threading.get_ident()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        calls[threading.get_ident() == training, event] += 1

    # Another trainer starts its threads under the profile.
    run = CELLS[name](Batches())
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return calls, switches


def _count_bytecodes(name: str) -> Counter[str]:
    """Count the bytecodes of Hocket's functions on this thread, by function."""
    run = CELLS[name](Batches())
    run()  # the first round warms up
    bytecodes: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if event == "call":
            if f"{os.sep}hocket{os.sep}" not in code.co_filename:
                return None
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
        elif event == "opcode":
            bytecodes[code.co_qualname] += 1
        return trace

    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(None)
    return bytecodes
