"""A program that is run in a forked process, compared with a new interpreter that runs it."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hocket.dist.ranks.process_end import own_extension

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
    "ending": """
        import atexit, concurrent.futures, logging.handlers, pathlib, sys, weakref
        import helper
        PREFIX = "finalized"
        class Final:
            def __init__(self, name): self.name = name
            def __del__(self): print(PREFIX, self.name, helper.VALUE, pathlib.Path("x"))
        class Ring(Final):
            def __init__(self, name): self.name, self.own, self.file = name, self, open(name, "w")
            def __del__(self): self.file.write("last"); super().__del__()
        helper.kept, global_, ring = Final("kept"), Final("global"), Ring("ring.txt")
        weakref.finalize(global_, print, "weakly")
        atexit.register(print, "at exit")
        handler = logging.handlers.MemoryHandler(9, target=logging.StreamHandler())
        logging.getLogger().addHandler(handler)
        logging.getLogger().warning("logged")
        concurrent.futures.ThreadPoolExecutor(1).submit(print, "pooled")
        sys.exit(True)
    """,
    "files": """
        import atexit, concurrent.futures, json, logging.handlers, sys, weakref
        import helper
        class Plain: pass
        plain = Plain()
        weakref.finalize(plain, print, "weakly")
        atexit.register(print, "at exit")
        handler = logging.handlers.MemoryHandler(9, target=logging.StreamHandler())
        logging.getLogger().addHandler(handler)
        logging.getLogger().warning("logged")
        concurrent.futures.ThreadPoolExecutor(1).submit(print, "pooled")
        for number, holder in enumerate([globals(), helper.__dict__, json.__dict__]):
            holder["held"] = open(f"held-{number}.txt", "w")
            holder["held"].write("held")
        sys.exit(True)
    """,
    "compressed": """
        import bz2, gzip, lzma
        first = gzip.GzipFile("held-0.txt", "wb", mtime=0)
        second, third = bz2.open("held-1.txt", "wt"), lzma.open("held-2.txt", "wt")
        first.write(b"held"), second.write("held"), third.write("held")
    """,
    "generator": """
        def left():
            try: yield
            finally: print("left")
        kept = left()
        next(kept)
    """,
    "daemon": """
        import sys, threading, time
        started = threading.Event()
        def run():
            started.set()
            while True: time.sleep(0.001); time.monotonic()
        class Final:
            def __del__(self): print("finalized")
        held = Final()
        threading.Thread(target=run, daemon=True).start()
        started.wait()
        sys.exit(3)
    """,
    "closed": "import sys; sys.stdout.close(); sys.exit(None)",
    "copied": """
        import sys
        class Copy:
            def __init__(self, stream): self.stream = stream
            def write(self, text): return self.stream.write(text)
            def flush(self): self.stream.flush()
        sys.stdout = Copy(sys.stdout)
        print("copied")
    """,
    "unflushed": """
        import sys
        class Copy:
            write = sys.stdout.write
            def __repr__(self): return "<copy>"
        sys.stdout = Copy()
        print("copied")
    """,
    "unwritten": "import os, sys; sys.stdout = open('/dev/full', 'w'); print('lost')",
}


def _ends(command: list[str], folder: Path) -> tuple[int, str, str]:
    done = subprocess.run(
        command, cwd=folder, input="from\nstdin", capture_output=True, text=True, timeout=60
    )
    lines = done.stdout.splitlines(keepends=True)
    # The collector calls finalizers at the end in an order of its own, which Python 3.12 changed.
    others = max((n for n, line in enumerate(lines, 1) if not line.startswith("finalized")), default=0)
    return done.returncode, "".join(lines[:others] + sorted(lines[others:])), done.stderr


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
        written = {file.name: file.read_bytes() for file in tmp_path.glob("*.txt")}
        for file in tmp_path.glob("*.txt"):
            file.unlink()
        assert _ends([sys.executable, "-c", RUN, *arguments], tmp_path) == expected
        assert {file.name: file.read_bytes() for file in tmp_path.glob("*.txt")} == written
        files = {"ending": ["ring.txt"], "files": [f"held-{number}.txt" for number in range(3)]}
        files["compressed"] = files["files"]
        assert sorted(written) == files.get(name, [])


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


def test_a_library_in_c_that_the_program_has_loaded_is_named() -> None:
    pytest.importorskip("xxhash")
    shared = {name for name in sys.modules if name.partition(".")[0] != "xxhash"}
    assert str(own_extension(shared)).startswith("xxhash.")
    assert own_extension(sys.modules) is None
