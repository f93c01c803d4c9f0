"""The run of a script or module as the main program of a process that has been forked for it."""

from __future__ import annotations

import ast
import builtins
import gc
import importlib
import importlib.machinery
import io
import os
import runpy
import sys
import types
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from hocket.dist.ranks.process_end import end


def run(arguments: Sequence[str]) -> NoReturn:
    """Run `python -u ARGUMENTS` in this process: `script.py …` or `-m package.module …`.

    Call it with nothing but function calls on the stack: no handler of an exception and no `finally`. An
    exception of the program passes through.
    """
    shared = frozenset(sys.modules)
    for name, number in (("stdout", 1), ("stderr", 2)):
        _unbuffer(name, number)
    sys.orig_argv = [sys.executable, "-u", *arguments]
    importlib.invalidate_caches()
    main = types.ModuleType("__main__")
    main.__dict__.update({"__builtins__": builtins, "__annotations__": {}})
    sys.modules["__main__"] = main
    is_module = arguments[0] == "-m"
    sys.argv = ["-m", *arguments[2:]] if is_module else list(arguments)
    if not sys.flags.safe_path:
        sys.path.insert(0, first_path_entry(arguments))
    code = 0
    try:
        if is_module:
            runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]  # as the interpreter does
        else:
            _run_script(os.path.abspath(arguments[0]), main)
    except SystemExit as error:
        if not isinstance(error.code, int | None):
            gc.unfreeze()
            raise  # the interpreter prints it
        code = error.code or 0
    except BaseException as error:
        gc.unfreeze()  # libraries that are not taken apart in an end in full report leaks
        _hide_frame(error)
        raise
    end(code, shared)


def first_path_entry(arguments: Sequence[str]) -> str:
    """Return `sys.path[0]` of `python ARGUMENTS`."""
    return os.getcwd() if arguments[0] == "-m" else os.path.dirname(os.path.realpath(arguments[0]))


def own_arguments(arguments: Sequence[str]) -> Sequence[str]:
    """Return the arguments from the user's program on: `-m hocket.compat.NAME` runs the program after it."""
    is_runner = arguments[0] == "-m" and arguments[1].startswith("hocket.compat.") and len(arguments) > 2
    return arguments[2:] if is_runner else arguments


def find_source(arguments: Sequence[str]) -> Path | None:
    """Return the Python file that `python ARGUMENTS` runs, None where it runs none; import nothing for it."""
    if arguments[0] != "-m":
        path = Path(arguments[0])
        is_source = path.is_file() and path.suffix != ".pyc" and not zipfile.is_zipfile(path)
        return path if is_source else None
    places: Sequence[str] | None = [os.getcwd(), *sys.path]
    found: Path | None = None
    for name in [*arguments[1].split("."), "__main__"]:
        spec = importlib.machinery.PathFinder.find_spec(name, places)
        if spec is None:
            return found if name == "__main__" else None
        found = None if spec.origin is None else Path(spec.origin)
        places = spec.submodule_search_locations
        if places is None:
            break
    return found


class Program:
    """The imports and the variables in the source of a program, without running it.

    Attributes:
        imports: Names of the top-level modules that it imports somewhere.
        names: Names that it imports from modules.
        variables: Names of the environment variables that it sets.
    """

    def __init__(self, source: bytes) -> None:
        self.imports: set[str] = set()
        self.names: set[str] = set()
        self.variables: set[str] = set()
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            return
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self.imports |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                self.imports.add((node.module or "").partition(".")[0] if not node.level else "")
                self.names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                self._add(node.value, [node.slice])
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                self._add_call(node, node.func)

    def _add_call(self, call: ast.Call, function: ast.Attribute) -> None:
        if function.attr == "putenv":
            self._add(ast.Name("environ"), call.args[:1])
        elif function.attr == "setdefault":
            self._add(function.value, call.args[:1])
        elif function.attr == "update":
            names: list[ast.expr | None] = [ast.Constant(word.arg) for word in call.keywords]
            for argument in call.args:
                names += argument.keys if isinstance(argument, ast.Dict) else []
            self._add(function.value, names)

    def _add(self, mapping: ast.expr, names: Sequence[ast.expr | None]) -> None:
        if getattr(mapping, "attr", getattr(mapping, "id", None)) != "environ":
            return
        self.variables |= {str(name.value) for name in names if isinstance(name, ast.Constant)}


def _run_script(path: str, main: types.ModuleType) -> None:
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__.update({"__file__": path, "__loader__": loader, "__cached__": None})
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _unbuffer(name: str, number: int) -> None:
    """Open standard output or error again as `python -u` does."""
    old = getattr(sys, name)
    if old is None:
        return
    raw = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115 - it is open as long as the process
    raw.name = f"<{name}>"
    stream = io.TextIOWrapper(raw, encoding=old.encoding, errors=old.errors, newline="\n", write_through=True)
    stream.mode = "w"  # type: ignore[misc]
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


def _hide_frame(error: BaseException) -> None:
    """Have the interpreter print the program's own frames alone."""
    assert error.__traceback__ is not None
    own_frames = error.__traceback__.tb_next
    if own_frames is not None and own_frames.tb_frame.f_code is _run_script.__code__:
        own_frames = own_frames.tb_next
    print_error = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, _: TracebackType | None) -> None:
        sys.excepthook = print_error
        value.__traceback__ = sys.last_traceback = own_frames
        print_error(kind, value, own_frames)

    sys.excepthook = hook
