"""A program that is run in a forked process, compared with a new interpreter that runs it."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

RUN = "import sys; from hocket.dist.launch.warm.main_module import run; del sys.path[0]; run(sys.argv[1:])"

PROGRAMS = {
    "facts": """
        import io, json, os, sys
        import helper
        out = [sys.argv, sys.orig_argv, sys.path, __name__, __file__, sorted(globals()), os.getcwd()]
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.stdin):
            out.append([stream.encoding, stream.errors, stream.line_buffering, stream.write_through])
            out.append([stream.name, stream.mode, type(stream.buffer).__name__, stream.fileno()])
        out += [__spec__ and __spec__.name, __package__, __doc__, type(__loader__).__name__]
        out += [sys.modules["__main__"].__dict__ is globals(), type(__builtins__).__name__, helper.VALUE]
        print(json.dumps(out)); print(sys.stdin.read())
    """,
    "error": """
        def fail(): raise ValueError("no")
        try:
            fail()
        except ValueError as error:
            raise RuntimeError("worse") from error
    """,
    "syntax": "x = 1\nif x\n    pass\n",
    "decoding": "# coding: latin-1\nassert len('\u00e9') == 2\nprint('\u00e9'.encode('latin-1'))\n1 / 0\n",
    "exit code": "import sys; sys.exit(7)",
    "exit message": "import sys; sys.exit('gone')",
    "no exit": "import atexit; atexit.register(print, 'at exit'); print('end', end='')",
    "interrupt": "raise KeyboardInterrupt",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "hook": """
        import sys
        sys.excepthook = lambda kind, error, trace: print(kind, error, trace.tb_lineno, trace.tb_next)
        sys.last_type = None
        raise ValueError("no")
    """,
    "last": """
        import atexit, sys
        atexit.register(lambda: print(sys.last_type, sys.last_value, sys.last_traceback.tb_lineno))
        1 / 0
    """,
    "group": "raise ExceptionGroup('both', [ValueError(1), TypeError(2)])",
    "pickle": """
        import multiprocessing, pickle, pathlib
        class Point:
            def __init__(self, x): self.x = x
        def double(point): return Point(2 * point.x)
        if __name__ == "__main__":
            print(pickle.loads(pickle.dumps(Point(1))).x, Point.__module__)
            for method in ("spawn", "fork"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(pool.map(double, [Point(3)])[0].x)
    """,
    "annotations": "class A:\n    x: undefined_name = 1\n",
    "threads": """
        import threading, time
        threading.Thread(target=lambda: (time.sleep(0.2), print("late"))).start()
    """,
}


def _ends(command: list[str], folder: Path) -> tuple[int, str, str]:
    done = subprocess.run(
        command, cwd=folder, input="from\nstdin", capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_script_runs_as_in_a_new_interpreter(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder of scripts"
    folder.mkdir()
    (folder / "helper.py").write_text("VALUE = 3\n")
    encoding = "latin-1" if name == "decoding" else "utf-8"
    (folder / "script.py").write_text(textwrap.dedent(PROGRAMS[name]), encoding=encoding)
    (tmp_path / "link.py").symlink_to(folder / "script.py")
    for path in ("folder of scripts/script.py", *(["link.py"] if name in ("facts", "error") else [])):
        arguments = [path, "an", "--argument"]
        expected = _ends([sys.executable, "-u", *arguments], tmp_path)
        assert _ends([sys.executable, "-c", RUN, *arguments], tmp_path) == expected


@pytest.mark.parametrize("name", ["facts", "error", "exit code"])
@pytest.mark.parametrize("module", ["package.script", "package", "absent.module"])
def test_a_module_runs_as_in_a_new_interpreter(tmp_path: Path, name: str, module: str) -> None:
    folder = tmp_path / "package"
    folder.mkdir()
    (tmp_path / "helper.py").write_text("VALUE = 3\n")
    for file in ("script.py", "__main__.py"):
        (folder / file).write_text(textwrap.dedent(PROGRAMS[name]))
    (folder / "__init__.py").touch()
    arguments = ["-m", module, "an", "--argument"]
    expected = _ends([sys.executable, "-u", *arguments], tmp_path)
    assert _ends([sys.executable, "-c", RUN, *arguments], tmp_path) == expected
